//! Tests of blocks that are written while steps run.

use super::*;

pub(super) struct Writing {
    ticket: Ticket,
    indices: Vec<u32>,
    blocks: Vec<BlockId>,
}

impl Writing {
    pub(super) fn ticket(&self) -> Ticket {
        self.ticket
    }
}

impl World {
    pub(super) fn begin(&mut self, ticket: Ticket, indices: &[u32]) -> Result<Writing, WriteRefused> {
        let begun = self.machine.begin_write(ticket, indices, self.now);
        self.act();
        let blocks = begun?;
        Ok(Writing { ticket, indices: indices.to_vec(), blocks })
    }

    /// Writes the blocks of `kv` and ends the write. Blocks that `kv` lacks are filled with other bytes. `whole` says whether the write is ended as
    /// complete.
    pub(super) fn end(&mut self, writing: Writing, kv: &[(u32, Bytes)], whole: bool) {
        let Writing { ticket, indices, blocks } = writing;
        let garbage = Bytes::from(vec![0xAA; self.engine.describe().block_bytes]);
        for (index, block) in indices.iter().zip(blocks) {
            let payload = kv.get(*index as usize).map_or(&garbage, |(_, payload)| payload);
            self.engine.write_block(block, payload).unwrap();
        }
        self.machine.end_write(EndedWrite { ticket, indices, complete: whole });
        self.act();
    }

    pub(super) fn confirm(&mut self, ticket: Ticket) {
        self.machine.confirm(ticket, self.now);
        self.act();
    }

    pub(super) fn started(&self, job: JobId) -> bool {
        self.events[&job].iter().any(|event| matches!(event, Event::Started(_)))
    }
}

/// Submits a remote prompt of 100 tokens. Returns its job and its ticket when its 7 blocks are allocated.
pub(super) fn reserved(world: &mut World) -> (Generate, Ticket) {
    let job = Generate { kv: KvSource::Remote, ..generate(prompt("elsewhere", 100), 8) };
    world.machine.generate(0, job.clone(), world.now).expect("the job fits in the cache");
    world.step();
    let (ticket, missing) = world.reserved(0).expect("blocks are available");
    assert_eq!(missing, [0, 1, 2, 3, 4, 5, 6]);
    (job, ticket)
}

#[test]
fn concurrently_written_blocks_are_used_only_after_confirmation() {
    let mut world = World::new(64, SETTINGS);
    let (job, ticket) = reserved(&mut world);
    let kv = kv(&job.prompt);
    let (some, rest) = (world.begin(ticket, &[6, 0, 3]).unwrap(), world.begin(ticket, &[1, 2, 4, 5]).unwrap());
    world.end(some, &kv, true);
    world.confirm(ticket);
    assert!(!world.step() && !world.started(0), "blocks are missing");
    world.end(rest, &kv, true);
    assert!(!world.step() && !world.started(0), "the transfer is not confirmed yet");
    let cached = world.machine.cache.overlap(&namespace(), &job.prompt, 6);
    assert_eq!(cached, 0, "blocks are not cached before their confirmation");
    world.confirm(ticket);
    world.run();
    assert_eq!(world.tokens(0, 0), alone(job.clone()).swap_remove(0));
    let Some(Event::Started(started)) = world.events[&0].iter().find(|event| matches!(event, Event::Started(_))) else {
        panic!("the sequence has not started");
    };
    assert_eq!(started.kv_transfer_bytes, 7 * 128);
    assert_eq!(world.machine.cache.overlap(&namespace(), &job.prompt, 6), 6);
    world.assert_idle();
}

#[test]
fn blocks_of_a_failed_concurrent_write_may_be_written_again() {
    let mut world = World::new(64, SETTINGS);
    let (job, ticket) = reserved(&mut world);
    let kv = kv(&job.prompt);
    world.write(ticket, 5, &kv[5].1).expect("the reservation still needs the block");
    let begun = world.begin(ticket, &[0, 1]).expect("the reservation still needs both blocks");
    world.end(begun, &[], false);
    let again = world.begin(ticket, &[0, 1, 2, 3, 4, 6]).expect("the reservation needs the blocks of a failed write again");
    world.end(again, &kv, true);
    world.confirm(ticket);
    world.run();
    assert_eq!(world.tokens(0, 0), alone(job).swap_remove(0));
    world.assert_idle();
}

#[test]
fn blocks_stay_in_use_until_their_write_has_ended_even_if_the_job_ends_earlier() {
    for fails in [false, true] {
        // The cache has only as many blocks as one such prompt and its answer need.
        let mut world = World::new(8, SETTINGS);
        let (_, ticket) = reserved(&mut world);
        let writing = world.begin(ticket, &[2, 4]).expect("the reservation still needs both blocks");
        if fails {
            world.machine.fail();
        } else {
            world.machine.cancel(0);
        }
        world.act();
        assert_eq!(world.machine.load().in_use_blocks, 2);
        let other = generate(prompt("another", 100), 8);
        world.machine.generate(1, other.clone(), world.now).expect("the job fits in an empty cache");
        assert!(!world.step(), "the job needs seven blocks, and six are free");
        world.end(writing, &[], true);
        world.confirm(ticket);
        world.run();
        assert_eq!(world.tokens(1, 0), alone(other).swap_remove(0));
        world.assert_idle();
    }
}

#[test]
fn revoked_reservation_keeps_blocks_being_written() {
    let mut world = World::new(12, EngineSettings { chunk_budget: 16, ..SETTINGS });
    let grows = generate(prompt("grows", 60), 60);
    world.machine.generate(1, grows.clone(), world.now).expect("the job fits in the cache");
    world.step();
    let job = Generate { kv: KvSource::Remote, ..generate(prompt("elsewhere", 90), 8) };
    world.machine.generate(2, job, world.now).expect("the job fits in the cache");
    while world.reserved(2).is_none() {
        assert!(world.step(), "blocks are available for both sequences");
    }
    let (ticket, _) = world.reserved(2).expect("the sequence has reserved blocks");
    let writing = world.begin(ticket, &[0]).expect("the reservation still needs the block");
    while !world.events[&2].iter().any(|event| matches!(event, Event::Revoked)) {
        assert!(world.step(), "the first sequence grows until no block is free");
    }
    world.end(writing, &[], true);
    world.run();
    assert_eq!(world.tokens(1, 0), alone(grows).swap_remove(0));
    world.assert_idle();
}

#[test]
fn remote_prompt_does_not_wait_for_prompts_that_are_computed_here() {
    let mut world = World::new(512, SETTINGS);
    for job in 1..=12 {
        let local = generate(prompt(&format!("local {job}"), 300), 1);
        world.machine.generate(job, local, world.now).expect("the job fits in the cache");
    }
    world.step();
    let (job, ticket) = reserved(&mut world);
    let writing = world.begin(ticket, &[0, 1, 2, 3, 4, 5, 6]).expect("the reservation needs all blocks");
    world.end(writing, &kv(&job.prompt), true);
    world.confirm(ticket);
    world.step();
    assert!(!world.tokens(0, 0).is_empty(), "its last token is computed in the next step");
    assert!(world.machine.load().waiting_requests > 0, "prompts that are computed here still wait");
    world.run();
    world.assert_idle();
}
