//! Finds the strings of which prompts are made, with the tokenizer that will count their tokens.

use fastrand::Rng;
use std::error::Error;

/// Frequent English words. In most tokenizers, nearly all of them are single tokens if a space precedes them.
const WORDS: &str = include_str!("words.txt");
/// The candidates for tokenizers in which words are not single tokens, such as those whose tokens are bytes.
const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz";
/// The minimum number of words. With fewer words, blocks with different ids could begin with the same text.
const WORDS_MIN: usize = 16;
/// The lengths, in tokens, of the texts with which the words are checked.
const CHECKED: [u64; 4] = [1, 100, 700, 3_000];

/// A tokenizer that counts the tokens of a text.
pub trait CountTokens {
    /// The error of a tokenizer that cannot count a text.
    type Error: Error + Send + Sync + 'static;

    /// Returns the number of tokens in a prompt with this text, including tokens that the server adds.
    fn count(&self, text: &str) -> impl Future<Output = Result<u64, Self::Error>> + Send;
}

/// The reason why no words were found.
#[derive(Debug, thiserror::Error)]
pub enum WordsError<E: Error + 'static> {
    /// The tokenizer cannot count a text.
    #[error(transparent)]
    CountTokens(#[from] E),
    /// The tokenizer joins even single letters, depending on their neighbours, so no text has a predictable number of tokens.
    #[error(
        "no prompts of an exact length can be made for this tokenizer, because it joins consecutive words and letters; send token ids with \
         --prompt ids"
    )]
    None,
}

/// Strings that are one token each, whatever is before and after them.
#[derive(Clone, Debug)]
pub(super) struct PromptWords {
    words: Vec<String>,
    /// The number of tokens that the server adds before a text.
    pub(super) lead: u64,
}

impl PromptWords {
    /// Finds words for a tokenizer, and checks them by counting texts that are made of them.
    pub(super) async fn find<C: CountTokens>(tokenizer: &C, seed: u64) -> Result<Self, WordsError<C::Error>> {
        let words = WORDS.split_whitespace().map(|word| format!(" {word}")).collect();
        let letters = LETTERS.chars().map(String::from).collect();
        for candidates in [words, letters] {
            if let Some(words) = Self::among(tokenizer, candidates, seed).await? {
                return Ok(words);
            }
        }
        Err(WordsError::None)
    }

    /// Returns the candidates that are one token each. Returns `None` if these are too few, or if the token count of a text is not the sum of
    /// its words' counts.
    async fn among<C: CountTokens>(tokenizer: &C, candidates: Vec<String>, seed: u64) -> Result<Option<Self>, C::Error> {
        let text = candidates.concat();
        let (once, twice) = (tokenizer.count(&text).await?, tokenizer.count(&text.repeat(2)).await?);
        let Some(lead) = (2 * once).checked_sub(twice) else { return Ok(None) };
        // Gives up if too many of the candidates consist of several tokens.
        if once.saturating_sub(lead) > candidates.len() as u64 * 3 / 2 {
            return Ok(None);
        }
        let mut words = Vec::new();
        let mut halves = vec![candidates];
        while let Some(mut candidates) = halves.pop() {
            if tokenizer.count(&candidates.concat()).await? == candidates.len() as u64 + lead {
                words.append(&mut candidates);
            } else if candidates.len() > 1 {
                halves.push(candidates.split_off(candidates.len() / 2));
                halves.push(candidates);
            }
        }
        let words = Self { words, lead };
        if words.words.len() < WORDS_MIN {
            return Ok(None);
        }
        for tokens in CHECKED {
            let mut text = String::new();
            words.write(&mut text, &mut Rng::with_seed(seed ^ tokens), tokens);
            if tokenizer.count(&text).await? != tokens + lead {
                return Ok(None);
            }
        }
        Ok(Some(words))
    }

    /// Appends random words until this many tokens are appended.
    pub(super) fn write(&self, text: &mut String, rng: &mut Rng, tokens: u64) {
        for _ in 0..tokens {
            text.push_str(&self.words[rng.usize(..self.words.len())]);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::convert::Infallible;

    /// A tokenizer for tests.
    #[derive(Clone, Debug)]
    pub(in crate::prompt) struct Fake {
        kind: Kind,
        pub(in crate::prompt) lead: u64,
    }

    #[derive(Clone, Debug)]
    enum Kind {
        /// A word of at most four letters is one token, and a longer word is two.
        Words,
        Bytes,
        /// Every seven bytes are one token, so the number of tokens depends on where a text begins.
        Runs,
    }

    impl Fake {
        pub(in crate::prompt) fn words(lead: u64) -> Self {
            Self { kind: Kind::Words, lead }
        }

        pub(in crate::prompt) fn bytes(lead: u64) -> Self {
            Self { kind: Kind::Bytes, lead }
        }

        pub(in crate::prompt) fn tokens(&self, text: &str) -> u64 {
            let tokens = match self.kind {
                Kind::Words => text.split_whitespace().map(|word| if word.len() > 4 { 2 } else { 1 }).sum(),
                Kind::Bytes => text.len(),
                Kind::Runs => text.len().div_ceil(7),
            };
            tokens as u64 + self.lead
        }
    }

    impl CountTokens for Fake {
        type Error = Infallible;

        async fn count(&self, text: &str) -> Result<u64, Infallible> {
            Ok(self.tokens(text))
        }
    }

    #[tokio::test]
    async fn texts_are_made_of_words_or_of_letters_if_words_are_several_tokens() {
        let words = PromptWords::find(&Fake::words(1), 0).await.expect("there are short words");
        assert!(words.words.iter().all(|word| word.starts_with(' ') && word.len() <= 5), "{words:?}");
        assert!(words.words.len() > 100 && words.lead == 1, "{words:?}");
        let words = PromptWords::find(&Fake::bytes(0), 0).await.expect("every letter is a token");
        assert!(words.words.iter().all(|word| word.len() == 1) && words.lead == 0, "{words:?}");
    }

    #[tokio::test]
    async fn tokenizer_that_joins_neighbours_has_no_words() {
        let error = PromptWords::find(&Fake { kind: Kind::Runs, lead: 0 }, 0).await.expect_err("letters are joined");
        assert!(error.to_string().contains("--prompt ids"), "{error}");
    }
}
