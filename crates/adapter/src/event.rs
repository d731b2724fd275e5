//! The events with which an engine reports changes of its prefix cache, independent of their wire format.

use tandem_kv::{ImageStart, Tier, TokenId};

/// The engine's own hash of a block and all blocks before it. Tandem only compares these hashes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineHash {
    /// The engine sends the hash as a number.
    Number(u64),
    /// The engine sends the hash as bytes.
    Bytes(Box<[u8]>),
}

/// A change of an engine's prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Blocks were stored. An engine that holds the same content in two blocks reports each of them.
    Stored(BlocksStored),
    /// Blocks were dropped. An engine that holds the same content in two blocks reports the removal of each.
    Removed(BlocksRemoved),
    /// The engine dropped all blocks, in every medium.
    Cleared,
}

/// Consecutive blocks of one prompt, which the engine has stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksStored {
    /// The hashes of the blocks, in the order of the prompt.
    pub hashes: Vec<EngineHash>,
    /// The hash of the block before the first stored block; `None` if the stored blocks begin a prompt.
    pub parent: Option<EngineHash>,
    /// The tokens of all blocks; empty if the engine does not report them.
    pub tokens: Vec<TokenId>,
    /// The number of tokens in a block.
    pub block_size: u32,
    /// The name of the LoRA with which the blocks were computed; `None` if they were computed without a LoRA.
    pub lora: Option<String>,
    /// The inputs of each block's hash besides the tokens and the LoRA. Blocks without an entry, at the end of the list, have no such inputs.
    pub extra_keys: Vec<ExtraKeys>,
    /// The tier in which the blocks are stored.
    pub tier: Result<Tier, UnknownMedium>,
    /// The group of layers whose KV the blocks hold; `None` if the engine does not name a group. An engine with several kinds of attention has a
    /// group for each kind.
    pub group: Option<u32>,
    /// The kind of attention of the group's layers; `None` if the engine does not name it.
    pub kind: Option<String>,
    /// The attention window of the group's layers in tokens, the current token included; `None` if the engine does not name a window.
    pub window_tokens: Option<u32>,
    /// The session of the request that stored the blocks; `None` if the request named no session.
    pub session: Option<String>,
}

/// Blocks that the engine has dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksRemoved {
    /// The hashes of the dropped blocks.
    pub hashes: Vec<EngineHash>,
    /// The tier from which the blocks were dropped.
    pub tier: Result<Tier, UnknownMedium>,
    /// The group of layers whose KV the blocks held; `None` if the engine does not name a group.
    pub group: Option<u32>,
}

/// The inputs of a block's hash besides the block's tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExtraKeys {
    /// The tokens and the LoRA are the only inputs of the hash.
    #[default]
    None,
    /// The hash has one more input, a text: the cache salt.
    Text(String),
    /// The block has tokens of images. `images` are those that begin in it; the others are inputs of a block before it.
    Images {
        /// The cache salt; `None` if the block is not a prompt's first one.
        salt: Option<String>,
        /// The images, with their places in the block.
        images: Vec<ImageStart>,
    },
    /// The hash has other inputs, such as an image whose identity Tandem has not made, or a LoRA without a name.
    Other,
}

impl ExtraKeys {
    /// Returns the cache salt and the images; `None` if there are other inputs.
    pub(crate) fn known(&self) -> Option<(Option<&str>, &[ImageStart])> {
        match self {
            Self::None => Some((None, &[])),
            Self::Text(salt) => Some((Some(salt), &[])),
            Self::Images { salt, images } => Some((salt.as_deref(), images)),
            Self::Other => None,
        }
    }
}

/// The name of a kind of memory that Tandem does not know, shortened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UnknownMedium(pub String);
