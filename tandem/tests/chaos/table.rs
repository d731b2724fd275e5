//! What a story has found, and what it must not find.

use std::{collections::BTreeMap, time::Duration};

/// Short: a minute for all stories, on any machine. Long: the figures, on a quiet one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Short,
    Long,
}

/// On a machine that does other things, too, times say little: processes wait for a processor.
const BUSY: Duration = Duration::from_secs(15);

/// A line of the table.
pub struct Row {
    pub fault: String,
    pub requests: usize,
    /// Those whose client stayed and has no whole answer.
    pub failed: usize,
    /// Times that a client had to ask another frontend, because its own had ended.
    pub asked_again: usize,
    /// Answers that went on elsewhere.
    pub resumed: u64,
    /// Attempts that failed before their first token, and were made again elsewhere.
    pub retried: u64,
    /// Other text, end or tokens than without the fault.
    pub wrong_texts: usize,
    /// What `tandem audit check` finds.
    pub wrong_counts: Vec<String>,
    /// Answers whose count only killed workers knew.
    pub unverified: u64,
    pub leaked_blocks: f64,
    /// The longest wait between two pieces of an answer.
    pub largest_gap: Duration,
    /// What settings promise of it.
    pub gap_max: Duration,
    /// From the fault until every answer that was under way went on.
    pub recovery: Duration,
    /// From the end of the fault until everybody knew everybody again.
    pub whole: Duration,
    /// Somebody has noticed it, so that the rest of the row shows something.
    pub felt: bool,
}

impl Row {
    /// Panics unless all promises were kept.
    pub fn hold(&self, form: Form) {
        let fault = &self.fault;
        assert_eq!(self.failed, 0, "{fault}: requests failed");
        assert_eq!(self.wrong_texts, 0, "{fault}: answers changed");
        assert!(self.wrong_counts.is_empty(), "{fault}: the books do not agree:\n{}", self.wrong_counts.join("\n"));
        let owners_lost = self.resumed + self.retried;
        assert!(self.unverified <= owners_lost, "{fault}: {} answers cannot be verified", self.unverified);
        assert_eq!(self.leaked_blocks, 0.0, "{fault}: blocks leaked");
        assert!(self.felt, "{fault}: no request was affected, so it shows nothing");
        let max = if form == Form::Short { self.gap_max + BUSY } else { self.gap_max };
        assert!(self.largest_gap < max, "{fault}: a gap of {:?}, more than {max:?}", self.largest_gap);
    }

    pub fn line(&self) -> String {
        let Self { fault, requests, failed, asked_again, resumed, retried, wrong_texts, wrong_counts, .. } = self;
        let Self { unverified, leaked_blocks, .. } = self;
        let [gap, recovery, whole] = [self.largest_gap, self.recovery, self.whole].map(|time| time.as_secs_f64());
        let wrong = wrong_counts.len();
        format!(
            "| {fault} | {requests} | {failed} | {asked_again} | {resumed} | {retried} | {wrong_texts} | {wrong} | {unverified} | {leaked_blocks} | {gap:.3} s | {recovery:.3} s | {whole:.3} s |"
        )
    }
}

/// Resident memory of processes that lived through a whole run, in KiB.
pub struct Memory {
    /// When so many requests had ended, and all.
    pub at: [usize; 2],
    pub resident: BTreeMap<String, [f64; 2]>,
}

impl Memory {
    fn growth([early, late]: [f64; 2]) -> f64 {
        late / early - 1.0
    }

    /// Its own table there.
    pub fn print(&self) {
        let [early, late] = self.at;
        print_line(&format!("\n| process | resident at request {early} | at request {late} | growth |\n|---|--:|--:|--:|"));
        for (name, resident) in &self.resident {
            let [early, late] = resident.map(|kib| kib / 1024.0);
            print_line(&format!("| {name} | {early:.1} MiB | {late:.1} MiB | {:.1} % |", Self::growth(*resident) * 100.0));
        }
    }

    /// Panics if a process has grown. A short run says little: caches are still filling.
    pub fn hold(&self, form: Form) {
        let max = if form == Form::Short { 0.5 } else { 0.05 };
        for (name, resident) in &self.resident {
            let growth = Self::growth(*resident);
            assert!(growth < max, "{name} has grown by {:.1} % between requests {:?}", growth * 100.0, self.at);
        }
    }
}

/// A table of docs/reliability.md.
pub fn print(rows: &[Row]) {
    let head = [
        "fault",
        "requests",
        "failed",
        "asked again",
        "resumed",
        "tried again",
        "wrong texts",
        "wrong counts",
        "not verifiable",
        "leaked blocks",
        "largest gap",
        "recovery",
        "whole again",
    ];
    print_line(&format!("\n| {} |\n|---{}|", head.join(" | "), "|--:".repeat(head.len() - 1)));
    rows.iter().for_each(|row| print_line(&row.line()));
}

#[expect(clippy::print_stdout, reason = "the figures are for the person that runs the test")]
pub fn print_line(line: &str) {
    println!("{line}");
}
