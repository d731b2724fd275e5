//! Reads the size of images from their headers, without decoding pixels. A file that is no valid image may have a valid header; the renderer
//! then refuses it.

/// The maximum number of pixels of an image, for example 8192 × 4096. Decoded, they take 96 MiB.
const PIXELS_MAX: u64 = 32 << 20;

/// Checks that the file is of the media type, and that its header announces at least one pixel and at most [`PIXELS_MAX`]. Returns the
/// number of pixels.
///
/// # Errors
/// Returns what is wrong with the file, as a rule that follows its field's name.
pub(super) fn check(file: &[u8], media_type: &str) -> Result<u64, &'static str> {
    let (found, size) = match file {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => ("image/png", png(file)),
        [0xff, 0xd8, 0xff, ..] => ("image/jpeg", jpeg(file)),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => ("image/webp", webp(file)),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => ("image/gif", gif(file)),
        _ => return Err("is not a PNG, JPEG, WebP or GIF file"),
    };
    if found != media_type {
        return Err("is a file of another type than it says");
    }
    let (width, height) = size.ok_or("has a truncated or malformed header")?;
    match u64::from(width) * u64::from(height) {
        0 => Err("has a width or a height of 0"),
        pixels if pixels > PIXELS_MAX => Err("has more than 33,554,432 pixels (8192 × 4096); send a smaller image"),
        pixels => Ok(pixels),
    }
}

/// Returns the `N` bytes from `at` on; `None` if the file is shorter.
fn bytes<const N: usize>(file: &[u8], at: usize) -> Option<[u8; N]> {
    file.get(at..)?.first_chunk().copied()
}

fn u16_le(file: &[u8], at: usize) -> Option<u32> {
    bytes(file, at).map(|bytes| u16::from_le_bytes(bytes).into())
}

fn u16_be(file: &[u8], at: usize) -> Option<u32> {
    bytes(file, at).map(|bytes| u16::from_be_bytes(bytes).into())
}

fn png(file: &[u8]) -> Option<(u32, u32)> {
    let number = |at| bytes(file, at).map(u32::from_be_bytes);
    let (mut at, mut found) = (8, None);
    loop {
        // A chunk: its length, its type, its data and a checksum. Decoders use the last IHDR before the pixels, so there must be only one.
        match &bytes(file, at + 4)? {
            b"IDAT" => return found,
            b"IHDR" if found.replace((number(at + 8)?, number(at + 12)?)).is_some() => return None,
            _ => at += 12 + number(at)? as usize,
        }
    }
}

/// Returns the size of the only frame header before the pixels. A second one would give decoders a choice.
fn jpeg(file: &[u8]) -> Option<(u32, u32)> {
    let (mut at, mut found) = (2, None);
    loop {
        let [0xff, kind] = bytes(file, at)? else { return None };
        match kind {
            // The segment may be preceded by fill bytes.
            0xff => at += 1,
            0xda => return found,
            0xc0..=0xcf if ![0xc4, 0xc8, 0xcc].contains(&kind) => {
                if found.replace((u16_be(file, at + 7)?, u16_be(file, at + 5)?)).is_some() {
                    return None;
                }
                at += 2 + u16_be(file, at + 2).filter(|len| *len >= 8)? as usize;
            }
            0x01 | 0xd0..=0xd9 | 0x00 => return None,
            _ => at += 2 + u16_be(file, at + 2).filter(|len| *len >= 2)? as usize,
        }
    }
}

fn webp(file: &[u8]) -> Option<(u32, u32)> {
    match &bytes(file, 12)? {
        b"VP8 " => {
            let is_key_frame = bytes(file, 20).is_some_and(|[first]: [u8; 1]| first & 1 == 0);
            let starts = bytes(file, 23)? == [0x9d, 0x01, 0x2a];
            (is_key_frame && starts).then_some((u16_le(file, 26)? & 0x3fff, u16_le(file, 28)? & 0x3fff))
        }
        b"VP8L" => {
            let [0x2f] = bytes(file, 20)? else { return None };
            let bits = u32::from_le_bytes(bytes(file, 21)?);
            Some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
        }
        b"VP8X" => {
            let [w0, w1, w2, h0, h1, h2] = bytes(file, 24)?;
            Some((u32::from_le_bytes([w0, w1, w2, 0]) + 1, u32::from_le_bytes([h0, h1, h2, 0]) + 1))
        }
        _ => None,
    }
}

/// Returns the size of the screen, or of the first image if that is larger: decoders enlarge the screen for it.
fn gif(file: &[u8]) -> Option<(u32, u32)> {
    let [flags, _, _]: [u8; 3] = bytes(file, 10)?;
    let colors = if flags & 0x80 > 0 { 3 << ((flags & 7) + 1) } else { 0 };
    let mut at = 13 + colors;
    loop {
        match bytes(file, at)? {
            [b','] => {
                let end = |from, len| Some(u16_le(file, at + from)? + u16_le(file, at + len)?);
                return Some((u16_le(file, 6)?.max(end(1, 5)?), u16_le(file, 8)?.max(end(3, 7)?)));
            }
            [b'!'] => {
                // An extension: a label, then blocks with their lengths up to an empty one.
                at += 2;
                loop {
                    let [len] = bytes(file, at)?;
                    at += 1 + usize::from(len);
                    if len == 0 {
                        break;
                    }
                }
            }
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests;
