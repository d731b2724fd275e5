//! Tests of replication between two routers: the loads on each router include the bookings of both, even if messages are lost, and nothing
//! remains of released bookings.

use super::*;
use crate::replication::{PeerReceiver, ReplicationError};
use proptest::{collection, prelude::*};
use std::collections::{HashSet, VecDeque};
use tandem_proto::v1::{BookingChange, BookingState, BookingsReply, bookings_reply::Message};

fn reply(router: &str, message: Message) -> BookingsReply {
    BookingsReply { router_instance_id: router.to_owned(), message: Some(message) }
}

/// The replication stream from one router to another.
struct Replica {
    known: Option<u64>,
    sent: VecDeque<BookingsReply>,
    receiver: PeerReceiver,
    peer: PeerId,
}

impl Replica {
    fn open(to: &mut ClusterState) -> Self {
        Self { known: None, sent: VecDeque::new(), receiver: PeerReceiver::new(1_000), peer: to.add_peer("router:1") }
    }

    fn reopen(&mut self, to: &mut ClusterState) {
        to.remove_peer(self.peer);
        *self = Self::open(to);
    }

    fn send(&mut self, from: &ClusterState) {
        let (messages, last) = from.bookings.messages(self.known, &from.members);
        self.known = Some(last);
        self.sent.extend(messages.into_iter().map(|message| reply(&from.instance_id, message)));
    }

    /// Delivers the next message. After a gap the full state is requested again.
    fn deliver(&mut self, to: &mut ClusterState) {
        let Some(reply) = self.sent.pop_front() else { return };
        match self.receiver.take(reply) {
            Ok(update) => to.update_peer(self.peer, update),
            Err(ReplicationError::Gap { .. }) => self.reopen(to),
            Err(error) => panic!("{error}"),
        }
    }

    /// Loses the next message if it has changes. A full state is sent in chunks over one connection, which loses no chunk.
    fn lose(&mut self) {
        self.sent.pop_front_if(|reply| matches!(reply.message, Some(Message::Changes(_))));
    }

    fn settle(&mut self, from: &ClusterState, to: &mut ClusterState) {
        for _ in 0..3 {
            self.send(from);
            while !self.sent.is_empty() {
                self.deliver(to);
            }
        }
    }
}

/// The expected state of a booking.
struct ModelBooking {
    id: BookingId,
    request_id: String,
    placement: v1::Placement,
    load: LoadByRole,
    hashes: Arc<[SequenceHash]>,
    prefilling: bool,
}

#[derive(Clone, Debug)]
enum Act {
    Place {
        prompt: u64,
        blocks: u64,
        samples: u32,
    },
    FirstToken(usize),
    End(usize),
    /// From now on, the reports of a booking's worker include the request. `of` is the router that made the booking, `at` the booking's
    /// position among the bookings of that router. `prefill` selects the prefill worker instead of the decode worker.
    Included {
        of: usize,
        at: usize,
        prefill: bool,
    },
    /// A router receives the next report of a worker that includes a booking.
    Report,
    Send,
    Deliver,
    Lose,
    Reopen,
}

fn act() -> impl Strategy<Value = (usize, Act)> {
    let at = 0..20_usize;
    let act = prop_oneof![
        4 => (0..4_u64, 0..9_u64, 0..5_u32).prop_map(|(prompt, blocks, samples)| Act::Place { prompt, blocks, samples }),
        2 => at.clone().prop_map(Act::FirstToken),
        2 => at.clone().prop_map(Act::End),
        3 => (0..2_usize, at, any::<bool>()).prop_map(|(of, at, prefill)| Act::Included { of, at, prefill }),
        3 => Just(Act::Report),
        3 => Just(Act::Send),
        3 => Just(Act::Deliver),
        1 => Just(Act::Lose),
        1 => Just(Act::Reopen),
    ];
    (0..2_usize, act)
}

const NAMES: [&str; 4] = ["p0", "p1", "d0", "d1"];

/// Returns the load that the router's bookings add to each worker.
fn counted(scenario: &Scenario) -> Vec<(u64, u64, u32, Vec<u32>)> {
    let of = |name: &str| {
        let (tokens, sequences, bookings) = scenario.booked(name);
        (tokens, sequences, bookings, (0..4).map(|prompt| scenario.predicted(name, &hashes(prompt, 1, 9))).collect())
    };
    NAMES.map(of).into()
}

