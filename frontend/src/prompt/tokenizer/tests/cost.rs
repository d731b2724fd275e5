//! Measures what it costs to encode a prompt.

use super::*;

/// Returns the CPU time of this thread, in microseconds.
fn cpu_us() -> f64 {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts the time of threads");
    times.split(' ').next().and_then(|time| time.parse::<f64>().ok()).expect("the first number is the time in nanoseconds") / 1e3
}

#[test]
#[ignore = "needs TANDEM_TOKENIZER, the path of a byte-level tokenizer.json, and an optimized build"]
#[expect(clippy::print_stdout, reason = "the figures are printed")]
fn prompt_costs_less_than_with_the_library_and_next_to_nothing_the_second_time() {
    const ROUNDS: usize = 21;
    let json =
        std::fs::read(std::env::var_os("TANDEM_TOKENIZER").expect("TANDEM_TOKENIZER is set")).expect("the file can be read");
    let library = tokenizers::Tokenizer::from_bytes(&json).expect("the tokenizer is valid");
    let (own, _) = Tokenizer::from_json(&json).expect("the tokenizer is supported");
    let (encodings, _) = encodings(1 << 20);
    let text = include_str!("../../../../../ARCHITECTURE.md");
    let tokens = own.encode(text, Special::Parsed).expect("every text can be encoded");
    assert_eq!(tokens, library.encode_fast(text, false).expect("every text can be encoded").get_ids());
    // The ways take turns, and the first round fills caches.
    let ways: [&dyn Fn() -> usize; 3] = [
        &|| library.encode_fast(text, false).expect("every text can be encoded").len(),
        &|| own.encode(text, Special::Parsed).expect("every text can be encoded").len(),
        &|| own.encode_prompt(text, None, &encodings).expect("every text can be encoded").len(),
    ];
    let mut times = ways.map(|_| Vec::new());
    for round in 0..=ROUNDS {
        for (way, times) in ways.iter().zip(&mut times) {
            let started = cpu_us();
            assert_eq!(way(), tokens.len());
            times.extend((round > 0).then(|| cpu_us() - started));
        }
    }
    let [library, own, cached] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    });
    println!("{} tokens: library {library:.0} µs, own {own:.0} µs, remembered {cached:.0} µs", tokens.len());
    assert!(own < library / 3.0 && cached < own / 10.0);
}
