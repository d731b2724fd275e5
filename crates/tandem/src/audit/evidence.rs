//! Reads the evidence of an audit from files, and the metrics of running processes.

use super::MetricSamples;
use crate::server::{HttpServer, ServerAddress};
use anyhow::ensure;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};
use tandem_worker::LedgerLine;

/// The evidence of an audit.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// The requests of clients, each with the usage that its client received.
    pub client: Vec<ClientLine>,
    /// The lines of all workers' ledgers.
    pub ledger: Vec<LedgerLine>,
    /// The metrics of all processes.
    pub metrics: MetricSamples,
    /// The workers that were killed, so that their last counters and ledger lines are lost.
    pub lost_workers: BTreeSet<String>,
    /// Whether a frontend was killed, so that its counters are missing in the sums.
    pub lost_frontend: bool,
}

/// One request of a client, with the usage that the client received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientLine {
    /// The response's `x-request-id`; absent if the connection was closed before the response began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The usage of a complete answer; absent if the answer is incomplete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<ReportedUsage>,
}

/// The usage of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReportedUsage {
    /// The number of prompts in the request.
    #[serde(default = "one")]
    pub prompts: usize,
    /// The answer's `usage.prompt_tokens`.
    pub prompt_tokens: u64,
    /// The answer's `usage.prompt_tokens_details.cached_tokens`.
    pub cached_tokens: u64,
    /// The answer's `tandem.cached_tokens_source`. An answer to several prompts names the least certain source of all prompts.
    #[serde(default)]
    pub source: CountSource,
}

fn one() -> usize {
    1
}

/// The source of an answer's number of cached tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CountSource {
    /// A worker has counted the tokens.
    #[default]
    Worker,
    /// The router has predicted the count.
    RouterEstimate,
    /// The source of the count is unknown.
    Unknown,
}

/// The reason why evidence cannot be read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum EvidenceError {
    #[error("{} cannot be read", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("{} line {line} is invalid", path.display())]
    Line { path: PathBuf, line: usize, source: serde_json::Error },
}

/// Reads all files. Client files and ledgers have one JSON object per line; metrics files have the text of `/metrics`.
///
/// # Errors
/// Fails if a file cannot be read, or if a line of it is invalid.
pub fn read(client: &[PathBuf], ledger: &[PathBuf], metrics: &[PathBuf]) -> Result<Evidence, EvidenceError> {
    let mut samples = MetricSamples::default();
    for path in metrics {
        samples.add(&text(path)?);
    }
    // A process that is killed while it writes leaves an incomplete last line. Such a line is skipped: it is lost, like the lines that the process
    // would have written afterwards.
    let half = serde_json::Error::is_eof;
    let (client, ledger) = (lines(client, |_| false)?, lines(ledger, half)?);
    Ok(Evidence { client, ledger, metrics: samples, ..Default::default() })
}

/// Returns the metrics that a process has now.
///
/// # Errors
/// No process answers at the address, or it has no metrics.
pub fn metrics_of(server: ServerAddress, ca: Option<&Path>) -> anyhow::Result<String> {
    const WANTED: &str = "`tandem audit check` reads /metrics of frontends, and of other processes at their --admin-listen";
    let server = HttpServer::trusting(server, ca)?;
    let reply = server.get("/metrics").map_err(|error| server.no_reply(error, WANTED))?;
    ensure!(
        reply.status == 200,
        "{} answers /metrics with HTTP status {}: {}; {WANTED}",
        server.address,
        reply.status,
        reply.body.trim()
    );
    Ok(reply.body)
}

fn text(path: &Path) -> Result<String, EvidenceError> {
    std::fs::read_to_string(path).map_err(|source| EvidenceError::Unreadable { path: path.to_owned(), source })
}

fn lines<T: DeserializeOwned>(paths: &[PathBuf], ignored: impl Fn(&serde_json::Error) -> bool) -> Result<Vec<T>, EvidenceError> {
    let mut all = Vec::new();
    for path in paths {
        for (number, line) in text(path)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            match serde_json::from_str(line) {
                Ok(parsed) => all.push(parsed),
                Err(error) if ignored(&error) => {}
                Err(source) => return Err(EvidenceError::Line { path: path.clone(), line: number + 1, source }),
            }
        }
    }
    Ok(all)
}
