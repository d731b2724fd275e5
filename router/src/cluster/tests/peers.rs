//! Routers that hear of each other's bookings: each counts the union, whatever is lost on the way, and nothing is left of it.

use super::*;
use crate::exchange::{Broken, Intake, encode};
use proptest::{collection, prelude::*};
use std::collections::{HashSet, VecDeque};
use tandem_proto::v1::{BookingsReply, bookings_reply::Message};

/// The way from one router to another.
struct Link {
    known: Option<u64>,
    sent: VecDeque<BookingsReply>,
    intake: Intake,
    peer: PeerId,
}

impl Link {
    fn open(to: &mut State) -> Self {
        Self { known: None, sent: VecDeque::new(), intake: Intake::new(1_000), peer: to.peer_joined("router:1") }
    }

    fn reopen(&mut self, to: &mut State) {
        to.peer_left(self.peer);
        *self = Self::open(to);
    }

    fn tell(&mut self, from: &State) {
        let (news, last) = from.news(self.known);
        self.known = Some(last);
        self.sent.extend(news.into_iter().map(|news| encode(&from.instance_id(), news)));
    }

    /// The next message arrives; after a gap all is asked for anew.
    fn arrives(&mut self, to: &mut State) {
        let Some(reply) = self.sent.pop_front() else { return };
        match self.intake.take(reply) {
            Ok(heard) => to.peer_told(self.peer, heard),
            Err(Broken::Gap { .. }) => self.reopen(to),
            Err(broken) => panic!("{broken}"),
        }
    }

    /// The next message is lost; full states go over a connection, where nothing is.
    fn is_lost(&mut self) {
        self.sent.pop_front_if(|reply| matches!(reply.message, Some(Message::Changes(_))));
    }

    fn settle(&mut self, from: &State, to: &mut State) {
        for _ in 0..3 {
            self.tell(from);
            while !self.sent.is_empty() {
                self.arrives(to);
            }
        }
    }
}

/// A booking as this test remembers it.
struct Made {
    id: BookingId,
    request_id: String,
    placement: v1::Placement,
    shares: members::Shares,
    hashes: Arc<[SequenceHash]>,
    computing: bool,
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
    /// A worker of a booking of either router takes it in.
    TakenIn {
        of: usize,
        at: usize,
        prefill: bool,
    },
    /// A worker's report reaches a router.
    Report,
    Tell,
    Arrive,
    Lose,
    Reopen,
}

fn act() -> impl Strategy<Value = (usize, Act)> {
    let at = 0..20_usize;
    let act = prop_oneof![
        4 => (0..4_u64, 0..9_u64, 0..5_u32).prop_map(|(prompt, blocks, samples)| Act::Place { prompt, blocks, samples }),
        2 => at.clone().prop_map(Act::FirstToken),
        2 => at.clone().prop_map(Act::End),
        3 => (0..2_usize, at, any::<bool>()).prop_map(|(of, at, prefill)| Act::TakenIn { of, at, prefill }),
        3 => Just(Act::Report),
        3 => Just(Act::Tell),
        3 => Just(Act::Arrive),
        1 => Just(Act::Lose),
        1 => Just(Act::Reopen),
    ];
    (0..2_usize, act)
}

const NAMES: [&str; 4] = ["p0", "p1", "d0", "d1"];

/// What counts on each worker in a state.
fn counted(story: &Story) -> Vec<(u64, u64, u32, Vec<u32>)> {
    let of = |name: &str| {
        let (tokens, sequences, bookings) = story.booked(name);
        let booked = &story.state.members[&story.member(name)].booked;
        (tokens, sequences, bookings, (0..4).map(|prompt| booked.predicted_blocks(&hashes(prompt, 1, 9), 0)).collect())
    };
    NAMES.map(of).into()
}

/// What is to count: the union of what both have made, less what workers have taken in.
fn union(made: &[Vec<Made>; 2], included_request_ids: &HashSet<(String, String)>) -> Vec<(u64, u64, u32, Vec<u32>)> {
    let of = |worker: &str| {
        let (mut sums, mut predicted) = ((0, 0, 0), HashSet::new());
        for booking in made.iter().flatten() {
            let parts =
                [(&booking.placement.decode, booking.shares.decode), (&booking.placement.prefill, booking.shares.prefill)];
            for (prefills, (candidate, share)) in [false, true].into_iter().zip(parts) {
                if name(candidate) != worker || (prefills && !booking.computing) {
                    continue;
                }
                sums.2 += 1;
                if !included_request_ids.contains(&(worker.to_owned(), booking.request_id.clone())) {
                    sums.0 += if booking.computing { share.tokens } else { 0 };
                    sums.1 += u64::from(share.sequences);
                }
                if booking.computing && (prefills || booking.placement.prefill.is_none()) {
                    predicted.extend(booking.hashes.iter().copied());
                }
            }
        }
        let leading = |prompt| hashes(prompt, 1, 9).iter().take_while(|hash| predicted.contains(hash)).count() as u32;
        (sums.0, sums.1, sums.2, (0..4).map(leading).collect())
    };
    NAMES.map(of).into()
}

