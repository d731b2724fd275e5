//! The binary's parts: its command line, where models come from, and the whole cluster in one process.

pub mod audit;
mod cluster;
pub mod explain;
pub mod model;
pub mod settings;
pub mod up;

pub use cluster::{Cluster, Role, StartError, Worker};
