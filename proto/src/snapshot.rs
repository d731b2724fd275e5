//! Splits snapshots into messages of bounded size, and assembles them again.

use crate::{
    WireError,
    event::{chain, stored},
    v1,
};
use tandem_kv::Snapshot;

/// Maximum number of hashes in one chunk. They take 64 KiB, which is far below every message limit and does not delay a heartbeat for long.
pub const CHUNK_HASHES_MAX: usize = 8_192;

/// Returns the messages of a snapshot, in order; only the last message has `last` set. If a chain is too long for one message, the next
/// message continues it: the rest is a chain whose parent is the last block of the previous message.
pub fn snapshot_chunks(instance_id: &str, snapshot: &Snapshot) -> Vec<v1::SnapshotChunk> {
    let empty = || v1::SnapshotChunk {
        instance_id: instance_id.to_owned(),
        at_event_id: snapshot.at_event_id,
        stored: Vec::new(),
        last: false,
    };
    let (mut chunks, mut capacity) = (vec![empty()], CHUNK_HASHES_MAX);
    for chain in &snapshot.stored {
        let (mut parent, mut rest) = (chain.parent, chain.sequence_hashes.as_slice());
        while !rest.is_empty() {
            if capacity == 0 {
                chunks.push(empty());
                capacity = CHUNK_HASHES_MAX;
            }
            let (now, later) = rest.split_at(rest.len().min(capacity));
            chunks.last_mut().expect("a snapshot has at least one chunk").stored.push(stored(parent, now));
            (parent, rest) = (now.last().copied(), later);
            capacity -= now.len();
        }
    }
    chunks.last_mut().expect("a snapshot has at least one chunk").last = true;
    chunks
}

/// Assembles the chunks of one snapshot.
#[derive(Debug)]
pub struct SnapshotAssembly {
    so_far: Option<(String, Snapshot)>,
    hashes: usize,
    hashes_max: usize,
}

impl SnapshotAssembly {
    /// Creates an empty assembly that accepts at most `hashes_max` blocks, which is the capacity that the worker reported.
    pub fn new(hashes_max: usize) -> Self {
        Self { so_far: None, hashes: 0, hashes_max }
    }

    /// Discards the chunks that were received so far.
    pub fn clear(&mut self) {
        self.so_far = None;
        self.hashes = 0;
    }

    /// Adds the next chunk. If the chunk is the last one, returns the snapshot and empties the assembly; otherwise returns `None`.
    ///
    /// # Errors
    /// Fails if the chunk belongs to another snapshot than the chunks before it, has a chain without blocks, or exceeds the accepted number of
    /// blocks.
    pub fn push(&mut self, chunk: v1::SnapshotChunk) -> Result<Option<Snapshot>, WireError> {
        let (instance_id, snapshot) = self
            .so_far
            .get_or_insert_with(|| (chunk.instance_id.clone(), Snapshot { at_event_id: chunk.at_event_id, stored: Vec::new() }));
        if *instance_id != chunk.instance_id || snapshot.at_event_id != chunk.at_event_id {
            return Err(WireError::MixedSnapshots);
        }
        for stored in chunk.stored {
            let chain = chain(stored)?;
            self.hashes += chain.sequence_hashes.len();
            if self.hashes > self.hashes_max {
                return Err(WireError::SnapshotTooLong { max: self.hashes_max });
            }
            snapshot.stored.push(chain);
        }
        if !chunk.last {
            return Ok(None);
        }
        self.hashes = 0;
        Ok(self.so_far.take().map(|(_, snapshot)| snapshot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};
    use tandem_kv::{SequenceHash, StoredChain};

    /// Returns every block with its parent. This form does not depend on how the snapshot is split into chains.
    fn blocks(snapshot: &Snapshot) -> Vec<(Option<SequenceHash>, SequenceHash)> {
        let mut blocks = Vec::new();
        for chain in &snapshot.stored {
            let mut parent = chain.parent;
            for hash in &chain.sequence_hashes {
                blocks.push((parent, *hash));
                parent = Some(*hash);
            }
        }
        blocks
    }

    fn snapshot() -> impl Strategy<Value = Snapshot> {
        let chain = (any::<Option<u64>>(), prop_oneof![1..5_usize, 1..3 * CHUNK_HASHES_MAX]);
        (any::<u64>(), vec(chain, 0..6)).prop_map(|(at_event_id, chains)| {
            let mut next = 0_u64;
            let mut hash = || {
                next += 1;
                SequenceHash(next)
            };
            let stored = chains
                .into_iter()
                .map(|(parent, len)| StoredChain {
                    parent: parent.map(SequenceHash),
                    sequence_hashes: (0..len).map(|_| hash()).collect(),
                })
                .collect();
            Snapshot { at_event_id, stored }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn snapshot_round_trips_in_bounded_chunks(snapshot in snapshot()) {
            let chunks = snapshot_chunks("i", &snapshot);
            let mut assembly = SnapshotAssembly::new(blocks(&snapshot).len());
            let count = chunks.len();
            for (position, chunk) in chunks.into_iter().enumerate() {
                prop_assert!(chunk.stored.iter().map(|stored| stored.sequence_hashes.len()).sum::<usize>() <= CHUNK_HASHES_MAX);
                let whole = assembly.push(chunk).expect("the chunks are in order");
                prop_assert_eq!(whole.is_some(), position + 1 == count);
                if let Some(whole) = whole {
                    prop_assert_eq!(whole.at_event_id, snapshot.at_event_id);
                    prop_assert_eq!(blocks(&whole), blocks(&snapshot));
                }
            }
        }
    }

    #[test]
    fn chunks_of_different_snapshots_are_not_assembled() {
        let chunk = |instance_id: &str, at_event_id, last| v1::SnapshotChunk {
            instance_id: instance_id.to_owned(),
            at_event_id,
            stored: vec![v1::Stored { parent: None, sequence_hashes: vec![1] }],
            last,
        };
        let mut assembly = SnapshotAssembly::new(2);
        for at_event_id in [5, 9] {
            assert_eq!(assembly.push(chunk("a", at_event_id, false)), Ok(None));
            let whole = assembly
                .push(chunk("a", at_event_id, true))
                .expect("the last chunk completes the snapshot")
                .expect("the last chunk completes the snapshot");
            assert_eq!((whole.at_event_id, whole.stored.len()), (at_event_id, 2));
        }
        for other in [chunk("b", 1, true), chunk("a", 2, true)] {
            let mut assembly = SnapshotAssembly::new(9);
            assert_eq!(assembly.push(chunk("a", 1, false)), Ok(None));
            assert_eq!(assembly.push(other), Err(WireError::MixedSnapshots));
        }
    }

    #[test]
    fn snapshot_longer_than_the_capacity_is_refused() {
        let hashes = (0..4).map(SequenceHash).collect();
        let snapshot = Snapshot { at_event_id: 1, stored: vec![StoredChain { parent: None, sequence_hashes: hashes }] };
        let chunk = snapshot_chunks("i", &snapshot).remove(0);
        assert_eq!(SnapshotAssembly::new(3).push(chunk), Err(WireError::SnapshotTooLong { max: 3 }));
    }
}
