//! Reads server-sent events (HTML standard, section 9.2). The time is linear in the number of bytes, whatever a server sends.

use crate::HttpError;

/// The state of a stream between two of its pieces. Only the data of events is read.
pub(crate) struct EventReader {
    /// The maximum number of bytes from the end of an event to the end of the next one.
    max: usize,
    /// The beginning of the current line.
    line: Vec<u8>,
    /// The data of the current event; `None` before its first line of data.
    data: Option<Vec<u8>>,
    /// The number of bytes since the last event.
    arrived: usize,
    /// Whether the last byte was a carriage return, so that a line feed belongs to the same end of a line.
    after_return: bool,
}

impl EventReader {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, line: Vec::new(), data: None, arrived: 0, after_return: false }
    }

    /// Returns the data of the events that end in this piece.
    ///
    /// # Errors
    /// An error after the events: no further piece must be read.
    pub(crate) fn read(&mut self, mut piece: &[u8]) -> Vec<Result<String, HttpError>> {
        let mut events = Vec::new();
        while let Some(&first) = piece.first() {
            if std::mem::take(&mut self.after_return) && first == b'\n' {
                piece = &piece[1..];
                continue;
            }
            let end = piece.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let (text, rest) = piece.split_at(end.unwrap_or(piece.len()));
            self.arrived += text.len() + usize::from(end.is_some());
            if self.arrived > self.max {
                events.push(Err(HttpError::TooLong(self.max)));
                return events;
            }
            self.line.extend_from_slice(text);
            if let Some((end, rest)) = rest.split_first() {
                self.after_return = *end == b'\r';
                piece = rest;
                events.extend(self.end_line());
            } else {
                piece = rest;
            }
        }
        events
    }

    /// Ends the current line. Returns the data of the event that it ends.
    fn end_line(&mut self) -> Option<Result<String, HttpError>> {
        if self.line.is_empty() {
            let data = self.data.take()?;
            self.arrived = 0;
            return Some(String::from_utf8(data).map_err(|error| HttpError::Event(error.to_string())));
        }
        if let Some(value) = self.line.strip_prefix(b"data").filter(|rest| matches!(rest.first(), None | Some(b':'))) {
            let value = value.strip_prefix(b":").unwrap_or_default();
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
                None => self.data = Some(value.to_vec()),
            }
        }
        self.line.clear();
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use eventsource_stream::Eventsource;
    use futures::{FutureExt, StreamExt, stream};
    use proptest::{collection::vec, prelude::*, sample::select};

    const MAX: usize = 1 << 20;

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let mut reader = EventReader::new(MAX);
        pieces.iter().flat_map(|piece| reader.read(piece)).map(|event| event.expect("the event can be read")).collect()
    }

    proptest! {
        #[test]
        fn events_equal_those_of_another_reader_for_any_pieces(
            parts in vec(
                select(vec!["data: ", "data:", "data", "a", "é", " ", ":", ": ping", "event: x", "id", "retry: 1", "\n", "\n\n", "\r\n", "\r", "{\"a\": 1}"]),
                0..60,
            ),
            cut in any::<prop::sample::Index>(),
        ) {
            let text = parts.concat();
            let (first, second) = text.as_bytes().split_at(cut.index(text.len() + 1));
            let whole = read(&[text.as_bytes()]);
            prop_assert_eq!(&read(&[first, second]), &whole);
            prop_assert_eq!(&read(&text.as_bytes().chunks(1).collect::<Vec<_>>()), &whole);
            // The other reader returns no events without data. It reads a lone carriage return as text.
            if !text.replace("\r\n", "").contains('\r') {
                let other = stream::iter([Ok::<_, HttpError>(text.as_bytes())]).eventsource().map(|event| event.expect("a text").data);
                let other = other.filter(|data| std::future::ready(!data.is_empty())).collect::<Vec<String>>();
                let other = other.now_or_never().expect("all pieces are there");
                prop_assert_eq!(whole.into_iter().filter(|data| !data.is_empty()).collect::<Vec<_>>(), other);
            }
        }
    }

    #[test]
    fn endless_lines_are_refused_after_the_limit() {
        for endless in ["\n", "\r\n", "data\n", ": \n", "x", "data: x"] {
            let mut reader = EventReader::new(MAX);
            let events = reader.read(endless.repeat(2 * MAX).as_bytes());
            assert!(matches!(&events[..], [Err(HttpError::TooLong(MAX))]), "{endless:?}");
        }
        let short = "data: x\n\n".repeat(MAX);
        assert_eq!(read(&[short.as_bytes()]).len(), MAX, "the stream may be longer than one event");
        assert!(matches!(EventReader::new(MAX).read(b"data: \xFF\n\n")[..], [Err(HttpError::Event(_))]));
    }
}
