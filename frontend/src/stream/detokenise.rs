//! Tokens' bytes to text, as they come.

use std::str;

/// Holds back the bytes of a character that is not whole yet. What it gives, put together, is what
/// [`String::from_utf8_lossy`] would make of all bytes at once.
#[derive(Default)]
pub(crate) struct Detokeniser {
    held: Vec<u8>,
}

impl Detokeniser {
    /// Adds bytes to `text` as far as they are whole characters. Bytes that can never become one are replaced by U+FFFD.
    pub(crate) fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.held.extend_from_slice(bytes);
        let mut rest = self.held.as_slice();
        loop {
            match str::from_utf8(rest) {
                Ok(whole) => {
                    text.push_str(whole);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (whole, broken) = rest.split_at(error.valid_up_to());
                    text.push_str(str::from_utf8(whole).unwrap_or_default());
                    rest = broken;
                    // Without a length: the end came too early, more bytes may make it whole.
                    let Some(len) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[len..];
                }
            }
        }
        let done = self.held.len() - rest.len();
        self.held.drain(..done);
    }

    /// No more bytes come: what was held back is no character.
    pub(crate) fn finish(&mut self, text: &mut String) {
        if !std::mem::take(&mut self.held).is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way of cutting up to 12 bytes into pieces.
    #[test]
    fn every_split_gives_the_same_text() {
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
                let (mut text, mut detokeniser, mut start) = (String::new(), Detokeniser::default(), 0);
                for end in 1..=bytes.len() {
                    if end == bytes.len() || split >> (end - 1) & 1 == 1 {
                        detokeniser.push(&bytes[start..end], &mut text);
                        start = end;
                        assert!(detokeniser.held.len() < 4, "only the bytes of one character are held");
                    }
                }
                detokeniser.finish(&mut text);
                assert_eq!(text, expected, "{bytes:?} cut as {split:b}");
            }
        }
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        let (mut text, mut detokeniser) = (String::new(), Detokeniser::default());
        for byte in &"€".as_bytes()[..2] {
            detokeniser.push(&[*byte], &mut text);
            assert_eq!(text, "");
        }
        detokeniser.push(&"€".as_bytes()[2..], &mut text);
        assert_eq!(text, "€");
    }
}
