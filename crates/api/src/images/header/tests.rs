use super::*;

fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    [&(data.len() as u32).to_be_bytes()[..], kind, data, b"crc!"].concat()
}

fn ihdr(width: u32, height: u32) -> Vec<u8> {
    chunk(b"IHDR", &[&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat())
}

fn png_of(chunks: &[Vec<u8>]) -> Vec<u8> {
    [b"\x89PNG\r\n\x1a\n".to_vec(), chunks.concat()].concat()
}

fn segment(kind: u8, data: &[u8]) -> Vec<u8> {
    [&[0xff, kind][..], &(data.len() as u16 + 2).to_be_bytes(), data].concat()
}

fn sof(kind: u8, width: u16, height: u16) -> Vec<u8> {
    segment(kind, &[&[8][..], &height.to_be_bytes(), &width.to_be_bytes(), &[1, 1, 0x11, 0]].concat())
}

fn jpeg_of(segments: &[Vec<u8>]) -> Vec<u8> {
    [vec![0xff, 0xd8], segments.concat()].concat()
}

fn webp_of(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    [b"RIFF\x30\0\0\0WEBP", &kind[..], &(data.len() as u32).to_le_bytes(), data].concat()
}

/// A GIF with a screen of this size, two colors, an extension, and an image of this place and size.
fn gif_of(screen: [u16; 2], image: [u16; 4]) -> Vec<u8> {
    let words = |words: &[u16]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let comment = b"!\xfe\x05hello\x02!,\0";
    [&b"GIF89a"[..], &words(&screen), &[0x80, 0, 0], &[0; 6], comment, b",", &words(&image)].concat()
}

fn valid() -> Vec<(&'static str, Vec<u8>)> {
    let app = || segment(0xe1, &sof(0xc0, 9_999, 9_999));
    vec![
        ("image/png", png_of(&[ihdr(8192, 4096), chunk(b"gAMA", b"1234"), chunk(b"IDAT", b"")])),
        ("image/jpeg", jpeg_of(&[app(), vec![0xff], sof(0xc2, 640, 480), segment(0xc4, b"table"), segment(0xda, b"")])),
        ("image/webp", webp_of(b"VP8 ", &[0x10, 0, 0, 0x9d, 0x01, 0x2a, 0x80, 0x42, 0xe0, 0x01])),
        ("image/webp", webp_of(b"VP8L", &[0x2f, 0xff, 0xc0, 0x3f, 0x00])),
        ("image/webp", webp_of(b"VP8X", &[0, 0, 0, 0, 0xff, 0x1f, 0, 0xff, 0x0f, 0])),
        ("image/gif", gif_of([320, 200], [0, 0, 320, 200])),
    ]
}

#[test]
fn sizes_are_read_from_the_headers_of_all_types() {
    let files: Vec<Vec<u8>> = valid().into_iter().map(|(_, file)| file).collect();
    assert_eq!(png(&files[0]), Some((8192, 4096)));
    assert_eq!(jpeg(&files[1]), Some((640, 480)));
    assert_eq!([webp(&files[2]), webp(&files[3]), webp(&files[4])], [Some((640, 480)), Some((256, 256)), Some((8192, 4096))]);
    assert_eq!(gif(&files[5]), Some((320, 200)));
    assert_eq!(gif(&gif_of([1, 1], [100, 7, 300, 8])), Some((400, 15)), "the image is larger than the screen");
    for (media_type, file) in valid() {
        assert!(check(&file, media_type).is_ok(), "{media_type}");
    }
}

#[test]
fn truncated_headers_are_refused() {
    for (media_type, file) in valid() {
        // All of these files end with the header, up to the length of the first pixels' chunk.
        let shortest = (0..=file.len()).find(|len| check(&file[..*len], media_type).is_ok()).expect("the whole file is valid");
        assert!(shortest + 4 >= file.len(), "{media_type}: {shortest} of {}", file.len());
    }
}

#[test]
fn images_that_decoders_may_read_otherwise_and_bombs_are_refused() {
    let data = || chunk(b"IDAT", b"");
    let refused = |file: Vec<u8>, media_type| check(&file, media_type).expect_err("the file is refused");
    let malformed = "has a truncated or malformed header";
    assert_eq!(refused(png_of(&[ihdr(1, 1), ihdr(60_000, 60_000), data()]), "image/png"), malformed);
    assert_eq!(refused(png_of(&[data(), ihdr(1, 1)]), "image/png"), malformed);
    assert_eq!(refused(jpeg_of(&[sof(0xc0, 1, 1), sof(0xc0, 60_000, 60_000), segment(0xda, b"")]), "image/jpeg"), malformed);
    assert_eq!(refused(jpeg_of(&[segment(0xda, b""), sof(0xc0, 1, 1)]), "image/jpeg"), malformed);
    let endless = png_of(&[ihdr(1, 1), [&u32::MAX.to_be_bytes()[..], b"tEXt"].concat(), data()]);
    assert_eq!(refused(endless, "image/png"), malformed);
    for bomb in [(u32::MAX, u32::MAX), (8193, 4096), (1, (32 << 20) + 1)] {
        assert!(refused(png_of(&[ihdr(bomb.0, bomb.1), data()]), "image/png").contains("pixels"), "{bomb:?}");
    }
    assert!(refused(gif_of([1, 1], [0, 0, u16::MAX, u16::MAX]), "image/gif").contains("pixels"));
    for (width, height) in [(0, 5), (5, 0)] {
        assert!(refused(png_of(&[ihdr(width, height), data()]), "image/png").contains("of 0"));
    }
}

#[test]
fn files_of_another_type_than_they_say_are_refused() {
    for (media_type, file) in valid() {
        for other in ["image/png", "image/jpeg", "image/webp", "image/gif"].into_iter().filter(|other| *other != media_type) {
            assert_eq!(check(&file, other), Err("is a file of another type than it says"));
        }
    }
    for file in
        [&b""[..], b"<svg xmlns=\"http://www.w3.org/2000/svg\"/>", b"%PDF-1.7", b"BM", b"II*\0", b"\xff\xd8", b"RIFF0000WAVE"]
    {
        assert_eq!(check(file, "image/png"), Err("is not a PNG, JPEG, WebP or GIF file"), "{file:?}");
    }
}
