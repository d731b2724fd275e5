//! Stories of placements: who gets what, what it counts, and that nothing is left of it.

use super::*;
use crate::Costs;
use crate::booked::BookingId;
use tandem_kv::{Change, KvEvent, StoredChain};

const BLOCK: u32 = 16;

impl State {
    /// All news at once.
    pub(crate) fn apply(&mut self, id: MemberId, batch: KvBatch, beside: Beside) {
        self.apply_events(id, &batch.events).expect("the worker can hold what it stores");
        self.report(id, batch.load, beside, &batch.included_request_ids);
    }
}

struct Story {
    state: State,
    recorder: Metrics,
    requests: u64,
}

fn info(role: worker_info::Role, name: &str) -> WorkerInfo {
    WorkerInfo {
        role: role.into(),
        worker_id: name.to_owned(),
        instance_id: format!("{name}-1"),
        model: "m".to_owned(),
        revision: "r".to_owned(),
        block_size: BLOCK,
        capacity_blocks: 100_000,
        context_length: 1_000_000,
        block_bytes: 1_000,
        ..Default::default()
    }
}

fn settings(prefill: PrefillPlace) -> RouterSettings {
    RouterSettings { prefill, seed: 11, ..Default::default() }
}

/// The hashes of a prompt named `name` that shares its first `shared` blocks with all others.
fn hashes(name: u64, shared: u64, blocks: u64) -> Arc<[SequenceHash]> {
    (0..blocks).map(|at| SequenceHash(if at < shared { at + 1 } else { (name + 1) << 32 | at })).collect()
}

impl Story {
    fn new(settings: RouterSettings) -> Self {
        let recorder = Metrics::default();
        let state = Cluster::new(settings, recorder.clone()).state.into_inner();
        Self { state, recorder, requests: 0 }
    }

    /// `prefill` and `decode` workers, named p0, p1, …, d0, …
    fn with(settings: RouterSettings, prefill: usize, decode: usize) -> Self {
        let mut story = Self::new(settings);
        for (role, letter, count) in [(worker_info::Role::Prefill, 'p', prefill), (worker_info::Role::Decode, 'd', decode)] {
            for number in 0..count {
                story.join(info(role, &format!("{letter}{number}"))).expect("it agrees with the others");
            }
        }
        story
    }

    fn join(&mut self, info: WorkerInfo) -> Result<MemberId, Refused> {
        self.state.join(info, "host:1".to_owned(), &Snapshot { at_event_id: 0, stored: Vec::new() })
    }

    fn member(&self, name: &str) -> MemberId {
        *self.state.members.iter().find(|(_, member)| member.info.worker_id == name).expect("it is a member").0
    }

    fn ask(&mut self, prompt_tokens: u32, hashes: Arc<[SequenceHash]>) -> Asked {
        self.requests += 1;
        Asked {
            request_id: format!("r{}", self.requests).into(),
            model: "m".to_owned(),
            hashes,
            prompt_tokens,
            samples: 1,
            prompt_logits: false,
        }
    }

    fn place(&mut self, asked: &Asked) -> (BookingId, v1::Placement) {
        self.state.place(asked, &Excluded::default(), 1).expect("it can be placed")
    }

    fn place_hashes(&mut self, prompt_tokens: u32, hashes: Arc<[SequenceHash]>) -> (BookingId, v1::Placement) {
        let asked = self.ask(prompt_tokens, hashes);
        self.place(&asked)
    }

    fn says(&mut self, name: &str, events: Vec<KvEvent>, load: Load, included_request_ids: &[&str]) {
        let included_request_ids = included_request_ids.iter().map(|id| (*id).to_owned()).collect();
        let id = self.member(name);
        self.state.apply(id, KvBatch { events, load, included_request_ids, ..Default::default() }, Beside::default());
    }

    fn stored(&mut self, name: &str, hashes: &[SequenceHash]) {
        let chain = StoredChain { parent: None, sequence_hashes: hashes.to_vec() };
        self.says(name, vec![KvEvent { event_id: 1, change: Change::Stored(chain) }], Load::default(), &[]);
    }

    /// (tokens, sequences, bookings) that count on the worker without its own report.
    fn booked(&self, name: &str) -> (u64, u64, u32) {
        let booked = &self.state.members[&self.member(name)].booked;
        (booked.tokens(), booked.sequences(), booked.bookings())
    }

