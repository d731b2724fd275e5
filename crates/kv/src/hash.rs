//! The sequence hash of a block: a hash over its tokens and everything before it, under a key that only the cluster's processes know.
//!
//! Without the key an attacker can neither construct two prompts with one hash, nor compare observed hashes with those of guessed
//! prompts. The hash is SipHash-2-4 (Aumasson and Bernstein 2012): a keyed function for short inputs that an attacker chooses.

use crate::{TokenId, mix};
use siphasher::sip::SipHasher24;
use std::{fmt, hash::Hasher, sync::Arc};

/// The key of a cluster's sequence hashes. Hashes under different keys are unrelated. The key is never sent and never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HashKey([u8; 16]);

impl HashKey {
    /// The key of a cluster without a secret: all zero, so anyone can compute its hashes.
    pub const NONE: Self = Self([0; 16]);

    /// Creates a key from 128 secret bits.
    pub fn new(secret: [u8; 16]) -> Self {
        Self(secret)
    }

    fn hasher(&self) -> SipHasher24 {
        SipHasher24::new_with_key(&self.0)
    }
}

impl fmt::Debug for HashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashKey(…)")
    }
}

/// Identifies a full block *and all blocks before it*. A hash is only a hint: owners of KV compare tokens on every hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceHash(pub u64);

/// Everything besides the tokens that decides whether KV may be shared. Prompts of different namespaces never share a block.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(Arc<[u8]>);

impl Namespace {
    /// Returns the namespace of these properties. Each property is encoded with its length, so different properties never give equal bytes.
    pub fn new(model: &str, revision: &str, lora: &str, cache_salt: &str) -> Self {
        let mut bytes = Vec::new();
        for part in [model, revision, lora, cache_salt] {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part.as_bytes());
        }
        Self(bytes.into())
    }

    /// Returns this namespace restricted to one account. The account is an additional part, so the namespace of an account with an empty name
    /// also differs from this one.
    pub fn of_account(&self, account: &str) -> Self {
        Self([&*self.0, &(account.len() as u64).to_le_bytes(), account.as_bytes()].concat().into())
    }

    /// Returns whether all clients share the namespace, because it has neither a cache salt nor an account.
    pub fn is_shared(&self) -> bool {
        let mut rest = &*self.0;
        let parts: [_; 5] = std::array::from_fn(|_| split_part(&mut rest));
        matches!(parts, [Some(_), Some(_), Some(_), Some([]), None]) && rest.is_empty()
    }

    /// Returns the id of the model that computes the KV; `None` if the bytes are not an encoding of [`Namespace::new`].
    pub fn model(&self) -> Option<&str> {
        str::from_utf8(split_part(&mut &*self.0)?).ok()
    }

    /// Returns the namespace from which [`Namespace::as_bytes`] has returned these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// Returns the encoding of the namespace that is sent on the wire.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the parent hash of a prompt's first block.
    pub fn root(&self, key: &HashKey) -> SequenceHash {
        let mut hasher = key.hasher();
        hasher.write(&self.0);
        SequenceHash(hasher.finish())
    }
}

/// The identity of an image's bytes in one cache namespace. Its text is 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageId(pub [u8; 32]);

impl ImageId {
    /// Returns the identity with this text; `None` if the text is not 64 lowercase hexadecimal digits.
    pub fn from_text(text: &str) -> Option<Self> {
        let is_digit = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 64 || !text.bytes().all(is_digit) {
            return None;
        }
        let mut id = [0; 32];
        for (at, byte) in id.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..][..2], 16).ok()?;
        }
        Some(Self(id))
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Where an image begins among the tokens that are hashed. All pictures of one size have the same tokens, so the identity is hashed, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageStart {
    /// The position of the image's first token.
    pub at: usize,
    /// The image's identity.
    pub id: ImageId,
}

fn split_part<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    *bytes = rest;
    Some(part)
}

impl SequenceHash {
    /// A marker. A worker that reports this block as cached has a cache whose prefixes can be reused only up to its reuse points
    /// (docs/adr/049-reuse-points.md).
    pub const REUSE_POINTS: Self = Self::marker(0x7573_6550_7473);

