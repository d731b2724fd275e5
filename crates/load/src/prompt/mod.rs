//! Makes prompts for traces whose rows have lengths and block ids instead of text.
//!
//! A block's text is determined by its id, so prompts with the same ids have the same text there. Each text is made of *words*: strings that
//! the server's tokenizer encodes as one token each, whatever is before and after them. So a text can be cut to a number of tokens exactly.

mod local;
mod words;

pub use local::{LocalTokenizer, LocalTokenizerError};
pub use words::{CountTokens, WordsError};

use crate::trace::TraceBlocks;
use fastrand::Rng;
use words::PromptWords;

/// The form in which the prompts of traces without text are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    /// The prompt is the text of a completion request.
    Text,
    /// The prompt is the text of the only message in a chat request. The chat template adds tokens.
    Chat,
    /// The prompt is a list of token ids in a completion request.
    Ids {
        /// The size of the vocabulary. All generated ids are below it.
        vocabulary: u32,
    },
}

/// Makes the prompts of a trace's rows.
#[derive(Clone, Debug)]
pub(crate) struct PromptMaker {
    vocabulary: PromptVocabulary,
    seed: u64,
    block_tokens: u64,
}

#[derive(Clone, Debug)]
enum PromptVocabulary {
    Text(PromptWords),
    /// Prompts consist of token ids below this number.
    Ids(u32),
}

/// A prompt in one of the forms that `/v1/completions` accepts.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(untagged)]
pub(crate) enum MadePrompt {
    Text(String),
    Ids(Vec<u32>),
}

impl PromptMaker {
    /// Returns a maker of text prompts for the tokenizer that `count` uses.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot count a text, or if no words were found for it.
    pub(crate) async fn text<C: CountTokens>(count: &C, seed: u64, block_tokens: u64) -> Result<Self, WordsError<C::Error>> {
        Ok(Self { vocabulary: PromptVocabulary::Text(PromptWords::find(count, seed).await?), seed, block_tokens })
    }

    /// Returns a maker of prompts that consist of token ids below `vocabulary`.
    pub(crate) fn ids(vocabulary: u32, seed: u64, block_tokens: u64) -> Self {
        Self { vocabulary: PromptVocabulary::Ids(vocabulary), seed, block_tokens }
    }

    /// Returns the prompt of a row, which has exactly `input_length` tokens as the server counts them. Tokens
    /// beyond the row's ids are text that no other row shares.
    pub(crate) fn prompt(&self, row: u64, blocks: &TraceBlocks) -> MadePrompt {
        // `input_length` includes the tokens that the server adds before a text, so the text is shorter by as many tokens.
        let lead = match &self.vocabulary {
            PromptVocabulary::Text(words) => words.lead,
            PromptVocabulary::Ids(_) => 0,
        };
        let mut missing = blocks.input_length.saturating_sub(lead);
        let seeds = blocks.hash_ids.iter().map(|id| (1, *id)).chain([(2, row)]);
        let parts = seeds.map(|(kind, id)| {
            let tokens = missing.min(self.block_tokens);
            missing -= tokens;
            (Rng::with_seed(mixed(self.seed, kind, id)), tokens)
        });
        match &self.vocabulary {
            PromptVocabulary::Text(words) => {
                let mut text = String::new();
                parts.for_each(|(mut rng, tokens)| words.write(&mut text, &mut rng, tokens));
                MadePrompt::Text(text)
            }
            // The lowest ids are not used, because they are often special tokens or single bytes.
            PromptVocabulary::Ids(vocabulary) => {
                let ids = parts.flat_map(|(mut rng, tokens)| (0..tokens).map(move |_| rng.u32(vocabulary / 100..*vocabulary)));
                MadePrompt::Ids(ids.collect())
            }
        }
    }
}

/// Returns the random seed of a block's text. The finaliser of splitmix64 makes the seeds of consecutive ids independent.
fn mixed(seed: u64, kind: u64, id: u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ id.wrapping_add(kind << 62);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::words::tests::Fake;

    fn blocks(input_length: u64, hash_ids: &[u64]) -> TraceBlocks {
        TraceBlocks { input_length, output_length: 1, hash_ids: hash_ids.to_vec() }
    }

    fn text(prompt: MadePrompt) -> String {
        match prompt {
            MadePrompt::Text(text) => text,
            MadePrompt::Ids(ids) => panic!("a text: {ids:?}"),
        }
    }

    async fn prompts(fake: &Fake) -> PromptMaker {
        PromptMaker::text(fake, 3, 32).await.expect("the tokenizer has words")
    }

    #[tokio::test]
    async fn prompt_has_the_length_of_its_row_with_any_tokenizer() {
        for fake in [Fake::words(0), Fake::words(1), Fake::bytes(0), Fake::bytes(2)] {
            let prompts = prompts(&fake).await;
            for (length, ids) in [(1, &[5][..]), (31, &[5]), (32, &[5]), (33, &[5, 6]), (64, &[5, 6]), (70, &[5, 6]), (32, &[])] {
                let text = text(prompts.prompt(9, &blocks(length, ids)));
                // A prompt has at least the tokens that the server adds.
                assert_eq!(fake.tokens(&text), length.max(fake.lead), "{fake:?} {length} {ids:?}: {text:?}");
            }
        }
    }

    #[tokio::test]
    async fn prompts_share_text_exactly_where_they_share_ids() {
        let prompts = prompts(&Fake::words(1)).await;
        let of = |row, ids: &[u64]| text(prompts.prompt(row, &blocks(32 * ids.len() as u64, ids)));
        let (one, other) = (of(0, &[1, 2, 3]), of(1, &[1, 2, 4]));
        assert_ne!(one, other);
        let shared = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        // The two prompts have 63 words in common after the leading token, and perhaps the first letters of the next word.
        let words = one[..shared].split_whitespace().count();
        assert!((63..70).contains(&words), "{words} words are shared");
        assert_eq!(of(0, &[1, 2]), of(8, &[1, 2]));
        assert_ne!(of(0, &[2, 1]), of(0, &[1, 2]));
    }

    #[tokio::test]
    async fn incomplete_block_is_the_beginning_of_the_complete_one() {
        let prompts = prompts(&Fake::words(0)).await;
        let of = |length| text(prompts.prompt(0, &blocks(length, &[7])));
        assert!(of(32).starts_with(&of(10)));
    }

    #[test]
    fn prompts_of_token_ids_are_determined_by_blocks_and_seed() {
        let of = |seed, row, length, ids: &[u64]| match PromptMaker::ids(1_000, seed, 16).prompt(row, &blocks(length, ids)) {
            MadePrompt::Ids(ids) => ids,
            MadePrompt::Text(text) => panic!("ids: {text}"),
        };
        let (one, other) = (of(1, 0, 40, &[1, 2, 3]), of(1, 5, 40, &[1, 2, 4]));
        assert_eq!((one.len(), &one[..32]), (40, &other[..32]));
        assert_ne!(one[32..], other[32..]);
        assert!(one.iter().all(|id| (10..1_000).contains(id)));
        assert_ne!(of(2, 0, 16, &[1]), of(1, 0, 16, &[1]));
        // Tokens beyond the blocks that the row names occur in no other row's prompt.
        assert_ne!(of(1, 0, 30, &[1]), of(1, 1, 30, &[1]));
        assert_eq!(of(1, 0, 30, &[1])[..16], of(1, 1, 30, &[1])[..16]);
    }
}
