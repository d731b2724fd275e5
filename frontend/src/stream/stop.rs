//! Stop strings: where an answer ends, found as its text comes.

/// Holds back the text that may yet turn out to begin a stop string. What is found does not depend on how the text is cut:
/// the stop that is complete first ends the answer, of several the one that began first.
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

/// What became of a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The answer goes on.
    No,
    /// A stop is complete; all text before it has been given.
    Yes,
}

impl StopMatcher {
    /// None of `stops` is empty.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes a piece and gives out what cannot be part of a stop.
    pub(crate) fn push(&mut self, piece: &str, out: &mut String) -> Stopped {
        if self.stops.is_empty() {
            out.push_str(piece);
            return Stopped::No;
        }
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop).map(|start| (start + stop.len(), start)));
        if let Some((_, start)) = found.min() {
            out.push_str(&self.held[..start]);
            self.held.clear();
            return Stopped::Yes;
        }
        let given = self.held.len() - self.longest_beginning();
        out.push_str(&self.held[..given]);
        self.held.drain(..given);
        Stopped::No
    }

    /// Takes a piece in which stops do not count; neither do those that began before it.
    pub(crate) fn pass(&mut self, piece: &str, out: &mut String) {
        self.finish(out);
        out.push_str(piece);
    }

    /// No more text comes: what was held back is text.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
    }

    /// Bytes at the end of what is held that begin a stop.
    fn longest_beginning(&self) -> usize {
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
    fn every_split_ends_at_the_same_place() {
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
    fn only_what_may_begin_a_stop_is_held_back() {
        let mut matcher = StopMatcher::new(vec!["END".to_owned()]);
        let mut out = String::new();
        matcher.push("abE", &mut out);
        assert_eq!(out, "ab");
        matcher.push("x", &mut out);
        assert_eq!(out, "abEx");
    }

    #[test]
    fn a_stop_that_began_in_passed_text_does_not_count() {
        let mut matcher = StopMatcher::new(vec!["END".to_owned()]);
        let mut out = String::new();
        matcher.pass("xE", &mut out);
        assert_eq!(matcher.push("ND", &mut out), Stopped::No);
        assert_eq!(matcher.push("END", &mut out), Stopped::Yes);
        assert_eq!(out, "xEND");
    }
}
