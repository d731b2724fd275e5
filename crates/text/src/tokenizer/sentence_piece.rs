//! SentencePiece's byte-pair encoding, as in GGUF files: the two neighbours whose union has the highest score are merged first.

use super::{
    kind,
    spelling::{self, SPACE},
};
use crate::error::ServedModelError;
use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap},
};
use tandem_kv::TokenId;
use tandem_model::TokenizerData;

pub(super) struct SentencePiece {
    /// The pieces into which text may be encoded. Control tokens are not among them.
    pieces: HashMap<Box<str>, VocabularyPiece>,
    /// The tokens of single bytes, for characters that no piece has.
    bytes: [TokenId; 256],
    /// Whether a text after a special token, or at the start, gets a space before it.
    space_before: bool,
}

#[derive(Clone, Copy)]
struct VocabularyPiece {
    id: TokenId,
    score: f32,
}

/// A part of the text: a piece or a single character.
struct TextPart {
    start: usize,
    /// The length of the part; 0 if the part was merged with the one before it.
    len: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// Two neighbours whose union is a piece.
struct MergePair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl SentencePiece {
    /// # Errors
    /// Fails if the file lacks the scores, or the token of a byte.
    pub(super) fn new(data: &TokenizerData) -> Result<Self, ServedModelError> {
        if data.scores.len() != data.tokens.len() {
            return Err(ServedModelError::Scores);
        }
        let mut bytes = [None; 256];
        let mut pieces = HashMap::with_capacity(data.tokens.len());
        for (((id, text), kind), score) in (0..).zip(&data.tokens).zip(&data.token_types).zip(&data.scores) {
            if let Some(byte) = spelling::byte(text).filter(|_| [kind::NORMAL, kind::BYTE].contains(kind)) {
                bytes[usize::from(byte)] = Some(id);
            } else if [kind::NORMAL, kind::USER_DEFINED, kind::UNUSED].contains(kind) {
                pieces.insert(text.as_str().into(), VocabularyPiece { id, score: *score });
            }
        }
        let all: Vec<TokenId> = bytes.into_iter().flatten().collect();
        let bytes = all.try_into().map_err(|_| ServedModelError::Bytes)?;
        Ok(Self { pieces, bytes, space_before: data.add_space_prefix })
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<TokenId>) {
        let mut escaped = if self.space_before { SPACE.to_owned() } else { String::new() };
        escaped += &text.replace(' ', SPACE);
        let parts = self.merged(&escaped);
        let mut next = (!parts.is_empty()).then_some(0);
        while let Some(index) = next {
            let part = &parts[index];
            let text = &escaped[part.start..part.start + part.len];
            match self.pieces.get(text) {
                Some(piece) => ids.push(piece.id),
                None => ids.extend(text.bytes().map(|byte| self.bytes[usize::from(byte)])),
            }
            next = part.after;
        }
    }

    fn merged(&self, text: &str) -> Vec<TextPart> {
        let count = text.chars().count();
        let part = |(index, (start, char)): (usize, (usize, char))| TextPart {
            start,
            len: char.len_utf8(),
            before: index.checked_sub(1),
            after: Some(index + 1).filter(|after| *after < count),
        };
        let mut parts: Vec<TextPart> = text.char_indices().enumerate().map(part).collect();
        let mut pairs: BinaryHeap<MergePair> = (1..count).filter_map(|right| self.pair(text, &parts, right - 1, right)).collect();
        while let Some(pair) = pairs.pop() {
            let (left, right) = (&parts[pair.left], &parts[pair.right]);
            // Skips a pair of which one part has been merged since the pair was found.
            if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
                continue;
            }
            let after = right.after;
            parts[pair.right].len = 0;
            parts[pair.left].len = pair.len;
            parts[pair.left].after = after;
            if let Some(after) = after {
                parts[after].before = Some(pair.left);
            }
            let before = parts[pair.left].before.and_then(|before| self.pair(text, &parts, before, pair.left));
            pairs.extend(before);
            pairs.extend(after.and_then(|after| self.pair(text, &parts, pair.left, after)));
        }
        parts
    }

    fn pair(&self, text: &str, parts: &[TextPart], left: usize, right: usize) -> Option<MergePair> {
        let len = parts[left].len + parts[right].len;
        let start = parts[left].start;
        let piece = self.pieces.get(&text[start..start + len])?;
        Some(MergePair { score: piece.score, left, right, len })
    }
}

impl Ord for MergePair {
    /// The greatest pair has the highest score. If several have the same score, it is the first of them in the text.
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(Reverse(self.left).cmp(&Reverse(other.left)))
    }
}

impl PartialOrd for MergePair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for MergePair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for MergePair {}
