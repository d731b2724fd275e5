//! The index replays recorded event streams of a cluster.
//!
//! The recordings are large and not part of the repository; without them the test prints that it is skipped.

mod stream;

use std::path::Path;
use stream::{Expected, Op, Stream};
use tandem_router::{PrefixIndex, Skipped, WorkerSlot};

#[test]
fn index_answers_every_query_of_the_recorded_streams_correctly() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/index_streams");
    for name in ["conv_w64_b64", "conv_w512_b16"] {
        let Some(stream) = Stream::read(&folder, name) else {
            let mut stderr = std::io::stderr();
            std::io::Write::write_all(&mut stderr, format!("SKIPPED: no recorded stream {name}\n").as_bytes())
                .expect("stderr is writable");
            continue;
        };
        let (index, mut queries) = (PrefixIndex::new(3), 0);
        (0..stream.workers).for_each(|worker| assert_eq!(index.add_worker(), WorkerSlot(worker)));
        for (at, op) in stream.ops.iter().enumerate() {
            match op {
                Op::Query { prompt, expected } => {
                    assert_eq!(Expected::of(&index.overlap(prompt)), *expected, "operation {at}");
                    queries += 1;
                }
                Op::Change { worker, change } => {
                    assert_eq!(index.apply(WorkerSlot(*worker), change), Skipped::default(), "operation {at}");
                    index.sweep();
                }
            }
        }
        assert!(queries > 1_000, "{name} has queries");
    }
}
