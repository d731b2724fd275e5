//! Byte-pair encoding of words: of all neighbours that may merge, those with the lowest rank merge first.

use foldhash::fast::FixedState;
use std::{cmp::Reverse, collections::BinaryHeap, collections::HashMap};
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

/// Buffers that are reused for each word.
#[derive(Default)]
pub(super) struct BpeScratch {
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

    /// Appends the ids of a word.
    pub(super) fn encode(&self, word: &[u8], scratch: &mut BpeScratch, ids: &mut Vec<TokenId>) {
        match self.words.get(word) {
            Some(id) => ids.push(*id),
            None => self.merge(word, scratch, ids),
        }
    }

    fn merge(&self, word: &[u8], BpeScratch { parts, pairs }: &mut BpeScratch, ids: &mut Vec<TokenId>) {
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
