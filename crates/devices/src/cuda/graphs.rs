//! CUDA graphs of decode steps: a step's hundreds of kernel launches are captured once, and then replayed by one call.
//!
//! All steps of a bucket have the same launch parameters (geometry, counts, addresses). The parameters follow from the bucket and from the
//! addresses of the lists that are uploaded for each step. Steps of a bucket differ only in the contents of these lists. So a graph is
//! looked up by its bucket, and all graphs are discarded when the lists are moved.

use super::{
    CudaError,
    device::Device,
    plan::{Batch, padded_rows},
    sampling::SampleInputs,
};
use std::collections::HashMap;

/// The maximum number of cached graphs, which is more than the number of buckets in a mixed load. A graph has a few hundred launches, each of
/// which takes some kilobytes in the driver.
const GRAPHS_MAX: usize = 256;

/// The number of steps between a failed capture and the next attempt. It doubles with every consecutive failure.
const PAUSE_MIN: u64 = 64;
/// The maximum number of doublings. The pause is then about an hour of steps.
const PAUSE_DOUBLINGS: u32 = 12;

/// The key of a graph: the numbers of rows and partitions to which a step is padded, and the number of alternative tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bucket {
    pub rows: usize,
    pub partitions: usize,
    /// The number of alternative tokens for which a row can return logprobs.
    pub top_max: usize,
    /// Whether the step samples. If a row has a constraint, the tokens are sampled after the step, because masks are uploaded in between.
    pub samples: bool,
}

/// One engine's LRU cache of graphs.
pub(super) struct Graphs<D: Device> {
    rows_max: usize,
    partitions_max: usize,
    /// The addresses of the uploaded lists and of the results, which the cached graphs contain.
    addresses: [u64; 2],
    entries: HashMap<Bucket, Entry<D>>,
    /// The number of steps so far. `Entry::used` counts in these steps.
    steps: u64,
    /// The number of captures that have failed.
    refused: u64,
    /// The number of captures that have failed since the last successful one.
    refused_in_a_row: u32,
    /// No graph is captured before this step. Until then, buckets without a graph are launched kernel by kernel.
    capture_from: u64,
}

struct Entry<D: Device> {
    /// The graph; `None` after the bucket's first step. The first step is launched directly, so that initialisation at the first use of a
    /// kernel is complete before a step is captured.
    graph: Option<D::Graph>,
    /// The number of the step in which this entry was last used.
    used: u64,
}

impl<D: Device> Graphs<D> {
    /// Creates an empty cache for an engine whose buffers hold this many rows and partitions.
    pub fn new(rows_max: usize, partitions_max: usize) -> Self {
        let (addresses, entries) = ([0; 2], HashMap::new());
        Self { rows_max, partitions_max, addresses, entries, steps: 0, refused: 0, refused_in_a_row: 0, capture_from: 0 }
    }

    /// Returns the number of captures that have failed.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    fn padded(&self, bucket: Bucket) -> Bucket {
        let partitions = bucket.partitions.next_power_of_two().min(self.partitions_max);
        Bucket { rows: padded_rows(bucket.rows).min(self.rows_max), partitions, ..bucket }
    }

    /// Returns the buckets of all decode steps without logprobs and masks. A step of `rows` rows has at least `rows` and at most
    /// `most_partitions(rows)` partitions.
    pub fn buckets(&self, most_partitions: impl Fn(usize) -> usize) -> Vec<Bucket> {
        let mut buckets = Vec::new();
        for rows in 1..=self.rows_max {
            for partitions in rows..=most_partitions(rows) {
                let bucket = self.padded(Bucket { rows, partitions, top_max: 0, samples: true });
                if !buckets.contains(&bucket) {
                    buckets.push(bucket);
                }
            }
        }
        buckets
    }

    /// Returns the bucket of a decode step; `None` for other steps. A step is a decode step if a token is sampled from each of its rows,
    /// because then every chunk is a single token.
    pub fn bucket(&self, batch: &Batch, sampling: &SampleInputs) -> Option<Bucket> {
        let (rows, partitions) = (batch.rows(), batch.partitions.len());
        let bucket = Bucket { rows, partitions, top_max: sampling.top_max(), samples: sampling.constrained.is_empty() };
        (batch.sampled_rows.len() == rows && rows <= self.rows_max).then(|| self.padded(bucket))
    }

    /// Executes the step that `work` launches. The caller must have padded the step to the size `bucket`. The step reads its lists and
    /// writes its results at `addresses`. A bucket's first step is launched directly. The second one is captured, and its graph is replayed
    /// from then on. If a capture fails, `work` is called again, and must give the right result. The next capture is tried some steps
    /// later, because the reason, such as a lack of memory, may be temporary.
    pub fn run(
        &mut self,
        device: &D,
        bucket: Bucket,
        addresses: [u64; 2],
        work: impl Fn() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
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
        if used < self.capture_from {
            return work();
        }
        match device.capture(&work).and_then(|graph| device.replay(&graph).map(|()| graph)) {
            Ok(graph) => {
                entry.graph = Some(graph);
                self.refused_in_a_row = 0;
                Ok(())
            }
            // If the capture failed because the device is lost, `work` fails as well and returns that error.
            Err(error) => {
                let pause = PAUSE_MIN << self.refused_in_a_row.min(PAUSE_DOUBLINGS);
                tracing::warn!(%error, steps = pause, "cannot capture a CUDA graph; decode steps without a graph are launched kernel by kernel, which is slower for small batches; the next capture is tried after this many steps");
                self.refused += 1;
                self.refused_in_a_row += 1;
                self.capture_from = used + pause;
                work()
            }
        }
    }

    /// Evicts the least recently used graph if the cache is full.
    fn evict_least_recently_used(&mut self) {
        if self.entries.len() >= GRAPHS_MAX
            && let Some(oldest) = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(bucket, _)| *bucket)
        {
            self.entries.remove(&oldest);
        }
    }
}
