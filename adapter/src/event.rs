//! The events with which an engine reports changes of its prefix cache, independent of their wire format.

use tandem_kv::TokenId;

/// The engine's own hash of a block and all blocks before it. Tandem only compares these hashes.
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
    /// Blocks were dropped. An engine that holds the same content in two blocks reports the removal of each.
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
    /// The tokens of all blocks. Empty if the engine does not report them.
    pub tokens: Vec<TokenId>,
    /// The number of tokens in a block.
    pub block_size: u32,
    /// Whether the blocks were computed with a LoRA adapter.
    pub lora: bool,
    /// The inputs of each block's hash besides the tokens: one entry for each block, or no entries if there are no such inputs.
    pub extra_keys: Vec<ExtraKeys>,
    /// The memory in which the blocks are.
    pub medium: Medium,
    /// The group of layers whose KV the blocks hold; `None`: the engine does not name a group. An engine with several kinds of attention
    /// has a group for each kind.
    pub group: Option<u32>,
    /// The kind of attention of the group's layers; `None`: the engine does not name it.
    pub kind: Option<String>,
    /// The session of the request that stored the blocks; `None` if the request named no session.
    pub session: Option<String>,
}

/// Blocks that were dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksRemoved {
    /// The hashes of the dropped blocks.
    pub hashes: Vec<EngineHash>,
    /// The memory from which the blocks were dropped.
    pub medium: Medium,
    /// The group of layers whose KV the blocks held; `None`: the engine does not name a group.
    pub group: Option<u32>,
}

/// The inputs of a block's hash besides the block's tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExtraKeys {
    /// The hash has no other inputs.
    #[default]
    None,
    /// One text: a cache salt, or the name of a LoRA adapter.
    Text(String),
    /// Other inputs, such as an image.
    Other,
}

/// The memory in which an engine keeps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// The device's memory.
    Device,
    /// The host's memory.
    Host,
    /// Storage, another machine, or a memory that Tandem does not know.
    Elsewhere,
}
