//! Logging to stderr, filtered by `TANDEM_LOG`, as text or with one JSON object per line.

use clap::ValueEnum;
use serde::Serialize;
use std::{
    io::{self, IsTerminal, Write, stderr},
    sync::{
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::Duration,
};
use tracing_subscriber::{EnvFilter, filter::LevelFilter, fmt};

const NATS: &str = "async_nats";

/// Maximum number of log lines that wait to be written.
const LINES_MAX: usize = 8_192;
/// The maximum time that an ending process waits for its last lines to be written.
const FLUSH_MAX: Duration = Duration::from_secs(1);

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

/// Starts logging for the process. `filter` is in `tracing`'s syntax, such as `info` or `tandem_router=debug`. A separate thread writes the
/// lines, so that a slow reader of the log cannot block the process. Dropping the returned value waits until the last lines are written.
///
/// # Errors
/// Fails if the filter cannot be parsed or has a word that is neither a level nor one of Tandem's crates, or if the system cannot start the
/// thread.
pub fn init(filter: &str, format: LogFormat) -> Result<Logging, LoggingError> {
    // `EnvFilter` takes such a word for the name of another crate, and would log nothing else.
    let is_plain = |word: &&str| word.chars().all(|char| char.is_ascii_alphanumeric() || matches!(char, '_' | '-' | ':'));
    let is_known = |word: &str| word.starts_with("tandem") || word.parse::<LevelFilter>().is_ok();
    if let Some(word) = filter.split(',').map(str::trim).filter(is_plain).find(|word| !is_known(word)) {
        return Err(LoggingError::Level(word.to_owned()));
    }
    let mut filter = EnvFilter::try_new(filter)?;
    if !filter.to_string().contains(NATS) {
        // The NATS client would log every attempt to connect; Tandem logs the changes of the connection itself.
        filter = filter.add_directive(format!("{NATS}=off").parse()?);
    }
    let (queue, lines) = sync_channel(LINES_MAX);
    std::thread::Builder::new().name("tandem-log".to_owned()).spawn(move || write(&lines)).map_err(LoggingError::Thread)?;
    let logging = Logging(queue.clone());
    let lines = fmt().with_env_filter(filter).with_writer(move || Lines(queue.clone())).log_internal_errors(false);
    match format {
        LogFormat::Text => lines.with_ansi(stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).init(),
    }
    Ok(logging)
}

/// A line of the log, or a request to report that all earlier lines are written.
enum LogLine {
    Text(Box<[u8]>),
    Flush(SyncSender<()>),
}

/// The running log. Dropping this value waits until the last lines are written, but at most one second.
#[must_use = "lines may be lost at the end of the process"]
pub struct Logging(SyncSender<LogLine>);

impl Drop for Logging {
    fn drop(&mut self) {
        let (done, wait) = sync_channel(1);
        // Does not wait if the queue is full, because then its lines cannot be written either.
        if self.0.try_send(LogLine::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(FLUSH_MAX);
        }
    }
}

fn write(lines: &Receiver<LogLine>) {
    for line in lines {
        match line {
            // The text is dropped if it cannot be written. `eprintln!` would panic in this case.
            LogLine::Text(text) => count_lost(stderr().write_all(&text)),
            LogLine::Flush(done) => drop(done.send(())),
        }
    }
}

/// Writes a text for the operator to stdout or stderr. If the reader has closed the pipe or the disk is full, the text is dropped and
/// [counted](lost), because serving must not depend on it.
pub fn tell(mut to: impl Write, text: &str) {
    count_lost(to.write_all(text.as_bytes()).and_then(|()| to.flush()));
}

/// Number of log lines and other texts of this process that could not be written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Returns the number of log lines and other texts for the operator that could not be written since the process started.
pub fn lost() -> u64 {
    LOST.load(Relaxed)
}

fn count_lost<E>(written: Result<(), E>) {
    if written.is_err() {
        LOST.fetch_add(1, Relaxed);
    }
}

/// Queues each log line, or drops and counts it.
struct Lines(SyncSender<LogLine>);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        count_lost(self.0.try_send(LogLine::Text(line.into())));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The reason why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    /// The log filter cannot be parsed.
    #[error("the log filter (--log) is not valid: {0}; write a level (info) or directives (tandem_router=debug,info)")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// The log filter has a word that is not a level.
    #[error(
        "the log filter (--log) is not valid: {0} is not off, error, warn, info, debug or trace{hint}",
        hint = if .0.as_str() == "json" { "; for lines in JSON, set --log-format json" } else { "" }
    )]
    Level(String),
    /// The system cannot start the thread that writes lines.
    #[error("the system cannot start a thread: {0}")]
    Thread(io::Error),
}
