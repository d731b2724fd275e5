//! Decodes the batches of KV events that vLLM and SGLang publish: msgpack, `[time, [event, …], data-parallel rank]`.
//!
//! An event of SGLang, and of vLLM since 0.30, is a map with its name under `type`; before, vLLM's was an array that begins with its name.
//! Unknown fields and events are ignored. A malformed batch is an error as a whole, because the events in it are lost.

use crate::event::{BlocksRemoved, BlocksStored, EngineEvent, EngineHash, ExtraKeys, UnknownMedium};
use rmpv::{ValueRef, decode::read_value_ref_with_max_depth};
use tandem_kv::{ImageId, ImageStart, Tier, TokenId};

/// A batch of KV events: the changes that one step of the engine made to its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// The changes, in the order in which they were made.
    pub events: Vec<EngineEvent>,
    /// The engine's data-parallel rank; `None` if the batch does not name it.
    pub data_parallel_rank: Option<u32>,
}

/// A payload that is not a batch of KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedBatch {
    /// The payload is longer than any batch.
    #[error("a batch has {0} bytes, more than the limit of {PAYLOAD_MAX}")]
    TooLong(usize),
    /// The payload has more values than any batch.
    #[error("a batch has more than {VALUES_MAX} values")]
    TooMany,
    /// The payload is not valid msgpack.
    #[error("a batch is not msgpack")]
    NotMsgpack,
    /// The payload is valid msgpack, but not a list of events.
    #[error("a batch is not a list of events")]
    NotABatch,
    /// A field of an event is missing or has the wrong type.
    #[error("an event's field {0} is missing or has the wrong type")]
    Field(&'static str),
}

/// Maximum size of a payload that is decoded, in bytes. A token takes at most five bytes, so the tokens of a step with a million tokens fit.
pub(super) const PAYLOAD_MAX: usize = 16 << 20;
/// Maximum number of values in a payload, with the values in lists and maps. A decoded value takes tens of bytes, even if it takes one byte
/// in the payload. The tokens of a step with a million tokens fit, with the hash and the keys of each block.
const VALUES_MAX: usize = 2 << 20;
/// Maximum depth of nesting that is decoded. Known fields need six levels: batch, events, event, extra keys, a block's keys, one key. Ignored fields
/// may be nested deeper.
const DEPTH_MAX: usize = 16;

/// Maximum length of a block's hash, in bytes. The mirror keeps the hashes; the longest that vLLM computes is a SHA-256.
const HASH_MAX: usize = 64;
/// The position of a field that arrays do not have.
const NOT_LISTED: usize = usize::MAX;
/// Maximum length of the kept name of an unknown medium, in characters.
const MEDIUM_CHARS_MAX: usize = 32;

/// Returns the batch in this payload.
///
/// # Errors
/// Fails if the payload is not a batch.
pub fn decode(payload: &[u8]) -> Result<EventBatch, MalformedBatch> {
    if payload.len() > PAYLOAD_MAX {
        return Err(MalformedBatch::TooLong(payload.len()));
    }
    check_values(payload)?;
    let mut rest = payload;
    let batch = read_value_ref_with_max_depth(&mut rest, DEPTH_MAX).map_err(|_| MalformedBatch::NotMsgpack)?;
    let ValueRef::Array(fields) = batch else { return Err(MalformedBatch::NotABatch) };
    let Some(ValueRef::Array(events)) = fields.get(1) else { return Err(MalformedBatch::NotABatch) };
    let rank = fields.get(2).and_then(ValueRef::as_u64).and_then(|rank| u32::try_from(rank).ok());
    let events = events.iter().filter_map(|event| self::event(event).transpose()).collect::<Result<_, _>>()?;
    Ok(EventBatch { events, data_parallel_rank: rank })
}

/// Checks the number of the payload's values before memory is allocated for them.
fn check_values(payload: &[u8]) -> Result<(), MalformedBatch> {
    // `pending` is the number of values that lists and maps have announced and that are not read yet.
    let (mut at, mut pending, mut found) = (0_usize, 1_u64, 0);
    while pending > 0 {
        (found, pending) = (found + 1, pending - 1);
        if found > VALUES_MAX {
            return Err(MalformedBatch::TooMany);
        }
        let marker = *payload.get(at).ok_or(MalformedBatch::NotMsgpack)?;
        at += 1;
        // The number of bytes of the value's size field, and of its other bytes of fixed length.
        let (size_len, fixed) = match marker {
            0xc4 | 0xd9 => (1, 0),
            0xc5 | 0xda | 0xdc | 0xde => (2, 0),
            0xc6 | 0xdb | 0xdd | 0xdf => (4, 0),
            0xc7 => (1, 1),
            0xc8 => (2, 1),
            0xc9 => (4, 1),
            0xcc..=0xcf => (0, 1 << (marker - 0xcc)),
            0xd0..=0xd3 => (0, 1 << (marker - 0xd0)),
            0xd4..=0xd8 => (0, 1 + (1 << (marker - 0xd4))),
            0xca => (0, 4),
            0xcb => (0, 8),
            _ => (0, 0),
        };
        let digits = payload.get(at..at + size_len).ok_or(MalformedBatch::NotMsgpack)?;
        let size = digits.iter().fold(0_u64, |size, digit| size << 8 | u64::from(*digit));
        at += size_len + fixed;
        match marker {
            0x80..=0x8f => pending += 2 * u64::from(marker & 0xf),
            0x90..=0x9f => pending += u64::from(marker & 0xf),
            0xa0..=0xbf => at += usize::from(marker & 0x1f),
            0xdc | 0xdd => pending += size,
            0xde | 0xdf => pending += 2 * size,
            _ => at = at.saturating_add(size as usize),
        }
    }
    Ok(())
}

