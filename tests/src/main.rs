//! A command that simulates the cluster: many seeds, or one seed with its log.
#![expect(clippy::print_stdout, reason = "this command line tool prints its results")]

use clap::Parser;
use std::process::ExitCode;
use tandem_tests::simulation::{Coverage, run, run_all};

/// Simulates the whole cluster with faults, one run per seed.
#[derive(Parser)]
struct Flags {
    /// The number of seeds to simulate.
    #[arg(long, default_value_t = 1_000)]
    seeds: u64,
    /// The first seed to simulate.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// Run only this seed and print its log.
    #[arg(long, conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    if let Some(seed) = flags.seed {
        let report = run(seed);
        report.log.iter().for_each(|line| println!("{line}"));
        return print_result(&report.violations, seed, report.trace);
    }
    let (mut failed, mut done, mut trace, mut coverage) = (0, 0, 0u64, Coverage::default());
    let started = tokio::time::Instant::now();
    run_all(flags.first..flags.first.saturating_add(flags.seeds), |report| {
        done += 1;
        coverage += report.coverage;
        // The sum does not depend on the order in which seeds finish.
        trace = trace.wrapping_add(report.trace);
        if !report.violations.is_empty() {
            failed += 1;
            println!("{}", report.failure());
        }
        true
    });
    println!("{coverage:#?}");
    println!("{done} seeds, {failed} failed, in {:.1} s; trace {trace:016x}", started.elapsed().as_secs_f64());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print_result(violations: &[String], seed: u64, trace: u64) -> ExitCode {
    violations.iter().for_each(|violation| println!("VIOLATED: {violation}"));
    println!("seed {seed}: trace {trace:016x}, {} violations", violations.len());
    if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