/// Returns the expected load on each worker: that of the bookings of both routers, without the requests that workers have reported.
fn union(made: &[Vec<ModelBooking>; 2], included_request_ids: &HashSet<(String, String)>) -> Vec<(u64, u64, u32, Vec<u32>)> {
    let of = |worker: &str| {
        let (mut sums, mut predicted) = ((0, 0, 0), HashSet::new());
        for booking in made.iter().flatten() {
            let parts = [(&booking.placement.decode, booking.load.decode), (&booking.placement.prefill, booking.load.prefill)];
            for (prefills, (candidate, load)) in [false, true].into_iter().zip(parts) {
                if name(candidate) != worker || (prefills && !booking.prefilling) {
                    continue;
                }
                sums.2 += 1;
                if !included_request_ids.contains(&(worker.to_owned(), booking.request_id.clone())) {
                    sums.0 += if booking.prefilling { load.tokens } else { 0 };
                    sums.1 += u64::from(load.sequences);
                }
                if booking.prefilling && (prefills || booking.placement.prefill.is_none()) {
                    predicted.extend(booking.hashes.iter().copied());
                }
            }
        }
        let leading = |prompt| hashes(prompt, 1, 9).iter().take_while(|hash| predicted.contains(hash)).count() as u32;
        (sums.0, sums.1, sums.2, (0..4).map(leading).collect())
    };
    NAMES.map(of).into()
}

fn two(place: PrefillPlace) -> [Scenario; 2] {
    [1, 2].map(|seed| Scenario::with(RouterSettings { seed, ..settings(place) }, 2, 2))
}

#[test]
fn expected_answer_of_a_peers_booking_counts_as_load_until_the_release() {
    let [mut one, mut other] = two(PrefillPlace::Remote);
    let mut replica = Replica::open(&mut other.state);
    let (booking, placement) = one.place_hashes(101, hashes(1, 0, 6));
    replica.settle(&one.state, &mut other.state);
    let decode = name(&placement.decode);
    let expected = |scenario: &Scenario| scenario.state.members.get(scenario.member(&decode)).bookings.answer_tokens;
    assert_eq!((expected(&other), expected(&one)), (256, 256));
    one.state.release(booking);
    replica.settle(&one.state, &mut other.state);
    assert_eq!(expected(&other), 0);
    other.assert_idle();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn load_on_each_router_includes_the_bookings_of_both_routers(acts in collection::vec(act(), 1..120), remote in any::<bool>()) {
        let mut scenarios = two(if remote { PrefillPlace::Remote } else { PrefillPlace::Local });
        let mut replicas = [Replica::open(&mut scenarios[1].state), Replica::open(&mut scenarios[0].state)];
        let mut made: [Vec<ModelBooking>; 2] = [Vec::new(), Vec::new()];
        let (mut included_request_ids, mut reports) = (HashSet::new(), [VecDeque::new(), VecDeque::new()]);
        let mut requests = 0;
        let report = |scenario: &mut Scenario, (worker, request_id): (String, String)| {
            scenario.reports(&worker, vec![], Load::default(), &[&request_id]);
        };
        for (side, act) in acts {
            let scenario = &mut scenarios[side];
            let pick = |at: usize, of: &[ModelBooking]| (!of.is_empty()).then(|| at % of.len());
            match act {
                Act::Place { prompt, blocks, samples } => {
                    requests += 1;
                    let hashes = hashes(prompt, 1, blocks);
                    let request = PlacementRequest { samples, request_id: format!("{requests}").into(), ..scenario.request(blocks as u32 * BLOCK + 2, hashes.clone()) };
                    let (id, placement) = scenario.place(&request);
                    let load = scenario.state.members.unreported(scenario.state.bookings.by_id.get(&id).expect("the request is booked"));
                    made[side].push(ModelBooking { id, request_id: requests.to_string(), placement, load, hashes, prefilling: true });
                }
                Act::FirstToken(at) => if let Some(at) = pick(at, &made[side]) {
                    made[side][at].prefilling = false;
                    scenario.state.on_prefilled(made[side][at].id, None);
                }
                Act::End(at) => if let Some(at) = pick(at, &made[side]) {
                    scenario.state.release(made[side].remove(at).id);
                }
                Act::Included { of, at, prefill } => if let Some(at) = pick(at, &made[of]) {
                    let booking = &made[of][at];
                    let worker = name(if prefill { &booking.placement.prefill } else { &booking.placement.decode });
                    let taken = (worker, booking.request_id.clone());
                    if !taken.0.is_empty() && included_request_ids.insert(taken.clone()) {
                        reports.iter_mut().for_each(|reports| reports.push_back(taken.clone()));
                    }
                }
                Act::Report => if let Some(taken) = reports[side].pop_front() {
                    report(scenario, taken);
                }
                Act::Send => replicas[side].send(&scenario.state),
                Act::Deliver => replicas[side].deliver(&mut scenarios[1 - side].state),
                Act::Lose => replicas[side].lose(),
                Act::Reopen => replicas[side].reopen(&mut scenarios[1 - side].state),
            }
        }
        let [one, other] = &mut scenarios;
        for (scenario, reports) in [&mut *one, &mut *other].into_iter().zip(reports) {
            reports.into_iter().for_each(|taken| report(scenario, taken));
        }
        replicas[0].settle(&one.state, &mut other.state);
        replicas[1].settle(&other.state, &mut one.state);
        let expected = union(&made, &included_request_ids);
        prop_assert_eq!(counted(one), expected.clone());
        prop_assert_eq!(counted(other), expected);

        // All bookings end: the first router releases its own, and the second router disconnects.
        for booking in &made[0] {
            one.state.release(booking.id);
        }
        replicas[0].settle(&one.state, &mut other.state);
        prop_assert_eq!(other.state.peers.count_bookings(), 0);
        one.state.remove_peer(replicas[1].peer);
        one.assert_idle();
        for booking in &made[1] {
            other.state.release(booking.id);
        }
        other.assert_idle();
    }
}

