//! Simulates clusters whose number of workers follows a rule, in five worlds: the router's wanted number, a HorizontalPodAutoscaler on the
//! numbers of requests, and the best schedule that is known in advance. docs/autoscaling.md shows a run.
//!
//! ```sh
//! cargo bench -p tandem-simulator --bench scaling -- [PARTS OF NAMES]
//! ```
#![expect(clippy::print_stdout, reason = "the benchmark prints figures")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};
use support::scaling::{Outcome, World, worlds};
use tandem_simulator::{CountedRequests, ScalingRule};

/// The part of the requests that the best schedule may serve worse than a cluster of ample size.
const BEST_MISSES: f64 = 0.02;
/// The numbers of workers beyond a load's mean that the tried schedules have, as multiples of the square root of the mean.
const SPARES: [f64; 4] = [0.0, 0.3, 0.6, 1.0];
/// The numbers of requests that the tried autoscalers keep for each worker.
const WAITING: [f64; 6] = [0.05, 0.1, 0.25, 0.5, 1.0, 3.0];
const ALL: [f64; 6] = [8.0, 12.0, 16.0, 24.0, 32.0, 48.0];

fn row(name: &str, outcome: &Outcome, best: &Outcome) {
    let Outcome { good, worker_hours, changes, refused } = *outcome;
    println!(
        "  {name:<24}{:>9.2} %{:>9.1}{:>9}{:>9.2} %{:>10.1} %{:>10.1} %",
        good * 100.0,
        worker_hours,
        changes,
        refused * 100.0,
        good / best.good * 100.0,
        worker_hours / best.worker_hours * 100.0
    );
}

/// Returns the schedule with the fewest worker-hours that serves almost as many requests within the levels as a cluster of ample size.
fn best(world: &World) -> Outcome {
    let run = |factor, spare| world.run(ScalingRule::Schedule(world.schedule(factor, spare)));
    let ample = run(3.0, 1.0);
    let searched = SPARES.map(|spare| {
        let (mut low, mut high, mut found) = (0.3, 2.0, ample);
        while high / low > 1.015 {
            let middle = f64::sqrt(low * high);
            let outcome = run(middle, spare);
            if outcome.good >= ample.good - BEST_MISSES { (high, found) = (middle, outcome) } else { low = middle }
        }
        found
    });
    searched.into_iter().min_by(|one, other| one.worker_hours.total_cmp(&other.worker_hours)).expect("schedules were tried")
}

/// Returns the fewest worker-hours of an autoscaler with which at most this part of the requests misses the levels.
fn fewest_hours(misses_max: f64, autoscaled: &[Outcome]) -> Option<f64> {
    let good = autoscaled.iter().filter(|of| 1.0 - of.good <= misses_max);
    good.map(|of| of.worker_hours).min_by(f64::total_cmp)
}

fn report(world: &World, printing: &Mutex<()>) {
    let best = best(world);
    let wanted = world.run(ScalingRule::Wanted);
    let autoscaled = |counted, targets: [f64; 6]| targets.map(|target| world.run(ScalingRule::Autoscaler { counted, target }));
    let by_metric = [
        ("waiting", WAITING, autoscaled(CountedRequests::Waiting, WAITING)),
        ("in flight", ALL, autoscaled(CountedRequests::All, ALL)),
    ];
    let _alone = printing.lock().expect("no thread panics while it prints");
    println!("{} ({} requests, a worker starts in {} s)", world.name, world.requests.len(), world.start.as_secs());
    println!("  rule                         good    hours  changes   refused  of best good  of hours");
    row("best schedule", &best, &best);
    row("wanted", &wanted, &best);
    for (metric, targets, outcomes) in &by_metric {
        for (target, outcome) in targets.iter().zip(outcomes) {
            row(&format!("HPA, {target} {metric}"), outcome, &best);
        }
    }
    for (metric, _, outcomes) in &by_metric {
        match fewest_hours(2.0 * (1.0 - wanted.good), outcomes) {
            Some(hours) => println!(
                "  an HPA on requests {metric} that misses at most twice as many: {:.0} % of the worker-hours of `wanted`",
                hours / wanted.worker_hours * 100.0
            ),
            None => println!("  no tried HPA on requests {metric} misses at most twice as many as `wanted`"),
        }
    }
}

fn main() {
    let parts: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let worlds: Vec<World> = worlds()
        .into_iter()
        .filter(|world| parts.is_empty() || parts.iter().any(|part| world.name.contains(part.as_str())))
        .collect();
    let (next, printing) = (AtomicUsize::new(0), Mutex::new(()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(world) = worlds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    report(world, &printing);
                }
            });
        }
    });
}
