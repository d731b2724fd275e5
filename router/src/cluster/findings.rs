//! Compares the blocks that a worker's engine finds in its cache with those that the worker reports.
//!
//! Some engines find systematically less than their events say: with speculative decoding, vLLM drops the last matched block of each
//! prompt. Others report late. Both faults are learned from the latest prompts that the worker has computed, by majority, so that single
//! differences (a block that was evicted meanwhile) change nothing. The overlap that is used for placements is corrected, and a note says
//! so to the operator.

use std::collections::VecDeque;

/// The number of prompts from which a difference is learned. Older ones are forgotten.
const RECENT: usize = 16;
/// No difference is learned from fewer prompts.
const RECENT_MIN: usize = 8;
/// A worker reports late if this many of the latest prompts found more than was known.
const LATE_MIN: usize = 4;
/// A worker that reports no blocks after this many prompts counts as silent.
const SILENT_MIN: u32 = 8;
/// Prompts with fewer tokens are not counted, because an engine's block may have hundreds of tokens.
const SILENT_TOKENS: u64 = 1_024;

/// One prompt that a worker has computed. All numbers are leading blocks of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FoundBlocks {
    /// Blocks that the worker had reported as cached when the prompt was placed, or must have had cached although it reports late.
    pub(super) reported: u32,
    /// Blocks that were reported, or that other prompts were about to compute.
    pub(super) known: u32,
    /// Blocks that the engine found in its cache.
    pub(super) found: u32,
}

/// How many of the reported blocks the engine does not find.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Correction {
    #[default]
    None,
    /// This many blocks less.
    Blocks(u32),
    /// Nothing, whatever was reported.
    Everything,
}

/// The differences between a worker's reports and the blocks that its engine found, for its latest prompts.
#[derive(Default)]
pub(super) struct Findings {
    /// The latest prompts of which the worker had reported cached blocks.
    reported: VecDeque<FoundBlocks>,
    /// For each of the latest prompts, whether the engine found more than was known.
    late: VecDeque<bool>,
    correction: Correction,
    /// The number of prompts that the worker has computed while it reported no blocks at all.
    unreported_prompts: u32,
}

impl Correction {
    /// Returns the number of leading blocks that the engine is expected to find.
    pub(super) fn apply(self, reported: u32) -> u32 {
        match self {
            Self::None => reported,
            Self::Blocks(less) => reported.saturating_sub(less),
            Self::Everything => 0,
        }
    }

    /// Returns the number of blocks for metrics: infinity for all.
    pub(super) fn blocks(self) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Blocks(less) => less.into(),
            Self::Everything => f64::INFINITY,
        }
    }
}

impl Findings {
    /// Learns from a prompt that the worker has computed.
    pub(super) fn add(&mut self, finding: FoundBlocks) {
        push(&mut self.late, finding.found > finding.known);
        if finding.reported > 0 {
            push(&mut self.reported, finding);
            self.correction = self.learned();
        }
    }

    /// Counts a prompt that the worker has computed, and whose full blocks have this many tokens. `indexed` is the number of the worker's
    /// blocks in the index now.
    pub(super) fn computed(&mut self, tokens: u64, indexed: u64) {
        if indexed == 0 && tokens >= SILENT_TOKENS {
            self.unreported_prompts = self.unreported_prompts.saturating_add(1);
        }
    }

    /// Records that the worker reports blocks. Returns whether it counted as silent before.
    pub(super) fn reports(&mut self) -> bool {
        let was_silent = self.is_silent();
        self.unreported_prompts = 0;
        was_silent
    }

    pub(super) fn correction(&self) -> Correction {
        self.correction
    }

    /// Whether the worker's reports arrive later than the next prompts.
    pub(super) fn is_late(&self) -> bool {
        self.late.iter().filter(|late| **late).count() >= LATE_MIN
    }

    /// Whether the worker reports no blocks although it computes prompts.
    pub(super) fn is_silent(&self) -> bool {
        self.unreported_prompts >= SILENT_MIN
    }

