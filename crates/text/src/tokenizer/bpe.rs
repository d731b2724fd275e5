//! Byte-pair encoding of words: of all neighbours that may merge, those with the lowest rank merge first.

use foldhash::fast::{FixedState, RandomState};
use std::{cmp::Reverse, collections::BinaryHeap, collections::HashMap, ops::Range};
use tandem_kv::TokenId;

pub(super) struct Bpe {
    /// The words that are encoded as one token.
    words: HashMap<Box<[u8]>, TokenId, FixedState>,
    /// The token of each byte. Bytes without a token are left out of a word before its parts merge.
    bytes: [Option<TokenId>; 256],
    merges: HashMap<(TokenId, TokenId), Merge, FixedState>,
}

#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    id: TokenId,
}

/// The maximum number of words of a text whose ids are remembered.
const SEEN_MAX: usize = 1 << 12;
/// In a word of at most this many parts, the lowest rank is searched for; in a longer one it is kept in a heap.
const SEARCHED_MAX: usize = 32;

/// Buffers that are reused for each word of a text.
#[derive(Default)]
pub(super) struct BpeScratch<'t> {
    /// Where the ids of words that are no tokens are in the text's ids.
    seen: HashMap<&'t [u8], Range<usize>, RandomState>,
    parts: Vec<WordPart>,
    /// Pairs of neighbours, as the rank of their merge and the index of the left one. A pair is outdated if the left part now has another rank.
    pairs: BinaryHeap<Reverse<(u32, u32)>>,
}

/// A token of the word so far.
#[derive(Clone, Copy)]
struct WordPart {
    id: TokenId,
    before: u32,
    after: u32,
    /// The merge with the next part. Its rank is [`NO_RANK`] if they do not merge, or if this part was merged into the one before it.
    merge: Merge,
}

const NO_RANK: u32 = u32::MAX;
const NO_PART: u32 = u32::MAX;
const NO_MERGE: Merge = Merge { rank: NO_RANK, id: 0 };

impl Bpe {
    /// `tokens` are the tokens that text may become. `merges` are pairs of tokens and the token that each pair becomes, in the order of their ranks.
    /// If `whole_words`, a word that is a token is encoded as that token, without merges.
    pub(super) fn new(
        tokens: impl Iterator<Item = (Box<[u8]>, TokenId)>,
        merges: impl Iterator<Item = ((TokenId, TokenId), TokenId)>,
        whole_words: bool,
    ) -> Self {
        let mut words: HashMap<Box<[u8]>, TokenId, FixedState> = tokens.collect();
        let bytes = std::array::from_fn(|byte| words.get(&[byte as u8][..]).copied());
        let merges = (0..).zip(merges).map(|(rank, (pair, id))| (pair, Merge { rank, id })).collect();
        let mut bpe = Self { words: HashMap::default(), bytes, merges };
        if !whole_words {
            let (mut scratch, mut ids) = (BpeScratch::default(), Vec::new());
            words.retain(|word, id| {
                ids.clear();
                bpe.merge(word, &mut scratch, &mut ids);
                ids == [*id]
            });
        }
        bpe.words = words;
        bpe
    }

    /// Whether each byte has a token.
    pub(super) fn has_all_bytes(&self) -> bool {
        self.bytes.iter().all(Option::is_some)
    }

    /// Appends the ids of a word. `ids` has those of all words for which this scratch was used.
    pub(super) fn encode<'t>(&self, word: &'t [u8], scratch: &mut BpeScratch<'t>, ids: &mut Vec<TokenId>) {
        if let Some(id) = self.words.get(word) {
            ids.push(*id);
        } else if let Some(seen) = scratch.seen.get(word) {
            ids.extend_from_within(seen.clone());
        } else {
            let start = ids.len();
            self.merge(word, scratch, ids);
            if scratch.seen.len() < SEEN_MAX {
                scratch.seen.insert(word, start..ids.len());
            }
        }
    }

    fn merge(&self, word: &[u8], scratch: &mut BpeScratch<'_>, ids: &mut Vec<TokenId>) {
        if word.len() <= SEARCHED_MAX { self.merge_short(word, ids) } else { self.merge_long(word, scratch, ids) }
    }

    /// Merges the bytes of a short word: as many searches for the lowest rank as there are merges.
    fn merge_short(&self, word: &[u8], ids: &mut Vec<TokenId>) {
        let mut parts = [(0, NO_MERGE); SEARCHED_MAX];
        let mut len = 0;
        for id in word.iter().filter_map(|byte| self.bytes[usize::from(*byte)]) {
            parts[len].0 = id;
            len += 1;
        }
        let merge = |left: TokenId, right: TokenId| self.merges.get(&(left, right)).copied().unwrap_or(NO_MERGE);
        for left in 1..len {
            parts[left - 1].1 = merge(parts[left - 1].0, parts[left].0);
        }
        // The last part has no merge. Of equal ranks, the first one merges first.
        while let Some(at) = (0..len).min_by_key(|at| parts[*at].1.rank).filter(|at| parts[*at].1.rank != NO_RANK) {
            parts[at].0 = parts[at].1.id;
            parts.copy_within(at + 2..len, at + 1);
            len -= 1;
            parts[at].1 = if at + 1 < len { merge(parts[at].0, parts[at + 1].0) } else { NO_MERGE };
            if at > 0 {
                parts[at - 1].1 = merge(parts[at - 1].0, parts[at].0);
            }
        }
        ids.extend(parts[..len].iter().map(|(id, _)| *id));
    }

    fn merge_long(&self, word: &[u8], BpeScratch { parts, pairs, .. }: &mut BpeScratch<'_>, ids: &mut Vec<TokenId>) {
        parts.clear();
        pairs.clear();
        let known = word.iter().filter_map(|byte| self.bytes[usize::from(*byte)]);
        parts.extend((0..).zip(known).map(|(index, id): (u32, TokenId)| WordPart {
            id,
            before: index.wrapping_sub(1),
            after: index + 1,
            merge: NO_MERGE,
        }));
        let Some(last) = parts.last_mut() else { return };
        last.after = NO_PART;
        for left in 1..parts.len() {
            self.pair(parts, pairs, left as u32 - 1);
        }
        while let Some(Reverse((rank, left))) = pairs.pop() {
            let WordPart { before, after: right, merge, .. } = parts[left as usize];
            if merge.rank != rank {
                continue;
            }
            let after = parts[right as usize].after;
            parts[right as usize].merge = NO_MERGE;
            let part = &mut parts[left as usize];
            (part.id, part.after) = (merge.id, after);
            if after != NO_PART {
                parts[after as usize].before = left;
            }
            self.pair(parts, pairs, left);
            if before != NO_PART {
                self.pair(parts, pairs, before);
            }
        }
        let mut next = 0;
        while next != NO_PART {
            let part = &parts[next as usize];
            ids.push(part.id);
            next = part.after;
        }
    }

    /// Finds the merge of a part with the next one.
    fn pair(&self, parts: &mut [WordPart], pairs: &mut BinaryHeap<Reverse<(u32, u32)>>, left: u32) {
        let WordPart { id, after, .. } = parts[left as usize];
        let merge = parts.get(after as usize).and_then(|right| self.merges.get(&(id, right.id))).copied().unwrap_or(NO_MERGE);
        parts[left as usize].merge = merge;
        if merge.rank != NO_RANK {
            pairs.push(Reverse((merge.rank, left)));
        }
    }
}
