//! Blocks outside of the devices' memory: in whose index they count, what loading them costs, and how its time is learned.

use super::*;
use std::time::Duration;
use tandem_kv::{ByTier, Tier};

const BLOCKS: u64 = 125;
const TOKENS: u32 = BLOCKS as u32 * BLOCK;

/// Returns the hashes of a prompt's blocks. As in real ones, each bit is random; those of neighbouring blocks in two tiers could be equal otherwise.
fn prompt(number: u64) -> Arc<[SequenceHash]> {
    hashes(number, 0, BLOCKS).iter().map(|hash| SequenceHash(tandem_kv::mix(hash.0))).collect()
}

/// A cluster of mixed workers in virtual time. Each computes a token in a millisecond.
struct World {
    scenario: Scenario,
    now: Instant,
    /// The milliseconds in which each worker loads a token from its host's memory.
    load_ms: f64,
}

impl World {
    fn new(workers: usize, load_ms: f64) -> Self {
        let mut world =
            Self { scenario: Scenario::with(settings(PrefillPlace::Local), 0, workers), now: Instant::now(), load_ms };
        world.pass(0.0);
        world.refresh(workers);
        world
    }

    fn pass(&mut self, ms: f64) {
        self.now += Duration::from_secs_f64(ms / 1e3);
        self.scenario.state.members.virtual_time = Some(self.now);
    }

    /// Reports the measured rate of each worker again, so that it is not old.
    fn refresh(&mut self, workers: usize) {
        self.scenario.requests += 1;
        let load = Load {
            prefill_tokens_per_second: 1e3,
            prefill_measurements: self.scenario.requests,
            free_blocks: 100_000,
            ..Load::default()
        };
        (0..workers).for_each(|worker| self.scenario.reports(&format!("d{worker}"), Vec::new(), load.clone(), &[]));
    }

    /// Reports the prompt's blocks as stored, of which the first ones are in the chain of each tier.
    fn stores(&mut self, worker: &str, prompt: &[SequenceHash], chains: ByTier<Option<usize>>) {
        self.scenario.stored(worker, prompt);
        for (tier, blocks) in Tier::ALL.into_iter().zip(chains) {
            if let Some(blocks) = blocks {
                self.scenario.stored(worker, &[tier.note()]);
                let chain: Vec<_> = prompt[..blocks].iter().map(|hash| hash.in_tier(tier)).collect();
                self.scenario.stored(worker, &chain);
            }
        }
        self.refresh(self.scenario.state.members.len());
    }

    /// Serves the prompt where the router places it. Its worker finds `found` blocks on its device and `loaded` ones in its host's memory. Returns the
    /// worker's name.
    fn serve(&mut self, prompt: &Arc<[SequenceHash]>, found: u32, loaded: u32, disturbed_ms: f64) -> String {
        let (booking, placement) = self.scenario.place_hashes(TOKENS + 1, prompt.clone());
        let computed = TOKENS + 1 - (found + loaded) * BLOCK;
        let fixed_ms = Costs::default().prefill_fixed_ms;
        self.pass(fixed_ms + f64::from(computed) + f64::from(loaded * BLOCK) * self.load_ms + disturbed_ms);
        self.scenario.state.on_prefilled(booking, None);
        // vLLM reports the number with the end of the answer.
        self.pass(700.0);
        self.scenario.state.on_prefilled(booking, Some((found + loaded) * BLOCK));
        self.scenario.state.release(booking);
        self.refresh(self.scenario.state.members.len());
        name(&placement.decode)
    }

    /// Serves twenty prompts that d0 has in its host's memory except for the first 25 blocks.
    fn learn(&mut self) {
        for number in 0..20 {
            let prompt = prompt(number);
            self.stores("d0", &prompt, [Some(25), None, None, None]);
            let disturbed_ms = if number % 4 == 3 { 4_000.0 } else { 0.0 };
            assert_eq!(self.serve(&prompt, 25, 100, disturbed_ms), "d0");
        }
    }

    fn explain(&mut self, prompt: &Arc<[SequenceHash]>) -> v1::ExplainReply {
        let request = self.scenario.request(TOKENS + 1, prompt.clone());
        self.scenario.state.explain(&request)
    }

    fn chosen(&mut self, prompt: &Arc<[SequenceHash]>) -> String {
        name(&self.explain(prompt).placement.expect("a worker is eligible").decode)
    }

    fn learned(&self) -> Option<f64> {
        let view = self.scenario.state.view();
        view.workers[0].tiers.iter().find(|tier| tier.tier == "host")?.load_ms_per_token
    }
}

