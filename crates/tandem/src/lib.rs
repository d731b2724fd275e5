//! The library of the binary `tandem`: its command line, a whole cluster in one process, and each role as a process.

pub mod audit;
#[cfg(feature = "load")]
pub mod bench;
pub mod cert;
#[cfg(feature = "chat")]
pub mod chat;
pub mod cli;
mod cluster;
pub mod explain;
mod files;
mod http;
pub mod key;
#[cfg(feature = "model")]
mod model;
pub mod ready;
mod router_connection;
mod run;
mod running;
mod secrets;
pub mod serve;
pub mod server;
pub mod settings;
#[cfg(any(feature = "chat", feature = "top"))]
mod terminal;
mod text_table;
#[cfg(feature = "top")]
pub mod top;
pub mod why;
pub mod workers;

pub use cluster::{Cluster, Process, ServedProcess, StartError, Worker};
pub use run::{print_error, run};
