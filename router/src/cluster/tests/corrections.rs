//! Predictions are corrected by what a worker's engine finds.

use super::*;
use std::time::Duration;

/// An engine whose reports differ from what it finds in its cache.
struct Engine {
    scenario: Scenario,
    /// The number of leading blocks that the engine drops of each match.
    drops: u32,
    /// How many prompts later the engine reports the blocks of a prompt.
    late: usize,
    unreported: Vec<Arc<[SequenceHash]>>,
}

impl Engine {
    fn new(drops: u32, late: usize) -> Self {
        Self { scenario: Scenario::with(settings(PrefillPlace::Local), 0, 1), drops, late, unreported: Vec::new() }
    }

    /// Computes a conversation's next prompt, whose first `cached` blocks are cached. Returns the predicted and the found number of blocks.
    fn compute(&mut self, name: u64, cached: u64, blocks: u64) -> (u32, u32) {
        let prompt = hashes(name, blocks, blocks);
        let prompt: Arc<[SequenceHash]> = prompt.iter().map(|hash| SequenceHash(hash.0 + (name << 40))).collect();
        let (booking, placement) = self.scenario.place_hashes(blocks as u32 * 16 + 1, prompt.clone());
        let found = (cached as u32).saturating_sub(self.drops);
        self.scenario.state.on_prefilled(booking, Some(found * 16));
        self.scenario.state.release(booking);
        self.unreported.push(prompt);
        if self.unreported.len() > self.late {
            let reported = self.unreported.remove(0);
            self.scenario.stored("d0", &reported);
        }
        (placement.decode.expect("a decode worker is chosen").overlap_blocks, found)
    }

    /// Computes forty conversations of six turns. Each turn adds two blocks. Returns the number of wrong predictions after the first 50.
    fn wrong_predictions(&mut self) -> usize {
        let turns = (0..40).flat_map(|name| (0..6).map(move |turn| (name, turn)));
        let results: Vec<_> = turns.map(|(name, turn)| self.compute(name, turn * 2, turn * 2 + 2)).collect();
        results[50..].iter().filter(|(predicted, found)| predicted != found).count()
    }

    fn note(&self) -> Option<String> {
        self.scenario.state.view().workers[0].index_note.clone()
    }
}

#[test]
fn exact_reports_are_not_corrected() {
    let mut engine = Engine::new(0, 0);
    assert_eq!((engine.wrong_predictions(), engine.note()), (0, None));
}

#[test]
fn engine_that_drops_a_constant_number_of_blocks_is_predicted_exactly() {
    let mut engine = Engine::new(1, 0);
    assert_eq!(engine.wrong_predictions(), 0);
    assert!(engine.note().expect("there is a note").contains("one block less"));
    assert!(engine.scenario.recorder.render().contains(r#"tandem_router_index_excess_blocks{worker="d0"} 1"#));
}

#[test]
fn engine_that_finds_nothing_is_predicted_exactly() {
    let mut engine = Engine::new(u32::MAX, 0);
    assert_eq!(engine.wrong_predictions(), 0);
    assert!(engine.note().expect("there is a note").contains("none of the blocks"));
}

#[tokio::test(start_paused = true)]
async fn prompts_of_an_engine_that_reports_late_count_as_cached_for_some_seconds() {
    let mut engine = Engine::new(0, 3);
    let wrong = engine.wrong_predictions();
    assert_eq!(wrong, 0);
    assert!(engine.note().expect("there is a note").contains("late"));
    // The last prompt is never reported.
    let (predicted, _) = engine.compute(39, 12, 14);
    assert_eq!(predicted, 12);
    tokio::time::advance(Duration::from_secs(20)).await;
    let (predicted, _) = engine.compute(39, 14, 16);
    assert!(predicted < 14, "{predicted} blocks");
}

#[test]
fn worker_that_computes_prompts_but_reports_nothing_is_noted() {
    let mut engine = Engine::new(u32::MAX, usize::MAX);
    (0..8).for_each(|name| {
        engine.compute(name, 0, 64);
    });
    assert!(engine.note().expect("there is a note").contains("reports no cached blocks"));
    assert!(engine.scenario.recorder.render().contains(r#"tandem_router_worker_reports_nothing{worker="d0"} 1"#));
    engine.late = 0;
    engine.compute(9, 0, 64);
    assert!(engine.scenario.recorder.render().contains(r#"tandem_router_worker_reports_nothing{worker="d0"} 0"#));
}

#[test]
fn late_engine_that_drops_blocks_is_predicted_exactly() {
    let mut engine = Engine::new(1, 3);
    assert_eq!(engine.wrong_predictions(), 0);
}
