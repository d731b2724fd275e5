//! Requests this router has placed, from their placement until they let go. Every change is noted in the journal, for the other
//! routers.

use super::{
    Asked, Excluded, NotPlaced, State,
    members::{Member, MemberId, Shares},
};
use crate::{
    booked::{BookingId, BookingKey, Share},
    breaker::is_fault,
    route::{self, Candidate, Question, Turn, Unplaced},
    settings::{Costs, PrefillPlace},
};
use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};
use tandem_kv::SequenceHash;
use tandem_proto::v1;
use tokio::time::Instant;

/// Sequences one request may add to a worker's load: OpenAI's bound of `n`. More is somebody else's to refuse.
pub(super) const SAMPLES_MAX: u32 = 128;

/// Where a request is, whoever has placed it there. Workers are named by their instances, members or not.
pub(super) struct Booking {
    pub(super) key: BookingKey,
    pub(super) decode: Arc<str>,
    /// Never the same as `decode`.
    pub(super) prefill: Option<Arc<str>>,
    /// Not after the prompt's prefill was released.
    pub(super) computing: bool,
    /// Since its prompt's prefill was released here.
    pub(super) answering: Option<Instant>,
    /// Those that a worker may reuse.
    pub(super) hashes: Arc<[SequenceHash]>,
    pub(super) overlap_tokens: Option<u64>,
}

impl Booking {
    /// The workers on which it counts now, each with the blocks it is about to compute there and those before them.
    pub(super) fn places(&self) -> impl Iterator<Item = (&Arc<str>, &[SequenceHash])> {
        let computing: &[SequenceHash] = if self.computing { &self.hashes } else { &[] };
        let prefill = self.prefill.as_ref().filter(|_| self.computing).map(|prefill| (prefill, computing));
        let on_decode = if self.prefill.is_some() { &[] } else { computing };
        std::iter::once((&self.decode, on_decode)).chain(prefill)
    }
}

/// Own bookings.
pub(super) type Bookings = HashMap<BookingId, Booking>;

impl State {
    /// Places the request (for the `attempt`th time, from 1) and books its load until [`State::release`].
    pub(crate) fn place(
        &mut self,
        asked: &Asked,
        excluded: &Excluded,
        attempt: u32,
    ) -> Result<(BookingId, v1::Placement), NotPlaced> {
        let started = Instant::now();
        let placed = self.choose_and_book(asked, excluded, attempt);
        if placed.is_err() {
            self.metrics.refused.increment(1);
        }
        self.metrics.route_duration.record(started.elapsed());
        placed
    }

    /// Books a request where another router has placed it, until [`State::release`]. Its workers know it by now: it adds
    /// nothing to their reports. They need not be members yet.
    pub(crate) fn rebook(&mut self, asked: &Asked, existing: v1::ExistingPlacement) -> Result<BookingId, NotPlaced> {
        if self.bookings.len() >= self.settings.bookings_max {
            return Err(NotPlaced::TooManyBookings);
        }
        let v1::ExistingPlacement { decode_instance_id: decode, prefill_instance_id: prefill, prefilling } = existing;
        let hashes = if prefilling && !asked.prompt_logits { asked.hashes.clone() } else { [].into() };
        let booking = Booking {
            key: self.new_key(asked.request_id.clone()),
            prefill: prefill.filter(|prefill| *prefill != decode).map(Into::into),
            decode: decode.into(),
            computing: prefilling,
            answering: None,
            hashes,
            overlap_tokens: None,
        };
        self.metrics.rebooked.increment(1);
        Ok(self.book(booking, Shares::default()))
    }

    /// The prompt is computed: its prefill counts nowhere any more. What the worker says to have found in its cache, if it
    /// does, is held against what was foreseen.
    pub(crate) fn release_prefill(&mut self, id: BookingId, cached_tokens: Option<u32>) {
        let Some(booking) = self.bookings.get_mut(&id) else { return };
        let Some(()) = self.members.prefilled(booking) else { return };
        booking.answering = Some(Instant::now());
        self.journal.note(id);
        let computed_on = self.members.of_mut(booking.prefill.as_ref().unwrap_or(&booking.decode));
        let known = (booking.overlap_tokens, cached_tokens.map(u64::from));
        if let (Some(Member { series, placed, .. }), (Some(foreseen), Some(real))) = (computed_on, known) {
            let (over, under) = (foreseen.saturating_sub(real), real.saturating_sub(foreseen));
            series.overlap_over.increment(over);
            series.overlap_under.increment(under);
            placed.overlap_over_tokens += over;
            placed.overlap_under_tokens += under;
        }
    }

