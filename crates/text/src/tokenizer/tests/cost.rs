//! Measures what it costs to encode a prompt.

use super::*;
use std::{
    io::Write,
    time::{Duration, Instant},
};

#[test]
#[expect(clippy::disallowed_methods, reason = "it measures")]
#[ignore = "needs TANDEM_TOKENIZER, the path of a byte-level tokenizer.json, and an optimized build"]
fn prompt_is_encoded_faster_than_by_the_library_and_much_faster_from_the_cache() {
    const ROUNDS: usize = 50;
    let json =
        std::fs::read(std::env::var_os("TANDEM_TOKENIZER").expect("TANDEM_TOKENIZER is set")).expect("the file can be read");
    let library = tokenizers::Tokenizer::from_bytes(&json).expect("the tokenizer is valid");
    let (own, _) = Tokenizer::from_json(&json).expect("the tokenizer is supported");
    let (encodings, _) = encodings(1 << 20);
    let text = concat!(
        include_str!("../../../../../ARCHITECTURE.md"),
        include_str!("../../../../../docs/api.md"),
        include_str!("../../../../../docs/engines.md"),
        include_str!("../../../../../docs/routing.md"),
        include_str!("../../../../../docs/processes.md")
    );
    let tokens = own.encode(text, Special::Parsed).expect("every text can be encoded");
    assert_eq!(tokens, library.encode_fast(text, false).expect("every text can be encoded").get_ids());
    // The encoders run alternately. The first round fills caches, so it is not the shortest.
    let ways: [&dyn Fn() -> usize; 3] = [
        &|| library.encode_fast(text, false).expect("every text can be encoded").len(),
        &|| own.encode(text, Special::Parsed).expect("every text can be encoded").len(),
        &|| own.encode_prompt(text, None, &encodings).expect("every text can be encoded").len(),
    ];
    let mut shortest = ways.map(|_| Duration::MAX);
    for _ in 0..ROUNDS {
        for (way, shortest) in ways.iter().zip(&mut shortest) {
            let started = Instant::now();
            assert_eq!(way(), tokens.len());
            *shortest = started.elapsed().min(*shortest);
        }
    }
    let [library, own, remembered] = shortest;
    writeln!(std::io::stderr(), "{} tokens: library {library:?}, own {own:?}, remembered {remembered:?}", tokens.len())
        .expect("stderr can be written");
    assert!(own < library / 3 && remembered < own / 10);
}
