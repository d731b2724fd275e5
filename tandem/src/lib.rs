//! The parts of the binary: its command line, the store of models, the whole cluster in one process, and the roles as processes of their own.

pub mod audit;
pub mod cli;
mod cluster;
pub mod explain;
mod http;
pub mod model;
pub mod ready;
mod secrets;
pub mod serve;
pub mod settings;
mod text_table;
#[cfg(feature = "top")]
pub mod top;

pub use cluster::{Cluster, Process, Served, StartError, Worker};
