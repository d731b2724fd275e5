//! Finds stop strings in a text that arrives in chunks.

/// Finds stop strings, and holds back text that may be the beginning of one. The stop string that is complete first ends the answer. If several are
/// complete at the same character, the one that began first is used. The result does not depend on how the text is split into chunks.
pub struct StopMatcher {
    stops: Vec<String>,
    /// Whether the text that is passed on includes the stop string that ends it.
    included: bool,
    held: String,
}

impl StopMatcher {
    /// Returns a matcher of these strings. `included`: the stop string that ends the text is part of the text that is passed on.
    pub fn new(stops: Vec<String>, included: bool) -> Self {
        Self { stops, included, held: String::new() }
    }

    /// Adds a chunk of text, and appends to `out` the text that cannot belong to a stop string. Returns the stop string that is
    /// complete, if one is. If so, `out` has all text before that stop string, and the stop string if it is included.
    pub fn push(&mut self, chunk: &str, out: &mut String) -> Option<&str> {
        if self.stops.is_empty() {
            out.push_str(chunk);
            return None;
        }
        self.held.push_str(chunk);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop).map(|start| (start + stop.len(), start, stop)));
        if let Some((end, start, stop)) = found.min() {
            out.push_str(&self.held[..if self.included { end } else { start }]);
            self.held.clear();
            return Some(stop);
        }
        let emitted = self.held.len() - self.longest_prefix();
        out.push_str(&self.held[..emitted]);
        self.held.drain(..emitted);
        None
    }

    /// Adds a chunk in which stop strings are ignored: one that begins before or in this chunk is not found.
    pub fn pass(&mut self, chunk: &str, out: &mut String) {
        self.finish(out);
        out.push_str(chunk);
    }

    /// Ends the text, and appends the text that was held back to `out`.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
    }

    /// Returns the length in bytes of the longest suffix of the held text with which a stop string begins.
    fn longest_prefix(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest.saturating_sub(1));
        let begins =
            |at: &usize| self.held.is_char_boundary(*at) && self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        (from..self.held.len()).find(begins).map_or(0, |at| self.held.len() - at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], included: bool, chunks: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect(), included);
        let mut out = String::new();
        for chunk in chunks {
            if matcher.push(chunk, &mut out).is_some() {
                return (out, true);
            }
        }
        matcher.finish(&mut out);
        (out, false)
    }

    #[test]
    fn stop_string_is_found_however_the_text_is_split() {
        let cases: [(&[&str], &str, &str, bool); 11] = [
            (&["END"], "abcENDdef", "abc", true),
            (&["END"], "abcEN", "abcEN", false),
            (&["END"], "EENEND", "EEN", true),
            (&["aab"], "aaab", "a", true),
            (&["abcd", "bc"], "xabcd", "xa", true),
            (&["bc", "abc"], "xabc", "x", true),
            (&["\n\n"], "a\nb\n\nc", "a\nb", true),
            (&["é€"], "xé€y", "x", true),
            (&["é"], "eê", "eê", false),
            (&[], "anything", "anything", false),
            (&["a"], "abc", "", true),
        ];
        for (stops, text, expected, stopped) in cases {
            let chars: Vec<String> = text.chars().map(String::from).collect();
            for split in 0..1_u32 << (chars.len() - 1) {
                let mut chunks = vec![String::new()];
                for (index, char) in chars.iter().enumerate() {
                    chunks.last_mut().expect("the list starts with one chunk").push_str(char);
                    if split >> index & 1 == 1 {
                        chunks.push(String::new());
                    }
                }
                let chunks: Vec<&str> = chunks.iter().map(String::as_str).collect();
                let (out, end) = run(stops, false, &chunks);
                assert_eq!((out.as_str(), end), (expected, stopped), "{stops:?} in {chunks:?}");
            }
        }
    }

    #[test]
    fn included_stop_string_ends_the_text() {
        for (stops, chunks, expected) in [
            (&["END"][..], &["abE", "NDx"][..], "abEND"),
            (&["END", "b"], &["abE", "ND"], "ab"),
            (&["END"], &["abE", "N"], "abEN"),
            (&["abcd", "bc"], &["xabcd"], "xabc"),
        ] {
            assert_eq!(run(stops, true, chunks).0, expected, "{stops:?} in {chunks:?}");
        }
    }

    #[test]
    fn text_is_held_back_only_while_it_may_begin_a_stop_string() {
        let mut matcher = StopMatcher::new(vec!["END".to_owned()], false);
        let mut out = String::new();
        matcher.push("abE", &mut out);
        assert_eq!(out, "ab");
        matcher.push("x", &mut out);
        assert_eq!(out, "abEx");
    }

    #[test]
    fn stop_string_that_begins_in_unmatched_text_is_ignored() {
        let mut matcher = StopMatcher::new(vec!["END".to_owned()], false);
        let mut out = String::new();
        matcher.pass("xE", &mut out);
        assert_eq!(matcher.push("ND", &mut out), None);
        assert_eq!(matcher.push("END", &mut out), Some("END"));
        assert_eq!(out, "xEND");
    }
}
