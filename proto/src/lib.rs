//! The wire between Tandem's processes.

/// The messages and services of package `tandem.v1`.
#[allow(missing_docs, rustdoc::all, clippy::all)]
pub mod v1 {
    tonic::include_proto!("tandem.v1");
}
