//! Tests of random histories of jobs on small caches.

use super::{receiving::Writing, *};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Operation {
    Generate {
        family: usize,
        len: usize,
        max_tokens: u32,
        samples: u32,
        seed: u64,
    },
    Prefill {
        family: usize,
        len: usize,
    },
    Remote {
        family: usize,
        len: usize,
        max_tokens: u32,
    },
    Steps(usize),
    Cancel(usize),
    Pause(usize, bool),
    SendAll(usize),
    Write {
        index: usize,
        blocks: usize,
    },
    /// Begins a write that runs concurrently with the steps; otherwise like `Write`.
    Begin {
        index: usize,
        blocks: usize,
    },
    End {
        index: usize,
        whole: bool,
    },
    /// A write that its ticket does not allow.
    Refused(usize),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        4 => (0..3usize, 1..90usize, 0..40u32, 1..4u32, 0..4u64)
            .prop_map(|(family, len, max_tokens, samples, seed)| Operation::Generate { family, len, max_tokens, samples, seed }),
        2 => (0..3usize, 1..90usize).prop_map(|(family, len)| Operation::Prefill { family, len }),
        2 => (0..3usize, 1..90usize, 1..20u32).prop_map(|(family, len, max_tokens)| Operation::Remote { family, len, max_tokens }),
        4 => (1..12usize).prop_map(Operation::Steps),
        1 => any::<prop::sample::Index>().prop_map(|index| Operation::Cancel(index.index(64))),
        3 => (any::<prop::sample::Index>(), any::<bool>()).prop_map(|(index, behind)| Operation::Pause(index.index(64), behind)),
        4 => (any::<prop::sample::Index>(), 1..8usize).prop_map(|(index, blocks)| Operation::Write { index: index.index(64), blocks }),
        3 => (any::<prop::sample::Index>(), 1..8usize).prop_map(|(index, blocks)| Operation::Begin { index: index.index(64), blocks }),
        3 => (any::<prop::sample::Index>(), prop::bool::weighted(0.8))
            .prop_map(|(index, whole)| Operation::End { index: index.index(64), whole }),
        2 => any::<prop::sample::Index>().prop_map(|index| Operation::SendAll(index.index(64))),
        1 => any::<prop::sample::Index>().prop_map(|index| Operation::Refused(index.index(64))),
    ];
    prop::collection::vec(operation, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    /// A job that finishes has the same text as when it runs alone, in whatever order jobs arrive, pause and end, and however small the cache
    /// and the budget are. Counts are bounded, and at the end no block is held.
    #[test]
    fn jobs_in_any_history_have_the_same_text_as_single_jobs_and_free_all_blocks(
        operations in operations(), capacity in 12..40u32, budget in 1..100u32, priorities in prop::collection::vec((-1..2i32, -1..2i32), 40),
        old in any::<bool>(),
    ) {
        let mut world = World::new(capacity, EngineSettings { chunk_budget: budget, batch_max: 6, ..SETTINGS });
        let mut generated: BTreeMap<JobId, Generate> = BTreeMap::new();
        let mut prefilled: BTreeMap<JobId, usize> = BTreeMap::new();
        // Each remote prompt has the number of blocks that were received for it.
        let mut remote: BTreeMap<JobId, (Generate, usize)> = BTreeMap::new();
        let mut writing: Vec<(Writing, Vec<TokenId>)> = Vec::new();
        let text = |family: usize, len| prompt(["one", "once upon", "zzz"][family], len);
        for (id, operation) in (0..).zip(operations) {
            let (across, within) = priorities[id as usize];
            let priority = Priority { across, within };
            if old {
                // Older jobs may become exempt.
                world.now += EXEMPT_AFTER / 4;
            }
            match operation {
                Operation::Generate { family, len, max_tokens, samples, seed } => {
                    let mut job = Generate { priority, ..generate(text(family, len), max_tokens) };
                    job.samples = samples;
                    job.sampling.seed = seed;
                    if world.machine.generate(id, job.clone(), world.now).is_ok() {
                        generated.insert(id, job);
                    }
                }
                Operation::Prefill { family, len } => {
                    if world.machine.prefill(id, Prefill { priority, ..prefill(text(family, len)) }, world.now).is_ok() {
                        prefilled.insert(id, len);
                    }
                }
                Operation::Remote { family, len, max_tokens } => {
                    let job = Generate { kv: KvSource::Remote, priority, ..generate(text(family, len), max_tokens) };
                    if world.machine.generate(id, job.clone(), world.now).is_ok() {
                        remote.insert(id, (job, 0));
                    }
                }
                Operation::Steps(steps) => {
                    for _ in 0..steps {
                        world.step();
                    }
                }
                Operation::Cancel(index) => {
                    let job = index as u64 % (id + 1);
                    world.machine.cancel(job);
                    generated.remove(&job);
                    remote.remove(&job);
                    prefilled.remove(&job);
                    world.machine.check_invariants().unwrap();
                }
                Operation::Pause(index, behind) => world.machine.set_paused(index as u64 % (id + 1), behind),
                Operation::Write { index, blocks } => {
                    let job = index as u64 % (id + 1);
                    let (Some((generate, written)), Some((ticket, missing))) = (remote.get_mut(&job), world.reserved(job)) else {
                        continue;
                    };
                    let kv = kv(&generate.prompt);
                    for index in missing.iter().skip(*written).take(blocks) {
                        // The engine refuses the write if the reservation was revoked.
                        *written += usize::from(world.write(ticket, *index, &kv[*index as usize].1).is_ok());
                    }
                    world.confirm(ticket);
                }
                Operation::Refused(index) => {
                    if let Some((ticket, _)) = world.reserved(index as u64 % (id + 1)) {
                        assert!(world.write(ticket, u32::MAX, &[]).is_err());
                    }
                }
                Operation::Begin { index, blocks } => {
                    let job = index as u64 % (id + 1);
                    let (Some((generate, written)), Some((ticket, missing))) = (remote.get_mut(&job), world.reserved(job)) else {
                        continue;
                    };
                    let indices: Vec<u32> = missing.iter().skip(*written).take(blocks).copied().collect();
                    if !indices.is_empty() && let Ok(begun) = world.begin(ticket, &indices) {
                        *written += indices.len();
                        writing.push((begun, generate.prompt.clone()));
                    }
                }
                Operation::End { index, whole } => {
                    if !writing.is_empty() {
                        let (begun, prompt) = writing.swap_remove(index % writing.len());
                        let ticket = begun.ticket();
                        // A failed write may leave any bytes in its blocks, even if the reservation has ended in the meantime.
                        world.end(begun, &if whole { kv(&prompt) } else { Vec::new() }, whole);
                        world.confirm(ticket);
                    }
                }
                Operation::SendAll(index) => {
                    world.machine.send_blocks(index as u64 % (id + 1), (0..100).collect(), BlockAccess::Copied);
                    world.act();
                }
            }
        }
        for (begun, prompt) in writing {
            let ticket = begun.ticket();
            world.end(begun, &kv(&prompt), true);
            world.confirm(ticket);
        }
        // Prefills whose blocks were not fetched, and remote prompts whose KV was not sent, still hold blocks. Their clients disconnect now.
        remote.retain(|job, _| world.events.get(job).is_some_and(|events| events.iter().any(|event| matches!(event, Event::Started(_)))));
        let jobs: Vec<JobId> = world.machine.live.keys().copied().filter(|job| !generated.contains_key(job) && !remote.contains_key(job)).collect();
        for job in jobs {
            world.machine.cancel(job);
        }
        world.run();
        (0..64).for_each(|job| world.machine.set_paused(job, false));
        world.run();
        for (id, (job, _)) in remote {
            prop_assert_eq!(world.tokens(id, 0), alone(job).swap_remove(0), "remote job {}", id);
        }
        for (id, job) in generated {
            let prompt_len = job.prompt.len() as u32;
            let expected = alone(job);
            for (sample, expected) in (0..).zip(expected) {
                prop_assert_eq!(world.tokens(id, sample), expected, "job {} sample {}", id, sample);
            }
            let cached = world.cached(id).expect("every job gets a Scheduled event");
            prop_assert!(cached < prompt_len && cached.is_multiple_of(16));
        }
        for (id, len) in prefilled {
            if let Some(cached) = world.cached(id) {
                prop_assert!((cached as usize) < len && cached.is_multiple_of(16));
            }
        }
        world.assert_idle();
    }
}