    fn assert_idle(&self) {
        assert!(self.state.bookings.is_empty());
        for member in self.state.members.values() {
            assert_eq!((member.booked.tokens(), member.booked.sequences(), member.booked.bookings()), (0, 0, 0));
            assert_eq!(member.booked.predicted_blocks(&hashes(0, 1, 9), 0), 0);
        }
        assert!(self.recorder.render().contains("tandem_router_bookings 0"), "{}", self.recorder.render());
    }
}

fn name(candidate: &Option<v1::Candidate>) -> String {
    let worker = candidate.as_ref().and_then(|candidate| candidate.worker.as_ref());
    worker.map_or_else(String::new, |worker| worker.worker_id.clone())
}

#[test]
fn a_remote_prompt_counts_on_both_sides_until_each_has_taken_it_in() {
    let mut story = Story::with(settings(PrefillPlace::Remote), 1, 1);
    story.stored("p0", &hashes(1, 0, 2));
    let asked = Asked { samples: 3, ..story.ask(101, hashes(1, 0, 6)) };
    let (booking, placement) = story.place(&asked);
    assert_eq!((name(&placement.decode), name(&placement.prefill)), ("d0".to_owned(), "p0".to_owned()));
    let overlaps = |candidate: Option<v1::Candidate>| candidate.map(|c| (c.overlap_blocks, c.predicted_blocks));
    assert_eq!((overlaps(placement.prefill), overlaps(placement.decode)), (Some((2, 0)), Some((0, 0))));
    // All tokens but the last, less two blocks.
    assert_eq!((story.booked("p0"), story.booked("d0")), ((100 - 32, 1, 1), (0, 3, 1)));

    story.says("p0", vec![], Load { pending_prefill_tokens: 68, ..Default::default() }, &["r1"]);
    assert_eq!((story.booked("p0"), story.booked("d0")), ((0, 0, 1), (0, 3, 1)));
    story.says("d0", vec![], Load { running_sequences: 3, ..Default::default() }, &["other", "r1"]);
    assert_eq!(story.booked("d0"), (0, 0, 1));

    story.state.release_prefill(booking, Some(48));
    assert_eq!((story.booked("p0"), story.booked("d0")), ((0, 0, 0), (0, 0, 1)));
    story.state.release_prefill(booking, Some(0));
    story.state.release(booking);
    story.state.release(booking);
    story.assert_idle();
    let text = story.recorder.render();
    assert!(text.contains(r#"tandem_router_overlap_under_tokens_total{worker="p0"} 16"#), "{text}");
    assert!(text.contains(r#"tandem_router_overlap_over_tokens_total{worker="p0"} 0"#), "{text}");
    assert!(text.contains(r#"tandem_router_placements_total{worker="p0",kind="prefill"} 1"#), "{text}");
    assert!(text.contains(r#"tandem_router_placements_total{worker="d0",kind="decode"} 1"#), "{text}");

    // The view says what the metrics say, and of the cache what the worker says.
    let cache = Some(v1::CacheTotals { prompts: 1, prompts_hit: 1, prompt_tokens: 101, cached_tokens: 48 });
    let steps = Some(v1::StepTotals { prefilled_tokens: 53, generated_tokens: 9 });
    let beside = Beside { transfer_bytes_per_second: 7.0, cache, steps };
    story.state.apply(story.member("p0"), KvBatch::default(), beside);
    let view = story.state.view();
    let of = |name: &str| view.workers.iter().find(|view| view.info.as_ref().is_some_and(|info| info.worker_id == name)).cloned();
    let (prefill, decode) = (of("p0").expect("it is there"), of("d0").expect("it is there"));
    let totals = v1::PlacementTotals { prefill: 1, overlap_blocks: 2, overlap_under_tokens: 16, ..Default::default() };
    assert_eq!(prefill.placements, Some(totals));
    let told = prefill.load.map(|load| (load.transfer_bytes_per_second, load.cache, load.steps));
    assert_eq!(told, Some((7.0, cache, steps)));
    assert_eq!(decode.placements, Some(v1::PlacementTotals { decode: 1, ..Default::default() }));
    assert_eq!(decode.load.map(|load| load.cache), Some(None), "it has told nothing");
    assert!(!prefill.circuit_open && !decode.circuit_open);
}

#[test]
fn after_lost_news_nothing_counts_beside_the_workers_report() {
    let mut story = Story::with(settings(PrefillPlace::Local), 0, 1);
    let (booking, _) = story.place_hashes(100, hashes(1, 0, 6));
    // What was lost said that the request is taken in, and the next report includes it.
    let id = story.member("d0");
    story.state.replace(id, &Snapshot { at_event_id: 7, stored: Vec::new() });
    assert_eq!(story.booked("d0"), (0, 0, 1));
    story.state.release_prefill(booking, None);
    story.state.release(booking);
    story.assert_idle();
}

#[test]
fn a_local_prompt_counts_on_decode_and_its_tokens_go_first() {
    let mut story = Story::with(settings(PrefillPlace::Local), 1, 1);
    let (booking, placement) = story.place_hashes(100, hashes(1, 0, 6));
    assert!(placement.prefill.is_none());
    assert_eq!((story.booked("p0"), story.booked("d0")), ((0, 0, 0), (100, 1, 1)));
    story.state.release_prefill(booking, None);
    assert_eq!(story.booked("d0"), (0, 1, 1));
    story.state.release(booking);
    story.assert_idle();
}

#[test]
fn a_booking_given_up_before_anything_happened_leaves_nothing() {
    for place in [PrefillPlace::Remote, PrefillPlace::Local] {
        let mut story = Story::with(settings(place), 2, 2);
        let bookings: Vec<BookingId> = (0..20).map(|at| story.place_hashes(100 + at, hashes(0, 1, 6)).0).collect();
        assert!(story.recorder.render().contains("tandem_router_bookings 20"));
        for booking in bookings {
            story.state.release(booking);
        }
        story.assert_idle();
    }
}

#[test]
fn a_worker_that_leaves_takes_its_entries_and_its_bookings_along() {
    let mut story = Story::with(settings(PrefillPlace::Remote), 1, 1);
    story.stored("p0", &hashes(1, 0, 6));
    let (first, _) = story.place_hashes(100, hashes(1, 0, 6));
    let gone = story.member("p0");
    story.state.leave(gone);
    assert!(!story.recorder.render().contains(r#"worker="p0""#), "its series are gone with it");
    let asked = story.ask(100, hashes(1, 0, 6));
    let refused = story.state.place(&asked, &Excluded::default(), 1).expect_err("nobody prefills");
    assert_eq!(refused, NotPlaced::Unplaced(Unplaced::NoPrefill));

    // The same worker again, as a new instance: it gets the slot, and nothing of what was in it.
    story.join(WorkerInfo { instance_id: "p0-2".to_owned(), ..info(worker_info::Role::Prefill, "p0") }).expect("it may");
    let (second, placement) = story.place_hashes(100, hashes(1, 0, 6));
    assert_eq!(placement.prefill.map(|candidate| candidate.overlap_blocks), Some(0));
    assert_eq!(story.booked("p0"), (99, 1, 1));
    story.state.release(first);
    assert_eq!(story.booked("p0"), (99, 1, 1), "the old instance's booking is not taken from the new one");
    // News of the old instance that comes late is nobody's.
    story.state.apply(gone, KvBatch { included_request_ids: vec!["r3".to_owned()], ..Default::default() }, Beside::default());
    story.state.replace(gone, &Snapshot { at_event_id: 1, stored: Vec::new() });
    assert_eq!(story.booked("p0"), (99, 1, 1));
    story.state.release(second);
    story.assert_idle();
}

#[test]
fn overlap_counts_what_a_worker_may_reuse_and_no_more() {
    let mut story = Story::with(settings(PrefillPlace::Local), 0, 1);
    story.stored("d0", &hashes(1, 0, 10));
    for (prompt_tokens, given, prompt_logits, expected) in [
        (161, 10, false, 10),
        (160, 10, false, 9),
        (200, 4, false, 4),
        (200, 0, false, 0),
        (17, 10, false, 1),
        (161, 10, true, 0),
    ] {
        let asked = Asked { prompt_logits, ..story.ask(prompt_tokens, hashes(1, 0, given)) };
        let (booking, placement) = story.place(&asked);
        assert_eq!(placement.block_size, BLOCK);
        assert_eq!(placement.decode.map(|candidate| candidate.overlap_blocks), Some(expected), "{prompt_tokens} {given}");
        story.state.release(booking);
    }
    story.assert_idle();
}

#[test]
fn a_burst_of_one_prompt_stays_together_and_predictions_are_never_called_overlap() {
    for place in [PrefillPlace::Remote, PrefillPlace::Local] {
        let mut story = Story::with(settings(place), 4, 4);
        let mut bookings = Vec::new();
        let mut seen = BTreeSet::new();
        for at in 0..6 {
            let (booking, placement) = story.place_hashes(1_001, hashes(1, 0, 62));
            bookings.push(booking);
            let computes = placement.prefill.or(placement.decode);
            let counts = computes.as_ref().map(|candidate| (candidate.overlap_blocks, candidate.predicted_blocks));
            assert_eq!(counts, Some((0, if at == 0 { 0 } else { 62 })));
            seen.insert(name(&computes));
        }
        assert_eq!(seen.len(), 1, "one worker computes the prompt");
        // The events come: what was predicted is known now.
        let computes = seen.first().expect("there is one").clone();
        story.stored(&computes, &hashes(1, 0, 62));
        let (booking, placement) = story.place_hashes(1_001, hashes(1, 0, 62));
        let candidate = placement.prefill.or(placement.decode).expect("somebody computes");
        assert_eq!((candidate.overlap_blocks, candidate.predicted_blocks), (62, 0));
        for booking in bookings.into_iter().chain([booking]) {
            story.state.release(booking);
        }
        story.assert_idle();
    }
}

#[test]
fn load_spreads_although_all_prompts_share_their_first_block() {
    let mut story = Story::with(settings(PrefillPlace::Remote), 8, 2);
    story.stored("p3", &hashes(0, 1, 1));
    let mut tokens = BTreeMap::<String, u64>::new();
    for at in 0..400 {
        let blocks = 20 + at * 7 % 100;
        let hashes = hashes(at, 1, blocks);
        let (_, placement) = story.place_hashes(blocks as u32 * BLOCK + 1, hashes);
        *tokens.entry(name(&placement.prefill)).or_default() += blocks * u64::from(BLOCK);
    }
    let (max, sum) = (tokens.values().max().expect("some"), tokens.values().sum::<u64>());
    assert!(*max as f64 / (sum as f64 / 8.0) < 1.1, "{tokens:?}");
    assert_eq!(story.booked("d0").1 + story.booked("d1").1, 400);
    assert!(story.booked("d0").1.abs_diff(story.booked("d1").1) <= 1, "{:?} {:?}", story.booked("d0"), story.booked("d1"));
}

#[test]
fn overlap_wins_when_loads_are_equal() {
    let mut story = Story::with(settings(PrefillPlace::Remote), 8, 1);
    for at in 0..8 {
        story.stored(&format!("p{at}"), &hashes(at, 1, 30));
    }
    for at in 0..8 {
        let (booking, placement) = story.place_hashes(481, hashes(at, 1, 30));
        assert_eq!(name(&placement.prefill), format!("p{at}"));
        assert_eq!(placement.prefill.map(|candidate| candidate.overlap_blocks), Some(30));
        story.state.release(booking);
    }
}

#[test]
fn failed_attempts_avoid_the_culprit_and_end_on_decode_alone() {
    let mut story = Story::with(RouterSettings { attempts_max: 3, ..settings(PrefillPlace::Auto) }, 2, 1);
    // Decode is busy: left alone, the prompt goes remote.
    story.says("d0", vec![], Load { running_sequences: 50, decode_step_ms: 1.0, ..Default::default() }, &[]);
    let asked = story.ask(2_001, hashes(1, 0, 125));
    let mut excluded = Excluded::default();
    let mut used = Vec::new();
    for attempt in 1..=2 {
        let (booking, placement) = story.state.place(&asked, &excluded, attempt).expect("somebody prefills");
        let culprit = name(&placement.prefill);
        used.push(culprit.clone());
        excluded.failed.insert(format!("{culprit}-1"));
        story.state.release(booking);
    }
    used.sort();
    assert_eq!(used, ["p0", "p1"]);
    let (booking, placement) = story.state.place(&asked, &Excluded::default(), 3).expect("decode prefills");
    assert_eq!((name(&placement.decode), placement.prefill), ("d0".to_owned(), None));
    story.state.release(booking);
    assert_eq!(story.state.place(&asked, &Excluded::default(), 4), Err(NotPlaced::TooManyAttempts));
    excluded.failed.insert("d0-1".to_owned());
    let (booking, placement) = story.state.place(&asked, &excluded, 3).expect("who was merely full is asked again");
    assert_eq!(name(&placement.decode), "d0");
    story.state.release(booking);
    excluded.lost.insert("d0-1".to_owned());
    assert_eq!(story.state.place(&asked, &excluded, 3), Err(NotPlaced::Unplaced(Unplaced::AllFailed)));
    story.assert_idle();
    assert!(story.recorder.render().contains("tandem_router_refused_total 2"));
}

#[test]
fn what_cannot_be_placed_is_refused() {
    let mut story = Story::with(RouterSettings { bookings_max: 1, ..settings(PrefillPlace::Auto) }, 1, 1);
    let refused = |story: &mut Story, asked: &Asked| story.state.place(asked, &Excluded::default(), 1).map(|(id, _)| id);
    let other = Asked { model: "other".to_owned(), ..story.ask(10, hashes(1, 0, 0)) };
    assert_eq!(refused(&mut story, &other), Err(NotPlaced::OtherModel));
    let long = story.ask(1_000_001, hashes(1, 0, 0));
    assert_eq!(refused(&mut story, &long), Err(NotPlaced::Unplaced(Unplaced::TooLong)));
    let unnamed = Asked { model: String::new(), ..story.ask(10, hashes(1, 0, 0)) };
    let booking = refused(&mut story, &unnamed).expect("no model is any model");
    let one_more = story.ask(10, hashes(1, 0, 0));
    assert_eq!(refused(&mut story, &one_more), Err(NotPlaced::TooManyBookings));
    story.state.release(booking);
    story.assert_idle();
    let nobody = Story::new(settings(PrefillPlace::Auto)).state.place(&one_more, &Excluded::default(), 1);
    assert_eq!(nobody, Err(NotPlaced::Unplaced(Unplaced::NoDecode)));
}

#[test]
fn who_does_not_agree_with_the_first_member_does_not_join() {
    let good = info(worker_info::Role::Decode, "d0");
    let mut story = Story::new(settings(PrefillPlace::Auto));
    let first = story.join(good.clone()).expect("the first decides");
    let new = || WorkerInfo { instance_id: "new".to_owned(), ..good.clone() };
    for (bad, field) in [
        (WorkerInfo { model: "n".to_owned(), ..new() }, "model"),
        (WorkerInfo { revision: "s".to_owned(), ..new() }, "revision"),
        (WorkerInfo { block_size: 32, ..new() }, "block size"),
        (WorkerInfo { version: "99.0.0".to_owned(), ..new() }, "version"),
        (WorkerInfo { instance_id: "other".to_owned(), ..good.clone() }, "--worker-id"),
        (WorkerInfo { role: 9, ..new() }, "a role"),
        (WorkerInfo { worker_id: String::new(), ..new() }, "a worker_id"),
        (WorkerInfo { instance_id: String::new(), ..new() }, "an instance_id"),
        (WorkerInfo { block_size: 0, ..new() }, "a block_size"),
        (WorkerInfo { capacity_blocks: 0, ..new() }, "a capacity"),
    ] {
        let refused = story.join(bad).expect_err("it does not agree");
        assert!(refused.to_string().contains(field), "{refused}");
    }
    assert_eq!(story.join(good.clone()), Err(Refused::Twice));
    assert_eq!(story.state.members.len(), 1);
    // When all have left, the next one decides anew.
    story.state.leave(first);
    story.join(WorkerInfo { block_size: 32, ..new() }).expect("the first decides");
}

#[test]
fn a_worker_that_fails_requests_is_left_alone_but_never_when_it_is_the_last() {
    let mut story = Story::with(settings(PrefillPlace::Remote), 2, 1);
    let asked = story.ask(100, hashes(1, 0, 6));
    let fail = |story: &mut Story, reason, instance: &str| {
        let (booking, _) = story.place(&asked);
        story.state.failed(booking, instance, reason);
        story.state.release(booking);
    };
    for reason in [
        v1::FailureReason::AtCapacity,
        v1::FailureReason::InvalidRequest,
        v1::FailureReason::Draining,
        v1::FailureReason::WrongInstance,
    ] {
        (0..10).for_each(|_| fail(&mut story, reason, "d0-1"));
    }
    (0..10).for_each(|_| fail(&mut story, v1::FailureReason::EngineFailed, "nobody"));
    let open = |story: &Story| story.state.view().workers.iter().filter(|view| view.circuit_open).count();
    assert_eq!(open(&story), 0, "what is full, leaving, nonsense or somebody else's is no fault");
    (0..20).for_each(|_| fail(&mut story, v1::FailureReason::PrefillLost, "p0-1"));
    assert_eq!(open(&story), 1);
    (0..8).for_each(|_| {
        let (booking, placement) = story.place(&asked);
        assert_eq!(name(&placement.prefill), "p1");
        story.state.release(booking);
    });
    (0..3).for_each(|_| fail(&mut story, v1::FailureReason::Timeout, "d0-1"));
    assert_eq!(open(&story), 2);
    let (booking, placement) = story.place(&asked);
    assert_eq!(name(&placement.decode), "d0", "there is no other");
    story.state.worked(booking);
    story.state.release(booking);
    assert!(open(&story) <= 1, "it works again");
    story.assert_idle();
}

#[test]
fn an_explanation_is_what_would_be_placed_and_books_nothing() {
    for place in [PrefillPlace::Remote, PrefillPlace::Local, PrefillPlace::Auto] {
        let mut story = Story::with(settings(place), 3, 2);
        story.stored("p1", &hashes(1, 0, 40));
        story.stored("d1", &hashes(1, 0, 10));
        story.says("p2", vec![], Load { pending_prefill_tokens: 5_000, ..Default::default() }, &[]);
        story.says("d0", vec![], Load { running_sequences: 9, ..Default::default() }, &[]);
        let asked = story.ask(1_001, hashes(1, 0, 62));
        let explained = story.state.explain(&asked);
        story.assert_idle();
        assert_eq!(explained.workers.len(), 5);
        for worker in &explained.workers {
            let costs = [&worker.as_prefill, &worker.as_decode, &worker.alone];
            let prefills = worker.role() == worker_info::Role::Prefill;
            let expected = [prefills, !prefills, !prefills];
            let allowed = [place != PrefillPlace::Local, place != PrefillPlace::Local, place != PrefillPlace::Remote];
            for ((cost, expected), allowed) in costs.into_iter().zip(expected).zip(allowed) {
                assert_eq!(cost.is_some(), expected && allowed, "{place:?} {worker:?}");
                let Some(cost) = cost else { continue };
                let parts = cost.queue_ms
                    + cost.compute_ms
                    + cost.interference_ms
                    + cost.transfer_ms
                    + cost.handoff_ms
                    + cost.decode_load_ms;
                assert!((cost.total_ms - parts).abs() < 1e-9 && cost.total_ms > 0.0, "{cost:?}");
            }
        }
        let (booking, placement) = story.place(&asked);
        assert_eq!(explained.placement, Some(placement.clone()), "{}", explained.explanation);
        let chosen = placement.prefill.as_ref().map_or(name(&placement.decode) + " alone", |_| name(&placement.prefill));
        assert!(explained.explanation.contains(&chosen) && explained.explanation.contains("ms; "), "{}", explained.explanation);
        story.state.release(booking);
        story.assert_idle();
    }
    let mut story = Story::new(settings(PrefillPlace::Auto));
    let asked = story.ask(10, hashes(1, 0, 0));
    let explained = story.state.explain(&asked);
    assert!(explained.placement.is_none() && explained.explanation.contains("no decode worker"), "{}", explained.explanation);
}

#[tokio::test]
async fn while_a_flood_of_events_is_applied_requests_are_placed() {
    let mut story = Story::with(settings(PrefillPlace::Local), 0, 1);
    let (id, asked) = (story.member("d0"), story.ask(100, hashes(1, 0, 6)));
    let cluster = Cluster { state: Mutex::new(story.state), left: Notify::new(), peer_left: Notify::new() };
    let long = |from: u64| (from..from + 2_000).map(SequenceHash).collect::<Vec<_>>();
    let chain = |sequence_hashes: Vec<SequenceHash>| Change::Stored(StoredChain { parent: None, sequence_hashes });
    let pairs: Vec<Change> = (0..1_000).flat_map(|_| [chain(long(0)[..1].to_vec()), Change::Cleared]).collect();
    let chains: Vec<Change> = (0..10).map(|at| chain(long(at * 2_000))).collect();
    for (changes, slices) in [(pairs, 1_000), (chains, 4), (vec![], 1)] {
        let events: Vec<KvEvent> = (1..).zip(changes).map(|(event_id, change)| KvEvent { event_id, change }).collect();
        let batch = KvBatch { events, load: Load { running_sequences: slices, ..Default::default() }, ..Default::default() };
        let placed = std::cell::Cell::new(0);
        let place = async {
            loop {
                let (booking, _) = cluster.lock().place(&asked, &Excluded::default(), 1).expect("it can be placed");
                cluster.lock().release(booking);
                placed.set(placed.get() + 1);
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            applied = cluster.apply(id, batch, Beside::default()) => applied.expect("the worker can hold it"),
            () = place => {}
        }
        assert_eq!(placed.get() + 1, slices, "one between two slices");
        assert_eq!(cluster.lock().members[&id].load.running_sequences, slices, "the load counts after all events");
    }
    assert_eq!(cluster.lock().view().workers[0].indexed_blocks, 20_000);
}

#[test]
fn a_worker_that_is_avoided_for_an_old_rate_is_tried_again() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let _entered = runtime.enter();
    let mut story = Story::with(settings(PrefillPlace::Remote), 2, 1);
    let says = |story: &mut Story, name: &str, rate: f64, prefill_measurements: u64| {
        let id = story.member(name);
        let load = Load { prefill_tokens_per_second: rate, prefill_measurements, ..Default::default() };
        story.state.apply(id, KvBatch { load, ..Default::default() }, Beside::default());
    };
    let placed = |story: &mut Story, tokens: &mut u64| {
        let (booking, placement) = story.place_hashes(1_000, [].into());
        story.state.release(booking);
        *tokens += 1_000;
        name(&placement.prefill)
    };
    says(&mut story, "p0", 100.0, 2);
    let (mut tokens, mut first) = (0, None);
    for second in 0..300 {
        says(&mut story, "p1", 20_000.0, tokens);
        if placed(&mut story, &mut tokens) == "p0" {
            first.get_or_insert(second);
        }
        // Heartbeats say nothing new.
        says(&mut story, "p0", 100.0, 2);
        runtime.block_on(tokio::time::advance(Duration::from_secs(1)));
    }
    let first = first.expect("it gets a prompt again");
    assert!((30..200).contains(&first), "after {first} s");
}

#[test]
fn short_prefills_do_not_renew_an_old_rate() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let _entered = runtime.enter();
    let mut story = Story::with(settings(PrefillPlace::Remote), 1, 1);
    let id = story.member("p0");
    let weight = |story: &Story| {
        let candidate = story.state.members[&id].candidate(&[], 0, Instant::now(), &Costs::default());
        candidate.prefill_tokens_per_second.expect("it is measured").weight
    };
    let says = |story: &mut Story, rate: f64, prefilled_tokens: u64, prefill_measurements: u64| {
        let load = Load { prefill_tokens_per_second: rate, prefill_measurements, ..Default::default() };
        let steps = Some(v1::StepTotals { prefilled_tokens, generated_tokens: 0 });
        story.state.apply(id, KvBatch { load, ..Default::default() }, Beside { steps, ..Default::default() });
    };
    says(&mut story, 200.0, 1_536, 1);
    assert_eq!(weight(&story), 1.0);
    // 16 tokens every second: each step bends the fit a little.
    for second in 1..=300_u32 {
        runtime.block_on(tokio::time::advance(Duration::from_secs(1)));
        says(&mut story, 200.0 + f64::from(second) / 1e3, 1_536 + 16 * u64::from(second), 1);
    }
    assert!(weight(&story) < 0.01, "{}", weight(&story));
    says(&mut story, 20_000.0, 7_000, 2);
    assert_eq!(weight(&story), 1.0, "a long step renews it");
}

mod peers;
