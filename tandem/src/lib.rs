//! The binary's parts: its command line, where models come from, the whole cluster in one process, and its roles as processes.

mod cluster;
pub mod model;
pub mod serve;
pub mod settings;

pub use cluster::{Cluster, Process, Role, StartError, Worker};