fn two(place: PrefillPlace) -> [Story; 2] {
    [1, 2].map(|seed| Story::with(RouterSettings { seed, ..settings(place) }, 2, 2))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn each_router_counts_the_union(acts in collection::vec(act(), 1..120), remote in any::<bool>()) {
        let mut stories = two(if remote { PrefillPlace::Remote } else { PrefillPlace::Local });
        let mut links = [Link::open(&mut stories[1].state), Link::open(&mut stories[0].state)];
        let mut made: [Vec<Made>; 2] = [Vec::new(), Vec::new()];
        let (mut included_request_ids, mut reports) = (HashSet::new(), [VecDeque::new(), VecDeque::new()]);
        let mut requests = 0;
        let report = |story: &mut Story, (worker, request_id): (String, String)| {
            story.says(&worker, vec![], Load::default(), &[&request_id]);
        };
        for (side, act) in acts {
            let story = &mut stories[side];
            let pick = |at: usize, of: &[Made]| (!of.is_empty()).then(|| at % of.len());
            match act {
                Act::Place { prompt, blocks, samples } => {
                    requests += 1;
                    let hashes = hashes(prompt, 1, blocks);
                    let asked = Asked { samples, request_id: format!("{requests}").into(), ..story.ask(blocks as u32 * BLOCK + 2, hashes.clone()) };
                    let (id, placement) = story.place(&asked);
                    let shares = story.state.members.unreported(&story.state.bookings[&id]);
                    made[side].push(Made { id, request_id: requests.to_string(), placement, shares, hashes, computing: true });
                }
                Act::FirstToken(at) => if let Some(at) = pick(at, &made[side]) {
                    made[side][at].computing = false;
                    story.state.release_prefill(made[side][at].id, None);
                }
                Act::End(at) => if let Some(at) = pick(at, &made[side]) {
                    story.state.release(made[side].remove(at).id);
                }
                Act::TakenIn { of, at, prefill } => if let Some(at) = pick(at, &made[of]) {
                    let booking = &made[of][at];
                    let worker = name(if prefill { &booking.placement.prefill } else { &booking.placement.decode });
                    let taken = (worker, booking.request_id.clone());
                    if !taken.0.is_empty() && included_request_ids.insert(taken.clone()) {
                        reports.iter_mut().for_each(|reports| reports.push_back(taken.clone()));
                    }
                }
                Act::Report => if let Some(taken) = reports[side].pop_front() {
                    report(story, taken);
                }
                Act::Tell => links[side].tell(&story.state),
                Act::Arrive => links[side].arrives(&mut stories[1 - side].state),
                Act::Lose => links[side].is_lost(),
                Act::Reopen => links[side].reopen(&mut stories[1 - side].state),
            }
        }
        let [one, other] = &mut stories;
        for (story, reports) in [&mut *one, &mut *other].into_iter().zip(reports) {
            reports.into_iter().for_each(|taken| report(story, taken));
        }
        links[0].settle(&one.state, &mut other.state);
        links[1].settle(&other.state, &mut one.state);
        let expected = union(&made, &included_request_ids);
        prop_assert_eq!(counted(one), expected.clone());
        prop_assert_eq!(counted(other), expected);

        // One after the other ends; the second by being gone.
        for booking in &made[0] {
            one.state.release(booking.id);
        }
        links[0].settle(&one.state, &mut other.state);
        prop_assert_eq!(other.state.peer_bookings(), 0);
        one.state.peer_left(links[1].peer);
        one.assert_idle();
        for booking in &made[1] {
            other.state.release(booking.id);
        }
        other.assert_idle();
    }
}

#[test]
fn a_burst_over_two_routers_goes_to_one_worker_once_they_have_talked() {
    let [mut one, mut other] = two(PrefillPlace::Remote);
    let mut link = Link::open(&mut other.state);
    let (first, placement) = one.place_hashes(1_001, hashes(1, 0, 62));
    link.settle(&one.state, &mut other.state);
    let (second, same) = other.place_hashes(1_001, hashes(1, 0, 62));
    assert_eq!(name(&same.prefill), name(&placement.prefill));
    assert_eq!(same.prefill.map(|candidate| (candidate.overlap_blocks, candidate.predicted_blocks)), Some((0, 62)));
    // With the first token the prediction ends.
    one.state.release_prefill(first, None);
    other.state.release_prefill(second, None);
    link.settle(&one.state, &mut other.state);
    let (third, anew) = other.place_hashes(1_001, hashes(1, 0, 62));
    assert_eq!(anew.prefill.map(|candidate| candidate.predicted_blocks), Some(0));
    one.state.release(first);
    other.state.release(second);
    other.state.release(third);
    link.settle(&one.state, &mut other.state);
    one.assert_idle();
    other.assert_idle();
}

