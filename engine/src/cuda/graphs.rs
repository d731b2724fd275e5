//! Steps in which sequences go on by a token each, recorded once and replayed: a driver takes hundreds of launches as one.
//!
//! Between two such steps of one bucket only the uploaded lists differ. What launches them names (geometry, counts, addresses) follows from the
//! bucket and from where the lists are: a recording is found by its bucket, and all are forgotten when the lists move.

use super::{CudaError, device::Device, plan::Batch, plan::padded_rows};
use std::collections::HashMap;

/// Recordings that are entry: more than there are kinds of steps in a mixed load. One has a few hundred launches, and each of them takes a driver some
/// kilobytes.
const GRAPHS_MAX: usize = 256;

/// What a step is padded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bucket {
    pub rows: usize,
    pub partitions: usize,
    /// Alternatives that a row may want.
    pub top_max: usize,
}

/// One engine's recordings.
pub(super) struct Graphs<D: Device> {
    rows_max: usize,
    partitions_max: usize,
    /// Where the lists and results are that recordings name.
    addresses: [u64; 2],
    entries: HashMap<Bucket, Entry<D>>,
    /// Steps so far: the time that `Entry` counts in.
    steps: u64,
    /// The device has disabled a recording.
    disabled: bool,
}

struct Entry<D: Device> {
    /// `None`: a step of this kind was run once. So all is there that the device makes at a first time.
    graph: Option<D::Graph>,
    used: u64,
}

impl<D: Device> Graphs<D> {
    /// For steps of so many rows and partitions at most; there is memory for them.
    pub fn new(rows_max: usize, partitions_max: usize) -> Self {
        Self { rows_max, partitions_max, addresses: [0; 2], entries: HashMap::new(), steps: 0, disabled: false }
    }

    /// Of a step whose rows are all drawn, and so single tokens; `None` for others.
    pub fn bucket(&self, batch: &Batch, top_max: usize) -> Option<Bucket> {
        let rows = batch.rows();
        let bucket = || Bucket {
            rows: padded_rows(rows).min(self.rows_max),
            partitions: batch.partitions.len().next_power_of_two().min(self.partitions_max),
            top_max,
        };
        (batch.sampled_rows.len() == rows && rows <= self.rows_max).then(bucket)
    }

    /// Does the work of a step that was padded to this bucket, with its lists and results at these addresses. It may be asked for twice, and must
    /// not mind what was begun of it before.
    pub fn run(
        &mut self,
        device: &D,
        bucket: Bucket,
        addresses: [u64; 2],
        work: impl Fn() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if self.disabled {
            return work();
        }
        if self.addresses != addresses {
            self.entries.clear();
            self.addresses = addresses;
        }
        self.steps += 1;
        let used = self.steps;
        let Some(entry) = self.entries.get_mut(&bucket) else {
            self.evict_least_recently_used();
            self.entries.insert(bucket, Entry { graph: None, used });
            return work();
        };
        entry.used = used;
        if let Some(graph) = &entry.graph {
            return device.replay(graph);
        }
        match device.capture(&work).and_then(|graph| device.replay(&graph).map(|()| graph)) {
            Ok(graph) => {
                entry.graph = Some(graph);
                Ok(())
            }
            // If the device is lost, the work says so, too.
            Err(error) => {
                tracing::warn!(%error, "steps are not recorded, so those of few sequences take longer");
                self.disabled = true;
                self.entries.clear();
                work()
            }
        }
    }

    /// Forgets the kind of step that has not come for the longest time.
    fn evict_least_recently_used(&mut self) {
        if self.entries.len() >= GRAPHS_MAX
            && let Some(oldest) = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(bucket, _)| *bucket)
        {
            self.entries.remove(&oldest);
        }
    }
}
