//! The quick choice is the same as that of the readable path, in random states.

use super::*;
use crate::route::RouteChoice;
use proptest::{collection::vec, prelude::*};
use std::time::Duration;
use tandem_kv::Tier;

/// A number of the test's random choices, and what is left of it.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        let rolled = self.0 % sides;
        self.0 = tandem_kv::mix(self.0 ^ 0x9E37);
        rolled
    }
}

struct World {
    scenario: Scenario,
    now: Instant,
    placed: Vec<BookingId>,
    workers: u64,
}

const MODELS: [&str; 3] = ["m", "m-lora", "other"];

impl World {
    fn new(dice: &mut Dice) -> Self {
        let settings = RouterSettings {
            policy: [PolicyKind::KvAware, PolicyKind::KvAware, PolicyKind::LeastLoaded][dice.roll(3) as usize],
            ..settings([PrefillPlace::Auto, PrefillPlace::Local, PrefillPlace::Remote][dice.roll(3) as usize])
        };
        let mut world = Self { scenario: Scenario::new(settings), now: Instant::now(), placed: Vec::new(), workers: 0 };
        world.pass(0);
        (0..2 + dice.roll(10)).for_each(|_| world.join(dice));
        world
    }

    fn pass(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
        self.scenario.state.members.virtual_time = Some(self.now);
    }

    fn join(&mut self, dice: &mut Dice) {
        let prefills = dice.roll(3) == 0;
        let role = if prefills { worker_info::Role::Prefill } else { worker_info::Role::Decode };
        let serves_other = dice.roll(4) == 0;
        let worker = WorkerInfo {
            transfer_family: ["", "", "a", "none"][dice.roll(4) as usize].to_owned(),
            needs_prefill_worker: !prefills && dice.roll(5) == 0,
            accepts_images: dice.roll(2) == 0,
            context_length: [0, 300, 100_000][dice.roll(3) as usize],
            step_tokens: [0, 512][dice.roll(2) as usize],
            sequences_max: [0, 4][dice.roll(2) as usize],
            model: MODELS[if serves_other { 2 } else { 0 }].to_owned(),
            loras: if serves_other || dice.roll(2) == 0 { Vec::new() } else { vec![MODELS[1].to_owned()] },
            ..info(role, &format!("w{}", self.workers))
        };
        self.workers += 1;
        self.scenario.join(worker).expect("the worker agrees with the others");
    }

    /// Returns a request of one of few prompts, so that several requests share blocks.
    fn request(&mut self, dice: &mut Dice) -> PlacementRequest {
        let (prompt, blocks) = (dice.roll(4), [0, 3, 10, 40][dice.roll(4) as usize]);
        let request = self.scenario.request(blocks * BLOCK + 1 + dice.roll(3) as u32, hashes(prompt, 2, blocks.into()));
        PlacementRequest {
            model: MODELS[dice.roll(3) as usize].to_owned(),
            account: ["a", "b"][dice.roll(2) as usize].into(),
            priority: Priority { across: [0, 0, 0, -1][dice.roll(4) as usize], within: [0, 0, 1][dice.roll(3) as usize] },
            samples: 1 + dice.roll(2) as u32,
            prompt_logits: dice.roll(8) == 0,
            has_images: dice.roll(8) == 0,
            max_wait: [None, None, Some(Duration::from_millis(500))][dice.roll(3) as usize],
            ..request
        }
    }

    fn excluded(&self, dice: &mut Dice) -> Excluded {
        let mut failed = BTreeSet::new();
        for member in self.scenario.state.members.values().filter(|_| dice.roll(8) == 0) {
            failed.insert(member.instance_id.clone());
        }
        Excluded { suspect: failed.iter().take(1).cloned().collect(), failed }
    }

