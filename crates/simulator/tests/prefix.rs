//! Why prompts were not cached, compared with what the simulation knows.

mod support;

use std::ops::ControlFlow;
use support::documents;
use tandem_load::report::{Recorder, Slo};
use tandem_router::{Cause, Funnel};
use tandem_simulator::{RoutingRule, SimulatedCluster, SimulatedRequest, Size, simulate};

/// The number and the length of the documents, and the number of questions about each.
const DOCUMENTS: u64 = 60;
const BLOCKS: u64 = 40;
const QUESTIONS: u64 = 6;
const BLOCK_TOKENS: u64 = 64;

fn requests() -> Vec<SimulatedRequest> {
    documents(DOCUMENTS, BLOCKS, QUESTIONS, 5)
}

/// Simulates questions about documents, `concurrency` at a time. A worker can cache this number of documents. Checks that found tokens and causes are all tokens, and that they
/// are what the workers have counted.
fn simulated(size: Size, concurrency: usize, cached_documents: u64) -> Funnel {
    let mut cluster = SimulatedCluster {
        block_tokens: BLOCK_TOKENS,
        concurrency: Some(concurrency),
        ..SimulatedCluster::new(RoutingRule::Tandem, size)
    };
    cluster.device.capacity_tokens = (BLOCKS + 2) * BLOCK_TOKENS * cached_documents;
    let mut recorder = Recorder::new(Slo::default());
    let totals = simulate(&cluster, requests(), &mut |outcome| {
        recorder.add(outcome);
        ControlFlow::Continue(())
    });
    let (funnel, tokens) = (totals.prefix, recorder.report("", Vec::new()).tokens);
    assert_eq!((funnel.prompt, funnel.found), (tokens.prompt, tokens.cached_counted), "as the workers have counted");
    let missed: u64 = funnel.causes.iter().map(|(_, tokens)| tokens).sum();
    assert_eq!(missed + funnel.found, funnel.prompt);
    assert!(funnel.possible >= funnel.eligible && funnel.eligible >= funnel.found, "{funnel:?}");
    assert_eq!(funnel.causes.tokens(Cause::BelowBlock), DOCUMENTS * QUESTIONS * (BLOCK_TOKENS - 1));
    // Whatever the workers did meanwhile, a document is new when the first question about it arrives, and never again. The first one may be computed
    // after a later one, and then finds its blocks.
    let (new, expected) = (funnel.causes.tokens(Cause::NewText), DOCUMENTS * BLOCKS * BLOCK_TOKENS);
    assert!(new == expected || concurrency > 1 && new < expected && new > expected * 9 / 10, "{new} of {expected}");
    funnel
}

#[test]
fn new_text_is_what_no_earlier_request_had_and_evicted_blocks_are_known() {
    for (size, concurrency) in [(Size::Mixed(3), 1), (Size::Mixed(3), 6), (Size::Split { prefill: 2, decode: 2 }, 1)] {
        let small = simulated(size, concurrency, 8);
        assert!(small.causes.tokens(Cause::Evicted) > small.found, "{small:?}");
        let large = simulated(size, concurrency, 100);
        assert_eq!(large.causes.tokens(Cause::Evicted), 0, "{large:?}");
        assert_eq!(large.causes.tokens(Cause::GroupRule) + large.causes.tokens(Cause::OtherNamespace), 0);
    }
}

#[test]
fn engines_that_report_their_caches_find_what_was_expected() {
    let funnel = simulated(Size::Mixed(1), 4, 100);
    assert_eq!((funnel.causes.tokens(Cause::Engine), funnel.causes.tokens(Cause::HeldElsewhere)), (0, 0));
    assert_eq!(funnel.possible, funnel.eligible);
}
