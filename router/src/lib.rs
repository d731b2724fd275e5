//! Where should this run? Hashes and loads in, placements out; never text or token ids.

mod index;

pub use index::{PrefixIndex, Skipped, WorkerSlot};