    /// The request has its first token: who brought it works.
    pub(crate) fn worked(&mut self, id: BookingId) {
        self.each_breaker(id, |member| member.breaker.worked());
    }

    /// The request failed because of an instance it was placed on.
    pub(crate) fn failed(&mut self, id: BookingId, instance_id: &str, reason: v1::FailureReason) {
        if !is_fault(reason) {
            return;
        }
        let now = Instant::now();
        self.each_breaker(id, |member| {
            if member.info.instance_id == instance_id && member.breaker.failed(id, now) {
                let worker_id = &member.info.worker_id;
                tracing::warn!(worker_id, instance_id, ?reason, "requests fail on this worker; it is left alone for a while");
                member.series.breaker_opened.increment(1);
            }
        });
    }

    fn each_breaker(&mut self, id: BookingId, mut of: impl FnMut(&mut Member)) {
        let Some(booking) = self.bookings.get(&id) else { return };
        for worker in [Some(&booking.decode), booking.prefill.as_ref()].into_iter().flatten() {
            self.members.of_mut(worker).into_iter().for_each(&mut of);
        }
    }

    /// The booking counts nowhere any more.
    pub(crate) fn release(&mut self, id: BookingId) {
        self.each_breaker(id, |member| member.breaker.ended(id));
        let Some(booking) = self.bookings.remove(&id) else { return };
        if let Some(since) = booking.answering {
            self.measure_answer(since.elapsed());
        }
        self.members.release(booking);
        self.journal.note(id);
        self.metrics.bookings.set(self.bookings.len() as f64);
    }