#[test]
fn time_to_load_a_token_is_learned_from_first_tokens_and_costs_its_milliseconds() {
    for load_ms in [0.1, 0.5, 4.0] {
        let mut world = World::new(1, load_ms);
        world.learn();
        let learned = world.learned().expect("the time was learned");
        assert!((learned / load_ms - 1.0).abs() < 0.02, "{learned} instead of {load_ms}");
        let prompt = prompt(99);
        world.stores("d0", &prompt, [Some(25), None, None, None]);
        let worker = world.explain(&prompt).workers.remove(0);
        assert_eq!(worker.overlap_blocks, BLOCKS as u32);
        assert_eq!(worker.overlap_by_tier, [("device".to_owned(), 25), ("host".to_owned(), 100)].into());
        let cost = worker.alone.expect("the worker is eligible").load_ms;
        assert!((cost / (1_600.0 * load_ms) - 1.0).abs() < 0.02, "{cost}");
        assert!(world.scenario.recorder.render().contains(r#"tandem_router_load_ms_per_token{worker="d0",tier="host"}"#));
    }
}

#[test]
fn worker_with_blocks_in_host_memory_beats_computing_and_loses_to_an_idle_worker_with_them_on_its_device() {
    let mut world = World::new(2, 0.2);
    world.learn();
    let prompt = prompt(99);
    world.stores("d0", &prompt, [Some(25), None, None, None]);
    assert_eq!(world.chosen(&prompt), "d0", "loading takes 320 ms, computing 2 s");
    world.stores("d1", &prompt, [None; 4]);
    assert_eq!(world.chosen(&prompt), "d1");
    // The idle worker with the blocks on its device gets busy for longer than the other one loads.
    let busy =
        |tokens| Load { pending_prefill_tokens: tokens, prefill_tokens_per_second: 1e3, free_blocks: 90_000, ..Load::default() };
    world.scenario.reports("d1", Vec::new(), busy(200), &[]);
    assert_eq!(world.chosen(&prompt), "d1");
    world.scenario.reports("d1", Vec::new(), busy(500), &[]);
    assert_eq!(world.chosen(&prompt), "d0");
}

#[test]
fn worker_whose_loads_take_longer_than_computing_loses_to_an_idle_worker_without_the_blocks() {
    let mut world = World::new(1, 4.0);
    world.learn();
    world.scenario.join(info(worker_info::Role::Decode, "d1")).expect("it agrees with the other");
    world.refresh(2);
    let prompt = prompt(99);
    world.stores("d0", &prompt, [Some(25), None, None, None]);
    assert_eq!(world.chosen(&prompt), "d1");
}

#[test]
fn blocks_of_a_shared_store_count_for_all_workers_of_the_store() {
    let mut world = World::new(1, 0.1);
    for (worker, store) in [("d1", "nfs"), ("d2", "nfs"), ("d3", "other"), ("d4", "")] {
        let info = WorkerInfo { shared_store: store.to_owned(), ..info(worker_info::Role::Decode, worker) };
        world.scenario.join(info).expect("it agrees with the others");
    }
    world.refresh(5);
    let prompt = prompt(99);
    // d1 has 40 blocks on its device, and all in the store. d2 has 10 blocks on its device.
    world.stores("d1", &prompt, [None, None, Some(40), Some(125)]);
    world.stores("d2", &prompt[..10], [None; 4]);
    let by_tier = |device: u32, store: u32| {
        [("device", device), ("store", store)].map(|(tier, blocks)| (tier.to_owned(), blocks)).into_iter().collect()
    };
    let workers = world.explain(&prompt).workers;
    let found: Vec<_> = workers.into_iter().map(|worker| (worker.overlap_blocks, worker.overlap_by_tier)).collect();
    let none = (0, Default::default());
    assert_eq!(found, [none.clone(), (125, by_tier(40, 85)), (125, by_tier(10, 115)), none.clone(), none]);
    // When the store drops blocks, they no longer count for the other worker either.
    let dropped = prompt[60..].iter().rev().flat_map(|hash| [*hash, hash.in_tier(Tier::Store)]).collect();
    world.scenario.reports("d1", vec![KvEvent { event_id: 9, change: Change::Removed(dropped) }], Load::default(), &[]);
    let workers = world.explain(&prompt).workers;
    assert_eq!(workers.iter().map(|worker| worker.overlap_blocks).collect::<Vec<_>>(), [0, 60, 60, 0, 0]);
    assert_eq!(world.scenario.state.view().workers[1].indexed_blocks, 60, "repetitions in the tiers' chains are not counted");
}

#[test]
fn prompts_that_find_less_than_was_expected_teach_nothing() {
    let mut world = World::new(1, 0.1);
    for number in 0..20 {
        let prompt = prompt(number);
        world.stores("d0", &prompt, [Some(25), None, None, None]);
        world.serve(&prompt, 25, 100 - 1 - number as u32, 0.0);
    }
    assert_eq!(world.learned(), None);
}
