//! Finds the usage in the bytes of an answer, whole or streamed.

use serde::Deserialize;

/// The number of last bytes in which the usage is looked for. It is at the end of an answer, and much shorter.
const TAIL_BYTES: usize = 8 << 10;
const KEY: &[u8] = b"\"usage\":";

/// The last bytes of an answer.
#[derive(Default)]
pub(super) struct Tail(Vec<u8>);

/// The tokens that an engine has counted.
#[derive(Debug, Deserialize, PartialEq)]
pub(super) struct CountedUsage {
    pub(super) prompt_tokens: u32,
    #[serde(default)]
    pub(super) completion_tokens: u32,
    prompt_tokens_details: Option<CountedDetails>,
}

#[derive(Debug, Deserialize, PartialEq)]
struct CountedDetails {
    cached_tokens: Option<u32>,
}

impl CountedUsage {
    /// Returns the number of cached tokens, if the engine reports it.
    pub(super) fn cached_tokens(&self) -> Option<u32> {
        self.prompt_tokens_details.as_ref()?.cached_tokens.map(|tokens| tokens.min(self.prompt_tokens))
    }
}

impl Tail {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        let excess = (self.0.len() + kept.len()).saturating_sub(TAIL_BYTES);
        self.0.drain(..excess.min(self.0.len()));
        self.0.extend_from_slice(kept);
    }

    /// Whether a streamed answer is complete.
    pub(super) fn is_done(&self) -> bool {
        self.0.trim_ascii_end().ends_with(b"\ndata: [DONE]")
    }

    /// Returns the last usage in the answer; `None` if there is none. Text of the answer that looks like one has escaped quotes.
    pub(super) fn usage(&self) -> Option<CountedUsage> {
        let found = self.0.windows(KEY.len()).enumerate().rev().filter(|(_, window)| *window == KEY);
        let is_key = |at: usize| at == 0 || self.0[at - 1] != b'\\';
        let values = found.filter(|(at, _)| is_key(*at)).map(|(at, _)| &self.0[at + KEY.len()..]);
        let read = |value: &[u8]| serde_json::Deserializer::from_slice(value).into_iter().next()?.ok();
        { values }.find_map(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(chunks: &[&str]) -> Option<(u32, u32, Option<u32>)> {
        let mut tail = Tail::default();
        chunks.iter().for_each(|chunk| tail.add(chunk.as_bytes()));
        let usage = tail.usage()?;
        Some((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()))
    }

    #[test]
    fn last_usage_of_an_answer_is_found_in_any_chunks() {
        let whole = r#"{"choices":[{"text":"a"}],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8}},"kv":null}"#;
        let stream = "data: {\"choices\":[{}],\"usage\":null}\n\ndata: {\"choices\":[],\"usage\": {\"prompt_tokens\":7,\"completion_tokens\":1,\"prompt_tokens_details\":null}}\n\ndata: [DONE]\n\n";
        let long = "x".repeat(3 * TAIL_BYTES);
        for (answer, expected) in [
            (whole, Some((9, 2, Some(8)))),
            (stream, Some((7, 1, None))),
            ("data: {\"usage\":null}\n\ndata: [DONE]\n\n", None),
            (r#"{"text":"\"usage\":{\"prompt_tokens\":5}"}"#, None),
            (r#"{"usage":{"prompt_tokens":-1}}"#, None),
            (r#"{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":99}}}"#, Some((3, 0, Some(3)))),
            (r#"{"usage":"#, None),
            ("", None),
        ] {
            assert_eq!(usage(&[&long, answer]), expected, "{answer}");
            let bytes: Vec<&str> = answer.split_inclusive(|_| true).collect();
            assert_eq!(usage(&bytes), expected, "{answer}");
        }
        assert_eq!(usage(&[whole, &long]), None, "a usage far from the end is not looked for");
    }
}