#[test]
fn what_is_heard_of_a_worker_that_joins_later_is_in_its_report() {
    let mut one = Story::with(settings(PrefillPlace::Remote), 1, 1);
    let mut other = Story::with(settings(PrefillPlace::Remote), 0, 1);
    let mut link = Link::open(&mut other.state);
    let (booking, _) = one.place_hashes(100, hashes(1, 0, 6));
    link.settle(&one.state, &mut other.state);
    assert_eq!(other.booked("d0"), (0, 1, 1));
    other.join(info(worker_info::Role::Prefill, "p0")).expect("it agrees");
    assert_eq!(other.booked("p0"), (0, 0, 1));
    let predicted = |story: &Story| story.state.members[&story.member("p0")].booked.predicted_blocks(&hashes(1, 0, 9), 0);
    assert_eq!(predicted(&other), 6);
    let gone = other.member("p0");
    other.state.leave(gone);
    one.state.release(booking);
    link.settle(&one.state, &mut other.state);
    other.assert_idle();
    one.assert_idle();
}

#[test]
fn a_running_request_is_booked_where_it_is_and_adds_nothing_to_reports() {
    let mut story = Story::with(settings(PrefillPlace::Remote), 1, 1);
    let asked = story.ask(100, hashes(1, 0, 6));
    let running = |prefill: Option<&str>, computing| v1::ExistingPlacement {
        decode_instance_id: "d0-1".to_owned(),
        prefill_instance_id: prefill.map(str::to_owned),
        prefilling: computing,
    };
    for (prefill, computing, on_prefill, on_decode) in [
        (Some("p0-1"), true, 1, 1),
        (Some("p0-1"), false, 0, 1),
        (None, true, 0, 1),
        (Some("nobody"), true, 0, 1),
        // Nonsense of one that must not harm.
        (Some("d0-1"), true, 0, 1),
    ] {
        let booking = story.state.rebook(&asked, running(prefill, computing)).expect("there is room");
        assert_eq!((story.booked("p0"), story.booked("d0")), ((0, 0, on_prefill), (0, 0, on_decode)), "{prefill:?} {computing}");
        let blocks = |name| story.state.members[&story.member(name)].booked.predicted_blocks(&hashes(1, 0, 9), 0);
        assert_eq!(blocks("p0") + blocks("d0"), if computing && prefill != Some("nobody") { 6 } else { 0 });
        story.state.release_prefill(booking, Some(7));
        assert_eq!((story.booked("p0").2, story.booked("d0").2), (0, 1));
        story.state.release(booking);
        story.assert_idle();
    }
    let mut full = Story::with(RouterSettings { bookings_max: 1, ..settings(PrefillPlace::Remote) }, 0, 0);
    let first = full.state.rebook(&asked, running(None, true)).expect("there is room");
    assert_eq!(full.state.rebook(&asked, running(None, true)), Err(NotPlaced::TooManyBookings));
    full.state.release(first);
    full.assert_idle();
}

#[test]
fn more_than_a_peer_may_have_is_not_counted_and_does_no_harm() {
    let mut one = Story::with(settings(PrefillPlace::Remote), 1, 1);
    let mut other = Story::with(RouterSettings { bookings_max: 2, ..settings(PrefillPlace::Remote) }, 1, 1);
    let mut link = Link::open(&mut other.state);
    link.settle(&one.state, &mut other.state);
    let bookings: Vec<BookingId> = (0..4).map(|at| one.place_hashes(100, hashes(at, 0, 6)).0).collect();
    link.settle(&one.state, &mut other.state);
    assert_eq!((other.state.peer_bookings(), other.booked("d0").2), (2, 2));
    bookings.into_iter().for_each(|booking| one.state.release(booking));
    link.settle(&one.state, &mut other.state);
    other.assert_idle();
    let refused = Intake::new(1)
        .take(encode("r", crate::exchange::News::State { at: 0, bookings: vec![(1, None), (2, None)], last: true }));
    assert_eq!(refused, Err(Broken::TooMany { max: 1 }));
}

#[test]
fn a_router_that_joins_waits_for_each_listed_worker_once() {
    let mut story = Story::new(settings(PrefillPlace::Auto));
    let list = |story: &mut Story| ["host:1", "host:2", "host:3"].iter().for_each(|worker| story.state.await_worker(worker));
    list(&mut story);
    let unready = |story: &Story| story.state.unready().unwrap_or_default();
    assert!(unready(&story).contains("0 of 3"), "{}", unready(&story));
    story.join(info(worker_info::Role::Decode, "d0")).expect("it agrees");
    story.state.absent("host:2", "cannot be reached".to_owned(), false);
    assert!(story.state.is_joining() && unready(&story).contains("1 of 3"), "{}", unready(&story));
    story.state.absent("host:3", "another model".to_owned(), true);
    assert_eq!((story.state.is_joining(), story.state.unready()), (false, None));
    assert!(
        story.recorder.render().contains("tandem_router_index_complete_ratio 0.3333333333333333"),
        "{}",
        story.recorder.render()
    );
    // Later ones are not waited for.
    list(&mut story);
    assert_eq!(story.state.unready(), None);
    let mut impatient = Story::with(settings(PrefillPlace::Auto), 0, 1);
    list(&mut impatient);
    assert!(impatient.state.is_joining());
    impatient.state.await_nobody();
    assert_eq!(impatient.state.unready(), None);
}
