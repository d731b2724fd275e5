//! What every Tandem process has: metrics, logs, identity and an orderly end.

pub mod admin;
pub mod discovery;
pub mod events;
pub mod metrics;
pub mod retry;
mod secret;
mod shutdown;
pub mod telemetry;
pub mod trace;

pub use metrics::Metrics;
pub use retry::Tries;
pub use secret::Secret;
pub use shutdown::Shutdown;

/// A new `instance_id`: one run of a process.
pub fn new_instance_id() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}