    /// A marker. If a worker reports this block as cached, the other blocks that it reports are approximate, because its model has layers
    /// whose cached state Tandem does not track.
    pub const UNFOLLOWED_LAYERS: Self = Self::marker(0x666f_6c6c_6f77);

    /// Returns the marker of a reuse point at the end of this block. A worker that reports [`Self::REUSE_POINTS`] also reports these markers,
    /// to say up to which blocks a cached prefix can be reused.
    #[must_use]
    pub const fn reuse_point(self) -> Self {
        Self::marker(mix(self.0 ^ Self::REUSE_POINTS.0) >> 16)
    }

    /// Returns whether this is a marker: a hash that stands for no tokens, but says something about other blocks of the worker that reports
    /// it. A marker begins a prompt or follows another marker. One in 65,536 hashes of blocks with tokens has the same first 16 bits by
    /// chance.
    pub const fn is_marker(self) -> bool {
        self.0 >> 48 == 0x5265
    }

    pub(crate) const fn marker(bits: u64) -> Self {
        Self(0x5265 << 48 | bits)
    }

    /// Returns the hash of a block of `tokens` that follows the block with this hash.
    pub fn child(self, key: &HashKey, tokens: &[TokenId]) -> Self {
        let mut hasher = key.hasher();
        hasher.write(&self.0.to_le_bytes());
        for tokens in tokens.chunks(HASHED_TOKENS) {
            let mut bytes = [0; HASHED_TOKENS * 4];
            for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            hasher.write(&bytes[..tokens.len() * 4]);
        }
        Self(hasher.finish())
    }

    /// Returns the hash of the same block if an image begins at its token `at`. The later blocks of the image are the children of this one, so
    /// they do not repeat it.
    fn with_image(self, key: &HashKey, at: usize, ImageId(id): ImageId) -> Self {
        let mut hasher = key.hasher();
        hasher.write(&self.0.to_le_bytes());
        hasher.write(&(at as u64).to_le_bytes());
        hasher.write(&id);
        // With this byte, the input has another length than that of any block of tokens.
        hasher.write(&[1]);
        Self(hasher.finish())
    }
}

/// The number of tokens that are copied to the stack as bytes and hashed together: a block of the default size.
const HASHED_TOKENS: usize = 16;

/// Returns the hashes of all full blocks of `tokens`, in order.
pub fn sequence_hashes(key: &HashKey, namespace: &Namespace, block_size: usize, tokens: &[TokenId]) -> Vec<SequenceHash> {
    child_hashes(key, namespace.root(key), block_size, tokens, &[])
}

/// Returns the hashes of all full blocks of `tokens` that follow the block with hash `parent`, in order. The parent of a prompt's first
/// block is [`Namespace::root`]. `images` are those that begin in these tokens, in order.
pub fn child_hashes(
    key: &HashKey,
    parent: SequenceHash,
    block_size: usize,
    tokens: &[TokenId],
    mut images: &[ImageStart],
) -> Vec<SequenceHash> {
    let (mut last, mut end) = (parent, 0);
    tokens
        .chunks_exact(block_size)
        .map(|block| {
            last = last.child(key, block);
            let begin = end;
            end += block_size;
            while let Some((image, rest)) = images.split_first().filter(|(image, _)| image.at < end) {
                last = last.with_image(key, image.at.saturating_sub(begin), image.id);
                images = rest;
            }
            last
        })
        .collect()
}

