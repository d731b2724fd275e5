//! A cluster whose number of workers follows the router's wanted number, under a load that triples.

mod support;

use support::scaling::World;
use tandem_simulator::ScalingRule;

#[test]
fn wanted_number_serves_a_load_that_triples_with_fewer_worker_hours_than_its_peak_needs() {
    let world = World::new("step", 40.0, 60, 2, |t| if t < 1_200.0 { 3.0 } else { 9.0 });
    let wanted = world.run(ScalingRule::Wanted);
    let [few, many] = [2, 5].map(|workers| world.run(ScalingRule::Schedule(vec![(std::time::Duration::ZERO, workers)])));
    assert!(few.good < 0.7, "two workers are too few: {few:?}");
    assert!(many.good > 0.99 && wanted.good > 0.9, "{wanted:?} {many:?}");
    assert!(wanted.worker_hours < 0.7 * many.worker_hours, "{wanted:?} {many:?}");
    assert!(wanted.changes <= 20, "{wanted:?}");
}