    /// What is to be placed, and the hashes of the blocks that a worker may reuse.
    pub(super) fn question<'a>(&self, asked: &'a Asked, attempt: u32) -> Result<(Question, &'a [SequenceHash]), NotPlaced> {
        let Some(first) = self.members.values().next() else { return Err(Unplaced::NoDecode.into()) };
        if !asked.model.is_empty() && asked.model != first.info.model {
            return Err(NotPlaced::OtherModel);
        }
        let block_size = first.info.block_size;
        // Only blocks that a worker may reuse: one token is always computed, and logits are never cached.
        let reusable = if asked.prompt_logits { 0 } else { asked.prompt_tokens.saturating_sub(1) / block_size };
        let hashes = &asked.hashes[..asked.hashes.len().min(reusable as usize)];
        let prefill = match self.settings.prefill {
            PrefillPlace::Auto if attempt > 1 && attempt == self.settings.attempts_max => PrefillPlace::Local,
            place => place,
        };
        Ok((Question { prompt_tokens: asked.prompt_tokens, block_size, prefill, prompt_logits: asked.prompt_logits }, hashes))
    }

    /// What is known of each member now, in their order. At a time, those whose breakers are open then are excluded too.
    pub(crate) fn candidates(
        &self,
        hashes: &[SequenceHash],
        excluded: &BTreeSet<String>,
        breakers_at: Option<Instant>,
    ) -> Vec<Candidate> {
        let (leading, now) = (self.index.overlap(hashes), Instant::now());
        let candidate = |member: &Member| {
            let overlap_blocks = leading.get(member.slot.0 as usize).copied().unwrap_or(0);
            let mut candidate = member.candidate(hashes, overlap_blocks, now, &self.settings.costs);
            candidate.excluded =
                excluded.contains(&member.info.instance_id) || breakers_at.is_some_and(|at| !member.breaker.admits(at));
            candidate
        };
        self.members.values().map(candidate).collect()
    }

    /// With what has been measured instead of what stands for it.
    pub(super) fn costs(&self) -> Costs {
        let costs = self.settings.costs;
        Costs { answer_ms: self.answer_ms.unwrap_or(costs.answer_ms), ..costs }
    }

    /// An answer has ended that took so long. The latest ones count most.
    fn measure_answer(&mut self, took: Duration) {
        const NEW: f64 = 0.02;
        let (took, before) = (took.as_secs_f64() * 1e3, self.answer_ms);
        self.answer_ms = Some(before.map_or(took, |before| before + (took - before) * NEW));
    }

    fn choose_and_book(
        &mut self,
        asked: &Asked,
        excluded: &Excluded,
        attempt: u32,
    ) -> Result<(BookingId, v1::Placement), NotPlaced> {
        if attempt > self.settings.attempts_max {
            return Err(NotPlaced::TooManyAttempts);
        }
        if self.bookings.len() >= self.settings.bookings_max {
            return Err(NotPlaced::TooManyBookings);
        }
        let (question, hashes) = self.question(asked, attempt)?;
        let block_size = question.block_size;
        let turn = Turn { seed: self.settings.seed, number: self.turns };
        self.turns += 1;
        let (now, costs) = (Instant::now(), self.costs());
        let candidates = |excluded: &BTreeSet<String>, breakers: Option<Instant>| self.candidates(hashes, excluded, breakers);
        let place = |candidates: &[Candidate]| route::place(&*self.policy, &costs, &question, candidates, turn);
        let mut candidates_now = candidates(&excluded.failed, Some(now));
        let mut choice = place(&candidates_now);
        if choice == Err(Unplaced::AllFailed) {
            candidates_now = candidates(&excluded.lost, None);
            choice = place(&candidates_now);
        }
        let (choice, candidates) = (choice?, candidates_now);

        let members: Vec<&Member> = self.members.values().collect();
        let describe = |at: usize| members[at].describe(&candidates[at]);
        let placement =
            v1::Placement { decode: Some(describe(choice.decode)), prefill: choice.prefill.map(describe), block_size };
        let computes = &candidates[choice.prefill.unwrap_or(choice.decode)];
        let known_blocks = u64::from(computes.overlap_blocks) + u64::from(computes.predicted_blocks);
        let instance = |at: usize| members[at].instance_id.clone();
        let (decode, prefill) = (instance(choice.decode), choice.prefill.map(instance));
        let all = Share { tokens: computes.new_tokens(&question, known_blocks), sequences: asked.samples.clamp(1, SAMPLES_MAX) };
        let shares = match &prefill {
            None => Shares { decode: all, ..Shares::default() },
            Some(_) => Shares { decode: Share { tokens: 0, ..all }, prefill: Share { sequences: 1, ..all } },
        };
        let overlap_blocks = computes.overlap_blocks;
        let booking = Booking {
            key: self.new_key(asked.request_id.clone()),
            decode,
            prefill,
            computing: true,
            answering: None,
            hashes: hashes.into(),
            overlap_tokens: Some(u64::from(overlap_blocks) * u64::from(block_size)),
        };
        self.count_placement(&booking, overlap_blocks);
        Ok((self.book(booking, shares), placement))
    }

    /// Of this router's bookings and of those it hears of: no two have one key.
    pub(super) fn new_key(&mut self, request_id: Arc<str>) -> BookingKey {
        let id = BookingId(self.next_booking);
        self.next_booking += 1;
        (request_id, id)
    }

    fn count_placement(&mut self, booking: &Booking, overlap_blocks: u32) {
        let id = booking.key.1;
        for (instance_id, _) in booking.places() {
            let Some(Member { breaker, series, placed, .. }) = self.members.of_mut(instance_id) else { continue };
            breaker.placed(id);
            let (counter, total) = match (*instance_id == booking.decode, &booking.prefill) {
                (true, None) => (&series.placed_local, &mut placed.local),
                (true, Some(_)) => (&series.placed_decode, &mut placed.decode),
                (false, _) => (&series.placed_prefill, &mut placed.prefill),
            };
            counter.increment(1);
            *total += 1;
            if *instance_id != booking.decode || booking.prefill.is_none() {
                series.overlap_blocks.record(f64::from(overlap_blocks));
                placed.overlap_blocks += u64::from(overlap_blocks);
            }
        }
    }

    fn book(&mut self, booking: Booking, shares: Shares) -> BookingId {
        let id = booking.key.1;
        self.members.book(&booking, shares);
        self.bookings.insert(id, booking);
        self.journal.note(id);
        self.metrics.bookings.set(self.bookings.len() as f64);
        id
    }

    /// What it is that this member is booked for, now that it has joined.
    pub(super) fn book_joined(&mut self, id: MemberId) {
        let instance_id = self.members[&id].instance_id.clone();
        let heard = self.peers.values().flat_map(|peer| peer.bookings.values());
        for booking in self.bookings.values().chain(heard) {
            self.members.book_on(&instance_id, booking);
        }
    }
}
