//! Jobs whose listeners are behind.

use super::*;

#[test]
fn a_paused_job_says_nothing_and_goes_on_with_the_same_text_while_others_run() {
    let mut world = World::new(64, SETTINGS);
    let mut jobs = [generate(prompt("paused", 40), 30), generate(prompt("runs", 50), 60)];
    jobs[0].samples = 3;
    for (id, job) in (0..).zip(&jobs) {
        world.machine.generate(id, job.clone(), world.now).expect("the job fits");
    }
    (0..5).for_each(|_| assert!(world.step()));
    world.machine.pause(0, true);
    let heard = world.heard[&0].len();
    world.run();
    assert_eq!(world.heard[&0].len(), heard, "it waits for its listener");
    assert_eq!(world.tokens(1, 0), alone(jobs[1].clone())[0], "others do not");
    assert!(world.machine.load().in_use_blocks > 0, "its blocks stay where nobody needs them");
    world.machine.pause(0, false);
    world.run();
    for (sample, expected) in (0..).zip(alone(jobs[0].clone())) {
        assert_eq!(world.tokens(0, sample), expected, "sample {sample}");
    }
    world.assert_idle();
}

#[test]
fn a_paused_job_makes_room_for_who_grows_and_for_who_comes() {
    for comes in [false, true] {
        let mut world = World::new(8, EngineSettings { batch_max: 2, ..SETTINGS });
        let paused = generate(prompt("gives way", 60), 40);
        world.machine.generate(0, paused.clone(), world.now).expect("the job fits");
        (0..3).for_each(|_| assert!(world.step()));
        let other = match comes {
            false => generate(prompt("grows", 20), 90),
            true => generate(prompt("comes", 100), 5),
        };
        world.machine.pause(0, true);
        world.machine.generate(1, other.clone(), world.now).expect("the job fits");
        world.run();
        assert_eq!(world.tokens(1, 0), alone(other)[0], "it does not wait for a listener of another");
        assert_eq!(world.machine.preemptions, 1);
        assert_eq!(world.machine.load().waiting_requests, 1, "who is paused is not taken in again before");
        world.machine.pause(0, false);
        world.run();
        assert_eq!(world.tokens(0, 0), alone(paused)[0]);
        world.assert_idle();
    }
}

#[test]
fn paused_jobs_are_no_part_of_a_full_batch() {
    let mut world = World::new(64, EngineSettings { batch_max: 2, ..SETTINGS });
    let job = |id: u64| generate(prompt(["a", "b", "c", "d"][id as usize], 20), 30);
    for id in 0..2 {
        world.machine.generate(id, job(id), world.now).expect("the job fits");
    }
    (0..3).for_each(|_| assert!(world.step()));
    (0..2).for_each(|id| world.machine.pause(id, true));
    for id in 2..4 {
        world.machine.generate(id, job(id), world.now).expect("the job fits");
    }
    (0..3).for_each(|_| assert!(world.step()));
    (0..2).for_each(|id| world.machine.pause(id, false));
    world.run();
    for id in 0..4 {
        assert_eq!(world.tokens(id, 0), alone(job(id))[0], "job {id}");
    }
    assert_eq!(world.machine.preemptions, 0, "four fit, two at a time");
    world.assert_idle();
}
