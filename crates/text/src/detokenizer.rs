//! Converts the bytes of generated tokens to text.

use std::str;

/// Converts bytes to text. The bytes of an incomplete character are held until it is complete. All chunks of text together equal
/// [`String::from_utf8_lossy`] of all the bytes.
#[derive(Default)]
pub struct Detokenizer {
    held: Vec<u8>,
}

impl Detokenizer {
    /// Adds bytes, and appends all characters that are complete now to `text`. Bytes that cannot be part of a character become U+FFFD.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.held.extend_from_slice(bytes);
        let mut incomplete = 0;
        let mut chunks = self.held.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let broken = chunk.invalid();
            // If the error has no length, the character is incomplete, and further bytes may complete it.
            if chunks.peek().is_none() && str::from_utf8(broken).is_err_and(|error| error.error_len().is_none()) {
                incomplete = broken.len();
            } else if !broken.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        let done = self.held.len() - incomplete;
        self.held.drain(..done);
    }

    /// Ends the text. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if !std::mem::take(&mut self.held).is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test splits texts of up to 12 bytes in all possible ways.
    #[test]
    fn decoded_text_does_not_depend_on_how_bytes_are_split() {
        let texts: [&[u8]; 8] = [
            "naïve €😀x".as_bytes(),
            "👩‍🚀".as_bytes(),
            b"plain",
            b"\xFF\xC3\xA9\xC3",
            b"\xF0\x9F\x98",
            b"\xE2\x82a\xE2\x82\xAC",
            b"\xED\xA0\x80x",
            b"",
        ];
        for bytes in texts {
            let expected = String::from_utf8_lossy(bytes);
            let cuts = bytes.len().saturating_sub(1);
            for split in 0..1_u32 << cuts {
                let (mut text, mut detokenizer, mut start) = (String::new(), Detokenizer::default(), 0);
                for end in 1..=bytes.len() {
                    if end == bytes.len() || split >> (end - 1) & 1 == 1 {
                        detokenizer.push(&bytes[start..end], &mut text);
                        start = end;
                        assert!(detokenizer.held.len() < 4, "only the bytes of one character are held");
                    }
                }
                detokenizer.finish(&mut text);
                assert_eq!(text, expected, "{bytes:?} cut as {split:b}");
            }
        }
    }

    #[test]
    fn character_is_emitted_with_its_last_byte() {
        let (mut text, mut detokenizer) = (String::new(), Detokenizer::default());
        for byte in &"€".as_bytes()[..2] {
            detokenizer.push(&[*byte], &mut text);
            assert_eq!(text, "");
        }
        detokenizer.push(&"€".as_bytes()[2..], &mut text);
        assert_eq!(text, "€");
    }
}
