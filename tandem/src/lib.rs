//! The binary's parts: its command line, where models come from, the whole cluster in one process, and its roles as processes.

pub mod audit;
mod cluster;
pub mod explain;
mod http;
pub mod model;
pub mod ready;
pub mod serve;
pub mod settings;
pub mod top;

pub use cluster::{Cluster, Process, Role, StartError, Worker};
