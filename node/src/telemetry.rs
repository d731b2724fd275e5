//! Logging to stderr, filtered by `TANDEM_LOG`, as text or with one JSON object per line.

use clap::ValueEnum;
use serde::Serialize;
use std::io::{IsTerminal, Write};
use tracing_subscriber::{EnvFilter, fmt};

const NATS: &str = "async_nats";

/// The format of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// A JSON object a line, with trace ids where a request is sampled
    Json,
}

/// Starts logging for the process. `filter` is in `tracing`'s syntax, such as `info` or `tandem_router=debug`.
///
/// # Errors
/// Fails if the filter cannot be parsed.
pub fn init(filter: &str, format: LogFormat) -> Result<(), InvalidFilter> {
    let mut filter = EnvFilter::try_new(filter)?;
    if !filter.to_string().contains(NATS) {
        // The NATS client would log every attempt to connect; Tandem logs the changes of the connection itself.
        filter = filter.add_directive(format!("{NATS}=off").parse()?);
    }
    // Lines that cannot be written are dropped. The subscriber would report them with `eprintln!`, which panics as it has the same stderr.
    let lines = fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
    match format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).init(),
    }
    Ok(())
}

/// Writes text for the operator to stdout or stderr. If the reader is gone or the disk is full, the text is dropped, because serving must not
/// depend on it.
pub fn tell(mut to: impl Write, text: &str) {
    let _ = to.write_all(text.as_bytes()).and_then(|()| to.flush());
}

/// The error of a log filter that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("the log filter (--log) is not valid: {0}; write a level (info) or directives (tandem_router=debug,info)")]
pub struct InvalidFilter(#[from] tracing_subscriber::filter::ParseError);