    fn step(&mut self, dice: &mut Dice) {
        let names: Vec<String> = self.scenario.state.members.values().map(|member| member.info.worker_id.clone()).collect();
        let name = names.get(dice.roll(names.len().max(1) as u64) as usize).cloned();
        let any = dice.roll(self.placed.len().max(1) as u64) as usize;
        let booking = self.placed.get(any).copied();
        match (dice.roll(12), name, booking) {
            (0, ..) => self.pass([1, 200, 5_000, 40_000, 20_000_000][dice.roll(5) as usize]),
            (1, Some(name), _) if dice.roll(3) == 0 => self.scenario.state.leave(self.scenario.member(&name)),
            (1, ..) => self.join(dice),
            (2 | 3, Some(name), _) => {
                let (rate, busy) = (dice.roll(3), dice.roll(4) as u32);
                let load = Load {
                    running_sequences: busy,
                    waiting_requests: dice.roll(2) as u32,
                    pending_prefill_tokens: 100 * dice.roll(6),
                    free_blocks: [5, 100_000][dice.roll(2) as usize],
                    cached_blocks: dice.roll(100) as u32,
                    in_use_blocks: busy * 30,
                    prefill_tokens_per_second: [0.0, 1_000.0, 9_000.0][rate as usize],
                    prefill_fixed_ms: rate as f64,
                    prefill_measurements: dice.roll(3),
                    decode_step_ms: [0.0, 10.0, 30.0][dice.roll(3) as usize],
                    prompt_share: [0.0, 0.5][dice.roll(2) as usize],
                    ..Load::default()
                };
                let stats = ReportedStats { transfer_bytes_per_second: [0.0, 1e6][dice.roll(2) as usize], ..Default::default() };
                let included_request_ids = vec![format!("r{}", dice.roll(self.scenario.requests + 1))];
                let batch = KvBatch { load, included_request_ids, ..Default::default() };
                self.scenario.state.apply(self.scenario.member(&name), batch, stats);
            }
            (4, Some(name), _) => {
                let prompt = hashes(dice.roll(4), 2, [1, 5, 40][dice.roll(3) as usize]);
                let chain = StoredChain { parent: None, sequence_hashes: prompt.to_vec() };
                let tiers = StoredChain { parent: None, sequence_hashes: vec![Tier::Device.note()] };
                let changes = if dice.roll(40) == 0 { vec![chain, tiers] } else { vec![chain] };
                let events = changes.into_iter().map(|chain| KvEvent { event_id: 1, change: Change::Stored(chain) }).collect();
                let load = self.scenario.state.members.get(self.scenario.member(&name)).load.clone();
                self.scenario.reports(&name, events, load, &[]);
            }
            (5 | 6, _, Some(booking)) => {
                self.scenario.state.on_first_token(booking);
                self.scenario.state.on_prefilled(booking, Some(BLOCK * dice.roll(5) as u32));
            }
            (7, _, Some(booking)) => {
                self.scenario.state.release(booking);
                self.placed.swap_remove(any);
            }
            (8, Some(name), Some(booking)) => {
                let instance = format!("{name}-1");
                (0..3).for_each(|_| self.scenario.state.on_failure(booking, &instance, v1::FailureReason::EngineFailed));
            }
            _ => {
                let (request, excluded) = (self.request(dice), self.excluded(dice));
                self.placed.extend(self.scenario.state.place(&request, &excluded, 1).ok().map(|(booking, _)| booking));
            }
        }
    }

    /// Compares the quick choice for the request, and what follows from it, with those of the readable path.
    fn compare(&self, request: &PlacementRequest, excluded: &Excluded) -> Option<bool> {
        let ClusterState { placer, members, .. } = &self.scenario.state;
        members.assert_rows();
        let question = placer.question(members, request, 1).ok()?;
        let full = placer.weigh(members, question.clone(), request, &excluded.failed, Some(self.now));
        let Some(quick) = placer.quick(members, &question, request, excluded) else {
            assert!(full.choice.is_err() || members.leading(question.hashes).has_tiers(), "a choice is missing");
            return Some(false);
        };
        let (choice, quick_choice) = (full.choice.expect("it was found"), quick.choice.expect("it was found"));
        let full_at =
            |at: usize| full.members.iter().position(|member| member.slot == quick.members[at].slot).expect("it is one");
        assert_eq!(RouteChoice { decode: full_at(quick_choice.decode), prefill: quick_choice.prefill.map(full_at) }, choice);
        for (at, (candidate, costs)) in quick.candidates.iter().zip(&quick.costs).enumerate() {
            assert_eq!((candidate, costs), (&full.candidates[full_at(at)], &full.costs[full_at(at)]));
        }
        assert_eq!(quick.facts(members, quick_choice, 0), full.facts(members, choice, 0));
        let wait = quick.at_once(request, self.now).map(|(_, _, wait)| wait);
        let within = full.within(request, choice, self.now).ok().filter(|(within, _)| *within == choice);
        if let Some(wait) = wait {
            assert_eq!(within, Some((choice, wait)));
        }
        Some(true)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 64 } else { 512 }))]

    #[test]
    fn quick_choice_is_that_of_the_readable_path(seed: u64, steps in vec(any::<u64>(), 1..120)) {
        let mut world = World::new(&mut Dice(seed));
        for step in steps {
            let mut dice = Dice(step);
            world.step(&mut dice);
            let (request, excluded) = (world.request(&mut dice), world.excluded(&mut dice));
            world.compare(&request, &excluded);
            world.compare(&request, &Excluded::default());
        }
    }
}

#[test]
fn most_placements_are_quick() {
    let mut counts = [0, 0];
    for seed in 0..100 {
        let mut dice = Dice(tandem_kv::mix(seed));
        let mut world = World::new(&mut dice);
        for _ in 0..50 {
            world.step(&mut dice);
            let request = world.request(&mut dice);
            world.compare(&request, &Excluded::default()).into_iter().for_each(|quick| counts[usize::from(quick)] += 1);
        }
    }
    assert!(counts[1] > 1_000 && counts[0] > 100, "{counts:?}");
}