#[test]
fn burst_of_equal_prompts_over_two_routers_is_placed_on_one_worker_after_replication() {
    let [mut one, mut other] = two(PrefillPlace::Remote);
    let mut replica = Replica::open(&mut other.state);
    let (first, placement) = one.place_hashes(1_001, hashes(1, 0, 62));
    replica.settle(&one.state, &mut other.state);
    let (second, same) = other.place_hashes(1_001, hashes(1, 0, 62));
    assert_eq!(name(&same.prefill), name(&placement.prefill));
    assert_eq!(same.prefill.map(|candidate| (candidate.overlap_blocks, candidate.predicted_blocks)), Some((0, 62)));
    // The first token ends the prediction of the prompt's blocks.
    one.state.on_prefilled(first, None);
    other.state.on_prefilled(second, None);
    replica.settle(&one.state, &mut other.state);
    let (third, later) = other.place_hashes(1_001, hashes(1, 0, 62));
    assert_eq!(later.prefill.map(|candidate| candidate.predicted_blocks), Some(0));
    one.state.release(first);
    other.state.release(second);
    other.state.release(third);
    replica.settle(&one.state, &mut other.state);
    one.assert_idle();
    other.assert_idle();
}

#[test]
fn peer_booking_on_a_worker_that_joins_later_adds_no_load() {
    let mut one = Scenario::with(settings(PrefillPlace::Remote), 1, 1);
    let mut other = Scenario::with(settings(PrefillPlace::Remote), 0, 1);
    let mut replica = Replica::open(&mut other.state);
    let (booking, _) = one.place_hashes(100, hashes(1, 0, 6));
    replica.settle(&one.state, &mut other.state);
    assert_eq!(other.booked("d0"), (0, 1, 1));
    other.join(info(worker_info::Role::Prefill, "p0")).expect("the worker agrees with the other members");
    assert_eq!(other.booked("p0"), (0, 0, 1));
    assert_eq!(other.predicted("p0", &hashes(1, 0, 9)), 6);
    let left = other.member("p0");
    other.state.leave(left);
    one.state.release(booking);
    replica.settle(&one.state, &mut other.state);
    other.assert_idle();
    one.assert_idle();
}

