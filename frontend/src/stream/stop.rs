//! Finds stop strings in a text that arrives in chunks.

/// Holds back text that may be the beginning of a stop string. The result does not depend on how the text is cut: the stop string
/// that is complete first ends the answer; of several, the one that began first.
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

/// Whether a stop string has ended the answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// No stop string was found: the answer continues.
    No,
    /// A stop string is complete; all text before it was emitted.
    Yes,
}

impl StopMatcher {
    /// A matcher of these stop strings, none of which is empty.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Adds a chunk of text, and appends to `out` what cannot be part of a stop string.
    pub(crate) fn push(&mut self, chunk: &str, out: &mut String) -> Stopped {
        if self.stops.is_empty() {
            out.push_str(chunk);
            return Stopped::No;
        }
        self.held.push_str(chunk);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop).map(|start| (start + stop.len(), start)));
        if let Some((_, start)) = found.min() {
            out.push_str(&self.held[..start]);
            self.held.clear();
            return Stopped::Yes;
        }
        let emitted = self.held.len() - self.longest_prefix();
        out.push_str(&self.held[..emitted]);
        self.held.drain(..emitted);
        Stopped::No
    }

    /// Adds a chunk in which stop strings do not count, nor do those that began before it.
    pub(crate) fn pass(&mut self, chunk: &str, out: &mut String) {
        self.finish(out);
        out.push_str(chunk);
    }

    /// Ends the text: what was held back is appended to `out`.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
    }

    /// The length in bytes of the longest end of the held text that begins a stop string.
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

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Stopped) {
        let mut matcher = StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
        let mut out = String::new();
        for piece in pieces {
            if matcher.push(piece, &mut out) == Stopped::Yes {
                return (out, Stopped::Yes);
            }
        }
        matcher.finish(&mut out);
        (out, Stopped::No)
    }

    #[test]
    fn result_does_not_depend_on_how_text_is_split() {
        let cases: [(&[&str], &str, &str, Stopped); 11] = [
            (&["END"], "abcENDdef", "abc", Stopped::Yes),
            (&["END"], "abcEN", "abcEN", Stopped::No),
            (&["END"], "EENEND", "EEN", Stopped::Yes),
            (&["aab"], "aaab", "a", Stopped::Yes),
            (&["abcd", "bc"], "xabcd", "xa", Stopped::Yes),
            (&["bc", "abc"], "xabc", "x", Stopped::Yes),
            (&["\n\n"], "a\nb\n\nc", "a\nb", Stopped::Yes),
            (&["é€"], "xé€y", "x", Stopped::Yes),
            (&["é"], "eê", "eê", Stopped::No),
            (&[], "anything", "anything", Stopped::No),
            (&["a"], "abc", "", Stopped::Yes),
        ];
        for (stops, text, expected, stopped) in cases {
            let chars: Vec<String> = text.chars().map(String::from).collect();
            for split in 0..1_u32 << (chars.len() - 1) {
                let mut pieces = vec![String::new()];
                for (index, char) in chars.iter().enumerate() {
                    pieces.last_mut().expect("there is one").push_str(char);
                    if split >> index & 1 == 1 {
                        pieces.push(String::new());
                    }
                }
                let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
                let (out, end) = run(stops, &pieces);
                assert_eq!((out.as_str(), &end), (expected, &stopped), "{stops:?} in {pieces:?}");
            }
        }
    }

    #[test]
    fn only_a_possible_stop_is_held_back() {
        let mut matcher = StopMatcher::new(vec!["END".to_owned()]);
        let mut out = String::new();
        matcher.push("abE", &mut out);
        assert_eq!(out, "ab");
        matcher.push("x", &mut out);
        assert_eq!(out, "abEx");
    }

    #[test]
    fn stop_that_began_in_passed_text_does_not_count() {
        let mut matcher = StopMatcher::new(vec!["END".to_owned()]);
        let mut out = String::new();
        matcher.pass("xE", &mut out);
        assert_eq!(matcher.push("ND", &mut out), Stopped::No);
        assert_eq!(matcher.push("END", &mut out), Stopped::Yes);
        assert_eq!(out, "xEND");
    }
}
