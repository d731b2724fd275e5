//! Simulated clusters with faults that a seed determines. `cargo run --release -p tandem-tests -- --seeds 10000` runs more seeds.

use tandem_tests::simulation::{Coverage, run, run_all};

const REQUIRED: Coverage = Coverage {
    requests: 15_000,
    answered: 10_000,
    attempts_failed: 500,
    migrations: 100,
    preemptions: 10,
    cached_tokens: 1_000_000,
    transferred_bytes: 1 << 20,
};

#[test]
fn simulations_of_a_thousand_seeds_keep_all_invariants() {
    let (mut coverage, mut failures) = (Coverage::default(), Vec::new());
    run_all(1..1_001, |report| {
        coverage += report.coverage;
        if !report.violations.is_empty() {
            failures.push(report.failure());
        }
        // The loop stops after a few failures.
        failures.len() < 5
    });
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    assert!(coverage.reaches(REQUIRED), "coverage is below the minimum: {coverage:#?}");
}

#[test]
fn same_seed_gives_the_same_run() {
    for seed in 1..25 {
        let (first, second) = (run(seed), run(seed));
        assert_eq!(first.violations, second.violations, "seed {seed}");
        assert_eq!(first.trace, second.trace, "seed {seed}: the events or their times differ");
    }
    assert_ne!(run(1).trace, run(2).trace);
}
