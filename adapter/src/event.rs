//! What an engine reports of its prefix cache, whatever its wire format.

use tandem_kv::TokenId;

/// The engine's own name of a block and all blocks before it. Opaque: only equality means something.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineHash {
    /// A hash that is sent as a number.
    Number(u64),
    /// A hash that is sent as bytes.
    Bytes(Box<[u8]>),
}

/// A change of an engine's prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Blocks were stored. An engine that holds the same content in two blocks reports both.
    Stored(BlocksStored),
    /// Blocks were dropped, once for each block that was stored.
    Removed(BlocksRemoved),
    /// All blocks were dropped, in every medium.
    Cleared,
}

/// Consecutive blocks of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksStored {
    /// The hashes of the blocks, in the order of the prompt.
    pub hashes: Vec<EngineHash>,
    /// The hash of the block before the first of these blocks; `None` if they begin a prompt.
    pub parent: Option<EngineHash>,
    /// The tokens of all blocks. Empty if the engine does not know them.
    pub tokens: Vec<TokenId>,
    /// Tokens in a block.
    pub block_size: u32,
    /// The blocks were computed with a LoRA adapter.
    pub lora: bool,
    /// What else than the tokens is part of each block's hash; one for each block, or empty if there is nothing.
    pub extra_keys: Vec<ExtraKeys>,
    /// Where the blocks are.
    pub medium: Medium,
    /// The layers whose KV the blocks hold; engines with several kinds of attention have a group for each.
    pub group: Option<u32>,
    /// The kind of attention of the group.
    pub kind: Option<String>,
    /// The session of the request that stored the blocks, if the request named one.
    pub session: Option<String>,
}

/// Blocks that were dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksRemoved {
    /// The hashes of the blocks.
    pub hashes: Vec<EngineHash>,
    /// From where they were dropped.
    pub medium: Medium,
    /// The layers whose KV they held.
    pub group: Option<u32>,
}

/// What else than the tokens is part of a block's hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExtraKeys {
    /// There is nothing else.
    #[default]
    None,
    /// One text: a cache salt, or the name of a LoRA adapter.
    Text(String),
    /// Anything else, such as an image.
    Other,
}

/// The memory in which an engine keeps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// The device's memory.
    Device,
    /// The host's memory.
    Host,
    /// Storage, another machine, or a memory that is not known here.
    Elsewhere,
}
