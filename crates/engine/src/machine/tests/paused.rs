//! Tests of backpressure: jobs whose event buffers are full.

use super::*;

#[test]
fn paused_job_resumes_with_the_same_text_while_other_jobs_run() {
    let mut world = World::new(64, SETTINGS);
    let mut jobs = [generate(prompt("paused", 40), 30), generate(prompt("runs", 50), 60)];
    jobs[0].samples = 3;
    for (id, job) in (0..).zip(&jobs) {
        world.machine.generate(id, job.clone(), world.now).expect("the job fits in the cache");
    }
    (0..5).for_each(|_| assert!(world.step()));
    world.machine.set_paused(0, true);
    let count = world.events[&0].len();
    world.run();
    assert_eq!(world.events[&0].len(), count, "a paused job gets no events");
    assert_eq!(world.tokens(1, 0), alone(jobs[1].clone())[0], "the other job is not paused");
    assert!(world.machine.load().in_use_blocks > 0, "a paused job keeps its blocks while no other job needs them");
    world.machine.set_paused(0, false);
    world.run();
    for (sample, expected) in (0..).zip(alone(jobs[0].clone())) {
        assert_eq!(world.tokens(0, sample), expected, "sample {sample}");
    }
    world.assert_idle();
}

#[test]
fn paused_job_is_preempted_if_growing_or_new_sequences_need_blocks() {
    for comes in [false, true] {
        let mut world = World::new(8, EngineSettings { batch_max: 2, ..SETTINGS });
        let paused = generate(prompt("gives way", 60), 40);
        world.machine.generate(0, paused.clone(), world.now).expect("the job fits in the cache");
        (0..3).for_each(|_| assert!(world.step()));
        let other = match comes {
            false => generate(prompt("grows", 20), 90),
            true => generate(prompt("comes", 100), 5),
        };
        world.machine.set_paused(0, true);
        world.machine.generate(1, other.clone(), world.now).expect("the job fits in the cache");
        world.run();
        assert_eq!(world.tokens(1, 0), alone(other)[0], "a job does not wait for another job's client");
        assert_eq!(world.machine.preemptions, 1);
        assert_eq!(world.machine.load().waiting_requests, 1, "a paused job is not admitted again");
        world.machine.set_paused(0, false);
        world.run();
        assert_eq!(world.tokens(0, 0), alone(paused)[0]);
        world.assert_idle();
    }
}

#[test]
fn paused_jobs_take_no_places_in_the_batch() {
    let mut world = World::new(64, EngineSettings { batch_max: 2, ..SETTINGS });
    let job = |id: u64| generate(prompt(["a", "b", "c", "d"][id as usize], 20), 30);
    for id in 0..2 {
        world.machine.generate(id, job(id), world.now).expect("the job fits in the cache");
    }
    (0..3).for_each(|_| assert!(world.step()));
    (0..2).for_each(|id| world.machine.set_paused(id, true));
    for id in 2..4 {
        world.machine.generate(id, job(id), world.now).expect("the job fits in the cache");
    }
    (0..3).for_each(|_| assert!(world.step()));
    (0..2).for_each(|id| world.machine.set_paused(id, false));
    world.run();
    for id in 0..4 {
        assert_eq!(world.tokens(id, 0), alone(job(id))[0], "job {id}");
    }
    assert_eq!(world.machine.preemptions, 0, "the cache holds the blocks of two running jobs");
    world.assert_idle();
}