    /// Returns a text for operators; `None` if the engine finds what the worker reports.
    pub(super) fn note(&self) -> Option<String> {
        let less = match self.correction {
            Correction::None => None,
            Correction::Blocks(1) => Some("its engine finds one block less than its events say".to_owned()),
            Correction::Blocks(less) => Some(format!("its engine finds {less} blocks less than its events say")),
            Correction::Everything => Some("its engine finds none of the blocks that its events report".to_owned()),
        };
        let late = self.is_late().then(|| "its events arrive late".to_owned());
        let silent = self.is_silent().then(|| {
            "it reports no cached blocks although it computes prompts: its prefix cache is off, or its KV events do not arrive".to_owned()
        });
        let notes: Vec<String> = [less, late, silent].into_iter().flatten().collect();
        (!notes.is_empty()).then(|| notes.join("; "))
    }

    /// Returns the correction that three quarters of the latest prompts agree on.
    fn learned(&self) -> Correction {
        let prompts = self.reported.len();
        let most = |count: usize| prompts >= RECENT_MIN && count * 4 >= prompts * 3;
        let less = |finding: &FoundBlocks| finding.reported.saturating_sub(finding.found);
        let agree = |blocks: u32| self.reported.iter().filter(|finding| less(finding) == blocks).count();
        match self.reported.iter().map(less).find(|blocks| most(agree(*blocks))) {
            Some(0) => Correction::None,
            Some(blocks) => Correction::Blocks(blocks),
            None if most(self.reported.iter().filter(|finding| finding.found == 0).count()) => Correction::Everything,
            None => Correction::None,
        }
    }
}

fn push<T>(recent: &mut VecDeque<T>, value: T) {
    if recent.len() == RECENT {
        recent.pop_front();
    }
    recent.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned(findings: impl IntoIterator<Item = (u32, u32)>) -> Findings {
        let mut learned = Findings::default();
        findings.into_iter().for_each(|(reported, found)| learned.add(FoundBlocks { reported, known: reported, found }));
        learned
    }

    #[test]
    fn constant_difference_is_learned_after_some_prompts_and_forgotten_later() {
        let drops_two = |reported: u32| (reported, reported.saturating_sub(2));
        assert_eq!(learned((3..10).map(drops_two)).correction(), Correction::None, "seven prompts are too few");
        let mut findings = learned((3..11).map(drops_two));
        assert_eq!(findings.correction(), Correction::Blocks(2));
        assert_eq!([0, 1, 2, 7].map(|reported| findings.correction().apply(reported)), [0, 0, 0, 5]);
        assert!(findings.note().expect("the difference is named").contains("2 blocks less"));
        (0..16).for_each(|_| findings.add(FoundBlocks { reported: 5, known: 5, found: 5 }));
        assert_eq!((findings.correction(), findings.note()), (Correction::None, None));
    }

    #[test]
    fn engine_that_finds_nothing_differs_from_one_that_drops_some_blocks() {
        assert_eq!(learned((1..20).map(|reported| (reported, 0))).correction(), Correction::Everything);
        assert_eq!(learned((1..20).map(|_| (1, 0))).correction(), Correction::Blocks(1));
        assert_eq!(learned((1..20).map(|reported| (reported, reported))).correction(), Correction::None);
    }

    #[test]
    fn single_evictions_are_not_learned_as_a_difference() {
        let evicted = |(prompt, reported): (usize, u32)| (reported, if prompt % 5 == 0 { 0 } else { reported });
        assert_eq!(learned((5..60).enumerate().map(evicted)).correction(), Correction::None);
        let erratic = |reported: u32| (reported, reported - reported % 4);
        assert_eq!(learned((5..60).map(erratic)).correction(), Correction::None, "no difference is in the majority");
    }

    #[test]
    fn late_and_missing_reports_are_noted() {
        let mut late = Findings::default();
        (0..3).for_each(|_| late.add(FoundBlocks { reported: 0, known: 1, found: 4 }));
        assert!(!late.is_late());
        late.add(FoundBlocks { reported: 0, known: 1, found: 4 });
        assert!(late.is_late() && late.note().expect("it is named").contains("late"));
        (0..16).for_each(|_| late.add(FoundBlocks { reported: 4, known: 4, found: 4 }));
        assert_eq!(late.note(), None);

        let mut silent = Findings::default();
        (0..20).for_each(|_| silent.computed(1_008, 0));
        (0..20).for_each(|_| silent.computed(2_000, 1));
        assert_eq!(silent.note(), None);
        (0..8).for_each(|_| silent.computed(1_024, 0));
        assert!(silent.is_silent() && silent.note().expect("it is named").contains("reports no cached blocks"));
        assert!(silent.reports() && !silent.reports());
        assert_eq!(silent.note(), None);
    }
}