/// The fields of an event: either by name, or by position, counted after the event's name.
#[derive(Clone, Copy)]
enum Fields<'a> {
    Named(&'a [(ValueRef<'a>, ValueRef<'a>)]),
    Listed(&'a [ValueRef<'a>]),
}

impl<'a> Fields<'a> {
    /// Returns the field with this name or at this position; `None` if it is absent or nil.
    fn get(self, name: &str, position: usize) -> Option<&'a ValueRef<'a>> {
        let value = match self {
            Self::Named(fields) => fields.iter().find(|(key, _)| text(key) == Some(name)).map(|(_, value)| value),
            Self::Listed(fields) => fields.get(position),
        };
        value.filter(|value| !matches!(value, ValueRef::Nil))
    }

    /// Returns the converted field; `None` if the field is absent. A field that cannot be converted is an error.
    fn optional<T>(
        self,
        name: &'static str,
        position: usize,
        convert: impl FnOnce(&'a ValueRef<'a>) -> Option<T>,
    ) -> Result<Option<T>, MalformedBatch> {
        self.get(name, position).map(|value| convert(value).ok_or(MalformedBatch::Field(name))).transpose()
    }

    fn required<T>(
        self,
        name: &'static str,
        position: usize,
        convert: impl FnOnce(&'a ValueRef<'a>) -> Option<T>,
    ) -> Result<T, MalformedBatch> {
        self.optional(name, position, convert)?.ok_or(MalformedBatch::Field(name))
    }
}

fn event(event: &ValueRef<'_>) -> Result<Option<EngineEvent>, MalformedBatch> {
    let fields = match event {
        ValueRef::Map(fields) => Fields::Named(fields),
        ValueRef::Array(fields) => Fields::Listed(fields),
        _ => return Err(MalformedBatch::NotABatch),
    };
    Ok(match fields.required("type", 0, text)? {
        "BlockStored" => Some(EngineEvent::Stored(stored(fields)?)),
        "BlockRemoved" => Some(EngineEvent::Removed(removed(fields)?)),
        "AllBlocksCleared" => Some(EngineEvent::Cleared),
        _ => None,
    })
}

fn stored(fields: Fields<'_>) -> Result<BlocksStored, MalformedBatch> {
    let tier = tier(fields.get("medium", 6), fields.get("locality", 12));
    let hashes = fields.required("block_hashes", 1, |value| list(value, hash))?;
    let lora = fields.optional("lora_name", 7, text)?;
    let keys = fields.optional("extra_keys", 8, |value| list(value, |keys| extra_keys(keys, lora)))?;
    let parent = fields.optional("parent_block_hash", 2, hash)?;
    let salt = fields.optional("cache_salt", NOT_LISTED, text)?;
    let keys = match (lora, fields.get("lora_id", 5), salt) {
        // The events of old versions of vLLM do not name the LoRA.
        (None, Some(_), _) => vec![ExtraKeys::Other; hashes.len()],
        // SGLang repeats the salt in all events of a prompt. As with vLLM, only the prompt's first block has it as a key.
        (_, None, Some(salt)) if parent.is_none() => vec![ExtraKeys::Text(salt.to_owned())],
        _ => keys.unwrap_or_default(),
    };
    Ok(BlocksStored {
        hashes,
        parent,
        tokens: fields.required("token_ids", 3, |value| list(value, token))?,
        block_size: fields.required("block_size", 4, number)?,
        lora: lora.map(str::to_owned),
        extra_keys: keys,
        tier,
        group: fields.optional("group_idx", 9, number)?,
        kind: fields.optional("kv_cache_spec_kind", 10, text)?.map(str::to_owned),
        window_tokens: fields.optional("kv_cache_spec_sliding_window", 11, number)?,
        session: fields.optional("session_id", 14, text)?.map(str::to_owned),
    })
}

fn removed(fields: Fields<'_>) -> Result<BlocksRemoved, MalformedBatch> {
    Ok(BlocksRemoved {
        hashes: fields.required("block_hashes", 1, |value| list(value, hash))?,
        tier: tier(fields.get("medium", 2), fields.get("locality", 4)),
        group: fields.optional("group_idx", 3, number)?,
    })
}