/// Returns the hash of all tokens of a prompt in its namespace. Two different prompts have the same hash only by chance.
pub fn prompt_digest(key: &HashKey, namespace: &Namespace, tokens: &[TokenId]) -> u64 {
    namespace.root(key).child(key, tokens).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const PROMPT: [TokenId; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 151_643, u32::MAX, 0, 9, 10];

    const KEY: HashKey = HashKey([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);

    #[test]
    fn namespace_contains_its_model() {
        for model in ["", "org/model"] {
            let namespace = Namespace::new(model, "main", "", "tenant");
            assert_eq!((namespace.model(), namespace.of_account("a").model()), (Some(model), Some(model)));
        }
        for malformed in [&b""[..], b"model", &u64::MAX.to_le_bytes(), &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]] {
            assert_eq!(Namespace::from_bytes(malformed).model(), None);
        }
    }

    #[test]
    fn namespace_is_shared_only_if_it_has_neither_salt_nor_account() {
        let shared = Namespace::new("model", "main", "", "");
        assert!(shared.is_shared() && Namespace::new("", "", "", "").is_shared());
        let bytes = shared.as_bytes();
        let separate = [
            Namespace::new("model", "main", "", "tenant"),
            shared.of_account(""),
            shared.of_account("tenant"),
            Namespace::new("model", "main", "", "tenant").of_account("tenant"),
            Namespace::from_bytes(&bytes[..bytes.len() - 1]),
            Namespace::from_bytes(&[bytes, &[0]].concat()),
            Namespace::from_bytes(&u64::MAX.to_le_bytes()),
            Namespace::from_bytes(&[]),
        ];
        for namespace in separate {
            assert!(!namespace.is_shared(), "{namespace:?}");
        }
    }

    /// The values were computed by an implementation of SipHash-2-4 in 20 lines of Python, written from its paper and checked against the
    /// paper's test vector (key 00…0f, input 00…0e, result a129ca6149be45e5). In the hashed bytes, numbers are little-endian and lengths
    /// have 64 bits. If this test fails, routers and workers of two versions disagree on the identity of blocks.
    #[test]
    fn sequence_hashes_equal_reference_values() {
        let namespace = Namespace::new("SmolLM2-135M-Instruct", "main", "", "tenant-a");
        let keyed = [0x16ae_ff87_33af_f2a0, 0xade2_3ee0_d229_5ed6, 0xb0ea_bf93_99cc_ae7d];
        let without_key = [0x77ec_c063_cc1c_5e70, 0xf040_1803_f65d_e9b0, 0x28f8_7d62_ed63_dec1];
        for (key, expected) in [(KEY, keyed), (HashKey::NONE, without_key)] {
            assert_eq!(sequence_hashes(&key, &namespace, 4, &PROMPT), expected.map(SequenceHash));
        }
    }

    /// A block of more than `HASHED_TOKENS` tokens is hashed as one input, although it is copied in several parts.
    #[test]
    fn block_longer_than_the_hashed_chunks_is_hashed_as_one_input() {
        let tokens: Vec<TokenId> = (0..100).collect();
        let bytes: Vec<u8> = 7_u64.to_le_bytes().into_iter().chain(tokens.iter().flat_map(|token| token.to_le_bytes())).collect();
        assert_eq!(SequenceHash(7).child(&KEY, &tokens).0, SipHasher24::new_with_key(&KEY.0).hash(&bytes));
    }

    #[test]
    fn one_prompt_has_different_hashes_under_different_keys() {
        let namespace = Namespace::new("model", "", "", "");
        let others = (0..=255).map(|byte| HashKey([byte; 16]));
        let firsts: BTreeSet<_> = others.map(|key| sequence_hashes(&key, &namespace, 4, &PROMPT)[0]).collect();
        assert_eq!(firsts.len(), 256);
    }

    #[test]
    fn debug_output_hides_the_key() {
        assert_eq!(format!("{KEY:?}"), "HashKey(…)");
    }

    #[test]
    fn hashes_computed_from_a_parent_equal_those_of_the_complete_prompt() {
        let namespace = Namespace::new("model", "", "", "");
        let whole = sequence_hashes(&KEY, &namespace, 4, &PROMPT);
        assert_eq!(child_hashes(&KEY, namespace.root(&KEY), 4, &PROMPT, &[]), whole);
        assert_eq!(child_hashes(&KEY, whole[0], 4, &PROMPT[4..], &[]), whole[1..]);
    }

    #[test]
    fn image_changes_the_hashes_from_its_first_block_on() {
        let root = Namespace::new("model", "", "", "").root(&KEY);
        let image = |at, id| ImageStart { at, id: ImageId([id; 32]) };
        let with = |images: &[ImageStart]| child_hashes(&KEY, root, 4, &PROMPT, images);
        let (text, one) = (with(&[]), with(&[image(5, 1)]));
        assert_eq!(text[0], one[0]);
        assert!(text[1] != one[1] && text[2] != one[2]);
        // A following image, or one after the last full block, changes nothing before it.
        assert_eq!(with(&[image(5, 1), image(8, 2)])[..2], one[..2]);
        assert_eq!(with(&[image(5, 1), image(12, 2)]), one);
        // The hashes do not depend on the number of tokens that are hashed together.
        assert_eq!(child_hashes(&KEY, one[0], 4, &PROMPT[4..], &[image(1, 1)]), one[1..]);
        let lists = [vec![image(4, 1)], vec![image(5, 2)], vec![image(5, 1), image(5, 1)], vec![image(5, 1), image(6, 2)]];
        let lasts: BTreeSet<_> = lists.iter().map(|images| with(images)[2]).chain([text[2], one[2]]).collect();
        assert_eq!(lasts.len(), lists.len() + 2);
    }

    #[test]
    fn text_of_an_image_identity_is_read_again_and_others_are_refused() {
        let id = ImageId(std::array::from_fn(|byte| byte as u8 * 7));
        let text = id.to_string();
        assert_eq!((text.len(), ImageId::from_text(&text)), (64, Some(id)));
        for other in
            ["", "A", &text[1..], &text.to_uppercase(), &format!("{text}0"), &"ä".repeat(32), &format!("+{}", &text[1..])]
        {
            assert_eq!(ImageId::from_text(other), None, "{other}");
        }
    }

    #[test]
    fn only_full_blocks_have_a_hash() {
        let namespace = Namespace::new("model", "", "", "");
        for (tokens, blocks) in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (13, 3)] {
            assert_eq!(sequence_hashes(&KEY, &namespace, 4, &PROMPT[..tokens]).len(), blocks, "{tokens} tokens");
        }
    }

    #[test]
    fn hashes_differ_between_namespaces_that_differ_in_one_field() {
        let all = [
            Namespace::new("model", "", "", ""),
            Namespace::new("other", "", "", ""),
            Namespace::new("model", "main", "", ""),
            Namespace::new("model", "", "main", ""),
            Namespace::new("model", "", "", "main"),
            Namespace::new("model", "", "", "salt"),
        ];
        let mut firsts: Vec<_> = all.iter().map(|namespace| sequence_hashes(&KEY, namespace, 4, &PROMPT)[0]).collect();
        firsts.sort();
        firsts.dedup();
        assert_eq!(firsts.len(), all.len());
    }

    #[test]
    fn namespaces_with_different_fields_have_different_encodings() {
        let glued = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")];
        let mut bytes: Vec<_> = glued.iter().map(|(model, revision)| Namespace::new(model, revision, "", "")).collect();
        bytes.push(Namespace::new("a\u{1}\0\0\0\0\0\0\0b", "", "", ""));
        bytes.push(Namespace::new("a", "b", "", ""));
        bytes.sort();
        bytes.dedup();
        assert_eq!(bytes.len(), glued.len() + 2);
    }

    #[test]
    fn account_namespaces_differ_from_each_other_and_from_those_without_account() {
        let salted = |salt| Namespace::new("model", "main", "", salt);
        let plain = salted("");
        let with_encoded_length = salted("salt\u{1}\0\0\0\0\0\0\0a");
        let all = [
            plain.clone(),
            plain.of_account(""),
            plain.of_account("a"),
            plain.of_account("b"),
            salted("a"),
            salted("a").of_account("b"),
            salted("b").of_account("a"),
            salted("salt").of_account("a"),
            with_encoded_length,
            plain.of_account("a").of_account("b"),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(plain.of_account("a"), salted("").of_account("a"));
    }

    #[test]
    fn namespace_bytes_round_trip() {
        let namespace = Namespace::new("model", "main", "", "salt");
        assert_eq!(Namespace::from_bytes(namespace.as_bytes()), namespace);
    }

    #[test]
    fn hash_depends_on_all_tokens_before_the_block() {
        let namespace = Namespace::new("model", "", "", "");
        let tail = [5, 6, 7, 8];
        let after = |head: [TokenId; 4]| sequence_hashes(&KEY, &namespace, 4, &[head, tail].concat())[1];
        assert_ne!(after([1, 2, 3, 4]), after([1, 2, 4, 3]));
        assert_ne!(after([1, 2, 3, 4]), sequence_hashes(&KEY, &namespace, 4, &tail)[0]);
        assert_eq!(after([1, 2, 3, 4]), after([1, 2, 3, 4]));
    }
}
