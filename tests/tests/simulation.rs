//! The simulated cluster under faults determined by seeds. `cargo run --release -p tandem-tests -- --seeds 10000` runs more seeds.

use tandem_tests::simulation::{Coverage, run, run_all};

/// The coverage that the seeds must reach.
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
fn thousand_seeds_keep_all_invariants() {
    let (mut coverage, mut wrong) = (Coverage::default(), Vec::new());
    run_all(1..1_001, |report| {
        coverage += report.coverage;
        if !report.wrong.is_empty() {
            wrong.push(report.failure());
        }
        // The first few failures suffice.
        wrong.len() < 5
    });
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(coverage.covers(REQUIRED), "coverage is below the minimum: {coverage:#?}");
}

#[test]
fn same_seed_gives_the_same_run() {
    for seed in 1..25 {
        let (first, second) = (run(seed), run(seed));
        assert_eq!(first.wrong, second.wrong, "seed {seed}");
        assert_eq!(first.trace, second.trace, "seed {seed}: something came at another time");
    }
    assert_ne!(run(1).trace, run(2).trace);
}
