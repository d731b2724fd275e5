//! Steps in which sequences go on by a token each, recorded once and replayed: a driver takes hundreds of launches as one.
//!
//! Between two such steps of one bucket only the uploaded lists differ. What launches them names (geometry, counts, addresses) follows from the
//! bucket and from where the lists are: a recording is found by its bucket, and all are forgotten when the lists move.

use super::{CudaError, device::Device, plan::Batch, plan::padded_rows};
use std::collections::HashMap;

/// Recordings that are kept: more than there are kinds of steps in a mixed load. One has a few hundred launches, and each of them takes a driver some
/// kilobytes.
const GRAPHS_MAX: usize = 256;

/// What a step is padded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bucket {
    pub rows: usize,
    pub parts: usize,
    /// Alternatives that a row may want.
    pub top_max: usize,
}

/// One engine's recordings.
pub(super) struct Graphs<D: Device> {
    rows_max: usize,
    parts_max: usize,
    /// Where the lists and results are that recordings name.
    places: [u64; 2],
    kept: HashMap<Bucket, Kept<D>>,
    /// Steps so far: the time that `Kept` counts in.
    steps: u64,
    /// The device has refused a recording.
    refused: bool,
}

struct Kept<D: Device> {
    /// `None`: a step of this kind was run once. So all is there that the device makes at a first time.
    graph: Option<D::Graph>,
    used: u64,
}

impl<D: Device> Graphs<D> {
    /// For steps of so many rows and parts at most; there is memory for them.
    pub fn new(rows_max: usize, parts_max: usize) -> Self {
        Self { rows_max, parts_max, places: [0; 2], kept: HashMap::new(), steps: 0, refused: false }
    }

    /// Of a step whose rows are all drawn, and so single tokens; `None` for others.
    pub fn bucket(&self, batch: &Batch, top_max: usize) -> Option<Bucket> {
        let rows = batch.rows();
        let bucket = || Bucket {
            rows: padded_rows(rows).min(self.rows_max),
            parts: batch.parts.len().next_power_of_two().min(self.parts_max),
            top_max,
        };
        (batch.drawn.len() == rows && rows <= self.rows_max).then(bucket)
    }

    /// Does the work of a step that was padded to this bucket, with its lists and results at these addresses. It may be asked for twice, and must
    /// not mind what was begun of it before.
    pub fn run(
        &mut self,
        device: &D,
        bucket: Bucket,
        places: [u64; 2],
        work: impl Fn() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if self.refused {
            return work();
        }
        if self.places != places {
            self.kept.clear();
            self.places = places;
        }
        self.steps += 1;
        let used = self.steps;
        let Some(kept) = self.kept.get_mut(&bucket) else {
            self.make_room();
            self.kept.insert(bucket, Kept { graph: None, used });
            return work();
        };
        kept.used = used;
        if let Some(graph) = &kept.graph {
            return device.replay(graph);
        }
        match device.record(&work).and_then(|graph| device.replay(&graph).map(|()| graph)) {
            Ok(graph) => {
                kept.graph = Some(graph);
                Ok(())
            }
            // If the device is lost, the work says so, too.
            Err(error) => {
                tracing::warn!(%error, "steps are not recorded, so those of few sequences take longer");
                self.refused = true;
                self.kept.clear();
                work()
            }
        }
    }

    /// Forgets the kind of step that has not come for the longest time.
    fn make_room(&mut self) {
        if self.kept.len() >= GRAPHS_MAX
            && let Some(oldest) = self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(bucket, _)| *bucket)
        {
            self.kept.remove(&oldest);
        }
    }
}
