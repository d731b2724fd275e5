//! Tests of samples whose masks are late. A gate holds back the masks of one constraint.

use super::*;
use crate::sampling::{MaskResult, MaskThreads, Prepared, compile};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use tandem_grammar::{Kind, Mask, Matcher, Vocabulary};
use tandem_model::sim::VOCAB_SIZE;
use tokio::sync::Notify;

/// Holds back each mask that allows the letter z, until the gate is open. Panics at each mask that allows a digit.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }

    fn mask(&self, matcher: &mut Matcher) -> MaskResult {
        let mask = matcher.mask();
        let allows =
            |letter: u8| mask.as_ref().is_ok_and(|mask| mask.as_ref().is_some_and(|mask: &Mask| mask.allows(letter.into())));
        assert!(!allows(b'7'), "the test's mask panics");
        if allows(b'z') {
            self.0.1.wait_while(&mut self.0.0.lock(), |open| !*open);
        }
        mask
    }
}

const PANICS: &str = "[a-y ]{3}[0-9]";
const FREE: &str = "[a-y ]{30}";
const GATED: &str = "[a-z ]{30}";

struct Masks {
    world: World,
    threads: MaskThreads,
    wake: Arc<Notify>,
}

impl Masks {
    fn new(world: World, gate: &Gate) -> Self {
        let (wake, gate) = (Arc::new(Notify::new()), gate.clone());
        let threads = MaskThreads::start_with(2, Arc::clone(&wake), move |matcher| gate.mask(matcher)).unwrap();
        Self { world, threads, wake }
    }

    fn generate(&mut self, job: JobId, regex: &str, generate: Generate) {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let vocabulary = Vocabulary::new(bytes.chunks(1).map(|byte| (byte, false)), VOCAB_SIZE);
        let constraint = Kind::Regex(regex.to_owned()).into();
        let fresh = compile(&vocabulary, &constraint, &[]).expect("the constraint is valid");
        let prepared = Prepared::new(fresh, &generate.generated, self.threads.clone(), generate.account.as_str().into());
        let prepared = Some(Arc::new(prepared.expect("nothing is generated yet")));
        self.world.machine.generate_constrained(job, generate, prepared, self.world.now).expect("the job fits in the cache");
    }

    /// Makes steps until the job has ended.
    fn run_until_end_of(&mut self, job: JobId) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime starts");
        while !self.world.ended.contains(&job) {
            assert!(self.world.steps < 10_000, "the machine makes progress");
            if !self.world.step() {
                let ready = async { tokio::time::timeout(Duration::from_secs(60), self.wake.notified()).await };
                runtime.block_on(ready).expect("a mask becomes ready");
            }
        }
    }
}

fn unhindered(regex: &str, job: Generate) -> Vec<TokenId> {
    let gate = Gate::default();
    gate.open();
    let mut masks = Masks::new(World::new(4_096, SETTINGS), &gate);
    masks.generate(0, regex, job);
    masks.run_until_end_of(0);
    masks.world.tokens(0, 0)
}

#[test]
fn sample_with_a_late_mask_delays_no_other_sample_and_has_the_same_tokens() {
    let job = |seed| {
        let job = generate(prompt("what", 40), 30);
        Generate { sampling: Sampling { seed, ..job.sampling.clone() }, ..job }
    };
    let gate = Gate::default();
    let mut masks = Masks::new(World::new(4_096, SETTINGS), &gate);
    masks.generate(0, GATED, job(1));
    masks.generate(1, FREE, job(2));
    masks.world.machine.generate(2, job(3), masks.world.now).expect("the job fits in the cache");
    masks.run_until_end_of(1);
    masks.run_until_end_of(2);
    assert!(masks.world.tokens(0, 0).is_empty(), "no token is sampled without a mask");
    assert_eq!(masks.world.tokens(1, 0), unhindered(FREE, job(2)));
    assert_eq!(masks.world.tokens(2, 0), alone(job(3)).swap_remove(0));
    assert!(!masks.world.step(), "nothing is computed for a sample that waits for its mask");
    assert!(masks.world.machine.load().in_use_blocks > 0, "the sample keeps its blocks");
    gate.open();
    masks.run_until_end_of(0);
    assert_eq!(masks.world.tokens(0, 0), unhindered(GATED, job(1)));
    masks.world.assert_idle();
}

#[test]
fn resumed_and_preempted_samples_with_late_masks_have_the_same_tokens() {
    let job = generate(prompt("how", 40), 30);
    let whole = unhindered(GATED, job.clone());
    let gate = Gate::default();
    let mut masks = Masks::new(World::new(9, SETTINGS), &gate);
    let generated = vec![crate::Generated { sample: 0, tokens: whole[..7].to_vec() }];
    masks.generate(0, GATED, Generate { generated, ..job.clone() });
    masks.generate(1, GATED, job.clone());
    while masks.world.step() {}
    // This job needs the blocks of the waiting samples.
    masks
        .world
        .machine
        .generate(2, Generate { account: "other".to_owned(), ..generate(prompt("why", 60), 30) }, masks.world.now)
        .expect("the job fits in the cache");
    masks.run_until_end_of(2);
    gate.open();
    masks.run_until_end_of(0);
    masks.run_until_end_of(1);
    assert_eq!([&whole[..7], &masks.world.tokens(0, 0)].concat(), whole);
    assert_eq!(masks.world.tokens(1, 0), whole);
    assert!(masks.world.machine.load().preemptions > 0, "a sample was preempted");
    masks.world.assert_idle();
}

#[test]
fn each_late_mask_costs_at_most_one_step() {
    let gate = Gate::default();
    let mut masks = Masks::new(World::new(4_096, SETTINGS), &gate);
    masks.generate(0, GATED, generate(prompt("all", 40), 30));
    masks.generate(1, GATED, generate(prompt("wait", 40), 30));
    while masks.world.step() {}
    let steps = masks.world.steps;
    assert!(!masks.world.step() && !masks.world.step(), "no step is made while all samples wait");
    gate.open();
    masks.run_until_end_of(0);
    masks.run_until_end_of(1);
    let rows = masks.world.steps - steps;
    assert!(rows <= 2 * 2 * 30, "{rows} steps for 60 tokens");
}

#[test]
fn panic_while_a_mask_is_computed_refuses_only_the_request_of_that_mask() {
    let gate = Gate::default();
    gate.open();
    let mut masks = Masks::new(World::new(4_096, SETTINGS), &gate);
    let job = || generate(prompt("what", 40), 30);
    for panicking in 0..4 {
        masks.generate(panicking, PANICS, job());
    }
    masks.generate(4, FREE, job());
    (0..5).for_each(|job| masks.run_until_end_of(job));
    for panicking in 0..4 {
        let last = masks.world.events[&panicking].last();
        assert!(matches!(last, Some(Event::Refused(Refusal::Unsupported(why))) if why.contains("the parser failed")), "{last:?}");
        assert_eq!(masks.world.tokens(panicking, 0).len(), 3);
    }
    assert_eq!(masks.world.tokens(4, 0), unhindered(FREE, job()), "the threads continue");
    masks.world.assert_idle();
}
