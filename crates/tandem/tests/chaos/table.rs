//! The measurements of each scenario, and their limits.

use std::{collections::BTreeMap, time::Duration};

/// The extent of a run. `Short` runs all scenarios in a minute, on any machine. `Long` gives the published figures, on a machine that does nothing
/// else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Short,
    Long,
}

/// The short form adds this time to every time limit. Its processes wait for a processor, because other tests run at the same time.
const BUSY_MACHINE: Duration = Duration::from_secs(15);

pub struct Row {
    pub fault: String,
    pub requests: usize,
    /// The number of requests without a complete answer, not counting those of clients that disconnected.
    pub failed: usize,
    /// The number of requests that a client repeated at another frontend, because the frontend that it used was down.
    pub repeated: usize,
    /// The number of answers that failed over to another worker after their first token.
    pub resumed: u64,
    /// The number of attempts that failed before their first token and were retried.
    pub retried: u64,
    /// The number of answers whose text, finish reason or token counts differ from those without the fault.
    pub wrong_texts: usize,
    pub wrong_counts: Vec<String>,
    /// The number of answers whose count of cached tokens was lost with a killed worker.
    pub unverified: u64,
    pub leaked_blocks: f64,
    /// The longest time between two chunks of an answer.
    pub largest_gap: Duration,
    /// The limit on `largest_gap`, which follows from the settings.
    pub gap_max: Duration,
    /// The time from the fault until every answer in flight continued.
    pub recovery: Duration,
    /// The time from the end of the fault until all processes were connected again.
    pub reconnected: Duration,
    /// Whether the fault affected a request or a process.
    pub had_effect: bool,
}

impl Row {
    pub fn check(&self, form: Form) {
        let fault = &self.fault;
        assert_eq!(self.failed, 0, "{fault}: requests failed");
        assert_eq!(self.wrong_texts, 0, "{fault}: answers changed");
        assert!(self.wrong_counts.is_empty(), "{fault}: usage does not reconcile:\n{}", self.wrong_counts.join("\n"));
        let owners_lost = self.resumed + self.retried;
        assert!(self.unverified <= owners_lost, "{fault}: {} answers cannot be verified", self.unverified);
        assert_eq!(self.leaked_blocks, 0.0, "{fault}: blocks leaked");
        assert!(self.had_effect, "{fault}: the fault had no effect");
        let max = if form == Form::Short { self.gap_max + BUSY_MACHINE } else { self.gap_max };
        assert!(self.largest_gap < max, "{fault}: a gap of {:?}, more than {max:?}", self.largest_gap);
    }

    pub fn line(&self) -> String {
        let Self { fault, requests, failed, repeated, resumed, retried, wrong_texts, wrong_counts, .. } = self;
        let Self { unverified, leaked_blocks, .. } = self;
        let [gap, recovery, reconnected] = [self.largest_gap, self.recovery, self.reconnected].map(|time| time.as_secs_f64());
        let wrong = wrong_counts.len();
        format!(
            "| {fault} | {requests} | {failed} | {repeated} | {resumed} | {retried} | {wrong_texts} | {wrong} | {unverified} | {leaked_blocks} | {gap:.3} s | {recovery:.3} s | {reconnected:.3} s |"
        )
    }
}

/// Resident memory of the processes that ran from the beginning to the end, in KiB.
pub struct Memory {
    /// The numbers of requests that had ended when memory was measured the first and the second time.
    pub at: [usize; 2],
    pub resident: BTreeMap<String, [f64; 2]>,
}

impl Memory {
    fn growth([early, late]: [f64; 2]) -> f64 {
        late / early - 1.0
    }

    /// Prints the table of memory that docs/reliability.md shows.
    pub fn print(&self) {
        let [early, late] = self.at;
        print_text(&format!("\n| process | resident at request {early} | at request {late} | growth |\n|---|--:|--:|--:|"));
        for (name, resident) in &self.resident {
            let [early, late] = resident.map(|kib| kib / 1024.0);
            print_text(&format!("| {name} | {early:.1} MiB | {late:.1} MiB | {:.1} % |", Self::growth(*resident) * 100.0));
        }
    }

    /// Panics if a process has grown too much. In a short run caches are still being filled, so the limit is higher.
    pub fn check(&self, form: Form) {
        let max = if form == Form::Short { 0.5 } else { 0.05 };
        for (name, resident) in &self.resident {
            let growth = Self::growth(*resident);
            assert!(growth < max, "{name} has grown by {:.1} % between requests {:?}", growth * 100.0, self.at);
        }
    }
}

pub fn print(rows: &[Row]) {
    let head = [
        "fault",
        "requests",
        "failed",
        "repeated",
        "resumed",
        "retried",
        "wrong texts",
        "wrong counts",
        "not verifiable",
        "leaked blocks",
        "largest gap",
        "recovery",
        "reconnected",
    ];
    print_text(&format!("\n| {} |\n|---{}|", head.join(" | "), "|--:".repeat(head.len() - 1)));
    rows.iter().for_each(|row| print_text(&row.line()));
}

#[expect(clippy::print_stdout, reason = "the tests print measurements")]
pub fn print_text(line: &str) {
    println!("{line}");
}
