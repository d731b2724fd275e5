//! The wire between Tandem's processes: its messages, their checked conversions to `kv`'s types, and how connections are made.

mod error;
mod event;
mod identity;
mod key;
pub mod link;
mod load;
mod reason;
mod scheduled;
mod snapshot;
mod ticket;

pub use error::WireError;
pub use event::{event_batch, split_batch};
pub use identity::Difference;
pub use key::{ClusterKey, Purpose, SECRET_BYTES_MIN, TooShort};
pub use snapshot::{CHUNK_HASHES_MAX, SnapshotAssembly, snapshot_chunks};

/// The messages and services of package `tandem.v1`.
#[allow(missing_docs, rustdoc::all, clippy::all)]
pub mod v1 {
    tonic::include_proto!("tandem.v1");
}
