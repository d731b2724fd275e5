//! Logs: to stderr, filtered by `TANDEM_LOG`.

use std::io::IsTerminal;
use tracing_subscriber::{EnvFilter, fmt};

/// Starts logging for the process. `filter` is in `tracing`'s syntax, such as `info` or `tandem_router=debug`.
pub fn init(filter: &str) -> Result<(), InvalidFilter> {
    let filter = EnvFilter::try_new(filter)?;
    fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal()).init();
    Ok(())
}

/// The log filter cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the log filter is not valid: {0}; write a level (info) or directives (tandem_router=debug,info)")]
pub struct InvalidFilter(#[from] tracing_subscriber::filter::ParseError);