#[test]
fn rebooked_request_has_a_booking_on_its_workers_but_adds_no_load() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 1, 1);
    let request = scenario.request(100, hashes(1, 0, 6));
    let running = |prefill: Option<&str>, prefilling| v1::ExistingPlacement {
        decode_instance_id: "d0-1".to_owned(),
        prefill_instance_id: prefill.map(str::to_owned),
        prefilling,
    };
    for (prefill, prefilling, on_prefill, on_decode) in [
        (Some("p0-1"), true, 1, 1),
        (Some("p0-1"), false, 0, 1),
        (None, true, 0, 1),
        (Some("unknown"), true, 0, 1),
        // A placement with one instance in both roles is invalid. It counts as a placement without a prefill worker.
        (Some("d0-1"), true, 0, 1),
    ] {
        let booking = scenario.state.rebook(&request, running(prefill, prefilling)).expect("the router has capacity");
        assert_eq!(
            (scenario.booked("p0"), scenario.booked("d0")),
            ((0, 0, on_prefill), (0, 0, on_decode)),
            "{prefill:?} {prefilling}"
        );
        let blocks = |name| scenario.predicted(name, &hashes(1, 0, 9));
        assert_eq!(blocks("p0") + blocks("d0"), if prefilling && prefill != Some("unknown") { 6 } else { 0 });
        scenario.state.on_prefilled(booking, Some(7));
        assert_eq!((scenario.booked("p0").2, scenario.booked("d0").2), (0, 1));
        scenario.state.release(booking);
        scenario.assert_idle();
    }
    let mut full = Scenario::with(RouterSettings { bookings_max: 1, ..settings(PrefillPlace::Remote) }, 0, 0);
    let first = full.state.rebook(&request, running(None, true)).expect("the router has capacity");
    assert_eq!(full.state.rebook(&request, running(None, true)), Err(PlacementError::TooManyBookings));
    full.state.release(first);
    full.assert_idle();
}

#[test]
fn peer_bookings_beyond_the_limit_are_ignored() {
    let mut one = Scenario::with(settings(PrefillPlace::Remote), 1, 1);
    let mut other = Scenario::with(RouterSettings { bookings_max: 2, ..settings(PrefillPlace::Remote) }, 1, 1);
    let mut replica = Replica::open(&mut other.state);
    replica.settle(&one.state, &mut other.state);
    let bookings: Vec<BookingId> = (0..4).map(|at| one.place_hashes(100, hashes(at, 0, 6)).0).collect();
    replica.settle(&one.state, &mut other.state);
    assert_eq!((other.state.peers.count_bookings(), other.booked("d0").2), (2, 2));
    bookings.into_iter().for_each(|booking| one.state.release(booking));
    replica.settle(&one.state, &mut other.state);
    other.assert_idle();
    let bookings = [1, 2].map(|booking_id| BookingChange { booking_id, request: None }).into();
    let state = reply("r", Message::State(BookingState { at_change_id: 0, bookings, last: true }));
    let refused = PeerReceiver::new(1).take(state);
    assert_eq!(refused, Err(ReplicationError::TooManyBookings { max: 1 }));
}

#[tokio::test(start_paused = true)]
async fn requests_that_a_peer_places_count_for_the_wanted_workers_of_both() {
    let levels = crate::settings::ServiceLevels { ttft: Some(std::time::Duration::from_secs(1)), itl: None };
    let new = || Scenario::with(RouterSettings { levels, ..settings(PrefillPlace::Local) }, 0, 1);
    let (mut one, mut other) = (new(), new());
    let mut replica = Replica::open(&mut other.state);
    replica.settle(&one.state, &mut other.state);
    for _ in 0..200 {
        let (booking, _) = one.place_hashes(5_000, [].into());
        replica.settle(&one.state, &mut other.state);
        one.state.release(booking);
        tokio::time::advance(std::time::Duration::from_millis(250)).await;
    }
    for scenario in [&mut one, &mut other] {
        let load = Load { prefill_tokens_per_second: 10_000.0, prefill_measurements: 1, ..Load::default() };
        scenario.reports("d0", Vec::new(), load, &[]);
        scenario.state.plan_workers();
        assert!(scenario.state.wanted[0].wanted >= 3, "{:?}", scenario.state.wanted);
    }
}