fn list<'a, T>(value: &'a ValueRef<'a>, convert: impl Fn(&'a ValueRef<'a>) -> Option<T>) -> Option<Vec<T>> {
    match value {
        ValueRef::Array(values) => values.iter().map(convert).collect(),
        _ => None,
    }
}

fn text<'a>(value: &'a ValueRef<'a>) -> Option<&'a str> {
    match value {
        ValueRef::String(text) => text.as_str(),
        _ => None,
    }
}

fn number(value: &ValueRef<'_>) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}

/// Returns a token. SGLang with a draft model (EAGLE) sends each token as a pair with the next one.
fn token(value: &ValueRef<'_>) -> Option<TokenId> {
    match value {
        ValueRef::Array(pair) => pair.first().and_then(number),
        _ => number(value),
    }
}

/// Returns the hash in a field; `None` if the field has another type, or if the hash is too long. vLLM sends 64 bits of a hash as a number or,
/// if so configured, the whole hash as bytes. SGLang, and versions of vLLM that use Python's own hash function, send signed numbers.
fn hash(value: &ValueRef<'_>) -> Option<EngineHash> {
    match value {
        ValueRef::Integer(number) => number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned)).map(EngineHash::Number),
        ValueRef::Binary(bytes) if bytes.len() <= HASH_MAX => Some(EngineHash::Bytes((*bytes).into())),
        _ => None,
    }
}

/// Returns the extra keys of a block: the name of the LoRA, the images as pairs, and the cache salt, as far as the block has them.
fn extra_keys(value: &ValueRef<'_>, lora: Option<&str>) -> Option<ExtraKeys> {
    let keys: &[ValueRef<'_>] = match value {
        ValueRef::Nil => &[],
        ValueRef::Array(keys) => &keys[..],
        _ => return None,
    };
    let keys = match (lora, keys.split_first()) {
        (None, _) => keys,
        (Some(name), Some((first, keys))) if text(first) == Some(name) => keys,
        (Some(_), _) => return Some(ExtraKeys::Other),
    };
    let (pairs, rest) = keys.split_at(keys.iter().take_while(|key| matches!(key, ValueRef::Array(_))).count());
    let salt = match rest {
        [] => None,
        [ValueRef::String(salt)] if salt.as_str().is_some() => salt.as_str().map(str::to_owned),
        _ => return Some(ExtraKeys::Other),
    };
    if pairs.is_empty() {
        return Some(salt.map_or(ExtraKeys::None, ExtraKeys::Text));
    }
    let images = pairs.iter().map(image).collect::<Option<Vec<_>>>();
    Some(images.map_or(ExtraKeys::Other, |images| ExtraKeys::Images { salt, images: images.into_iter().flatten().collect() }))
}

/// Returns the image of a pair of identity and offset in the block; `None` if it is not such a pair, or Tandem has not made the identity. The
/// inner value is `None` if the image begins in an earlier block, so that its offset is negative.
fn image(pair: &ValueRef<'_>) -> Option<Option<ImageStart>> {
    let ValueRef::Array(pair) = pair else { return None };
    let [identity, offset] = &pair[..] else { return None };
    let ValueRef::Integer(offset) = offset else { return None };
    let id = text(identity).and_then(ImageId::from_text)?;
    Some(offset.as_u64().and_then(|at| usize::try_from(at).ok()).map(|at| ImageStart { at, id }))
}

/// Returns the tier of an event's blocks. Versions of vLLM that know only the device's memory send no medium. Blocks on another host (`locality`) are in
/// a store, whatever memory that has.
fn tier(medium: Option<&ValueRef<'_>>, locality: Option<&ValueRef<'_>>) -> Result<Tier, UnknownMedium> {
    let unknown = |value: &ValueRef<'_>| UnknownMedium(text(value).unwrap_or("").chars().take(MEDIUM_CHARS_MAX).collect());
    let known = |medium| text(medium).and_then(tier_of_medium).ok_or_else(|| unknown(medium));
    let tier = medium.map_or(Ok(Tier::Device), known)?;
    match locality {
        None => Ok(tier),
        Some(locality) => match text(locality) {
            Some("LOCAL") => Ok(tier),
            Some("REMOTE") => Ok(Tier::Store),
            _ => Err(unknown(locality)),
        },
    }
}

/// Returns the tier of a medium, as engines name it; `None` if the name is unknown. Case has no meaning: vLLM's Mooncake connector writes `cpu`.
pub fn tier_of_medium(name: &str) -> Option<Tier> {
    Some(match &*name.to_ascii_uppercase() {
        "GPU" => Tier::Device,
        "CPU" | "CPU_PINNED" => Tier::Host,
        "DISK" | "STORAGE" => Tier::Disk,
        "EXTERNAL" => Tier::Store,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
