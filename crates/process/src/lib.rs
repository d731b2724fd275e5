//! The modules that every Tandem process uses: metrics, logs, traces, HTTP listeners, the admin endpoint, discovery, KV events over NATS,
//! files of lines, files that are polled, futures that are polled only when woken, and shutdown.

pub mod admin;
pub mod cluster_tls;
mod counts;
pub mod discovery;
pub mod events;
pub mod line_file;
pub mod listen;
mod log_limit;
pub mod metrics;
pub mod retry;
mod secret;
mod shutdown;
pub mod starting;
pub mod telemetry;
pub mod trace;
pub mod watched_file;
mod woken;

pub use counts::Counts;
pub use log_limit::{LogLimit, on_refused};
pub use metrics::Metrics;
pub use retry::Backoff;
pub use secret::{Secret, read_secret_file};
pub use shutdown::{Shutdown, supervise};
pub use woken::Woken;

/// Returns a new `instance_id`, which identifies one run of a process.
pub fn new_instance_id() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}
