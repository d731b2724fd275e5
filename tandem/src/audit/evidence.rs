//! What an audit looks at, and how it is read from files.

use super::Samples;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};
use tandem_worker::LedgerLine;

/// All there is.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// What clients asked and were told.
    pub client: Vec<ClientLine>,
    /// What workers wrote, all of them.
    pub ledger: Vec<LedgerLine>,
    /// What was counted.
    pub metrics: Samples,
    /// Workers that were killed: their last counters are unknown.
    pub lost_workers: BTreeSet<String>,
    /// Frontends were killed: what they had counted is missing in the sums.
    pub lost_frontend: bool,
}

/// One request as its client saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientLine {
    /// The response's `x-request-id`; absent when the client left, or the connection broke, before there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The whole answer's usage; absent without a whole answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told: Option<Told>,
}

impl ClientLine {
    pub(super) fn answer(&self) -> Option<&Told> {
        self.told.as_ref()
    }
}

/// What an answer's usage says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Told {
    /// Prompts in the request.
    #[serde(default = "one")]
    pub prompts: usize,
    /// `usage.prompt_tokens`
    pub prompt_tokens: u64,
    /// `usage.prompt_tokens_details.cached_tokens`
    pub cached_tokens: u64,
    /// `tandem.cached_tokens_source`; a fact unless it was marked otherwise, for one of its prompts or for all.
    #[serde(default)]
    pub source: Source,
}

fn one() -> usize {
    1
}

/// Where a number of cached tokens comes from, as answers name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A worker has counted it.
    #[default]
    Worker,
    /// The router has foreseen it.
    RouterEstimate,
    /// Nobody knows.
    Unknown,
}

/// Evidence that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum EvidenceError {
    /// Not there, or not ours to read.
    #[error("{} cannot be read: {cause}", path.display())]
    Unreadable {
        /// As it was given.
        path: PathBuf,
        /// Why.
        #[source]
        cause: std::io::Error,
    },
    /// Not what it should be.
    #[error("{} line {line} is not understood: {cause}", path.display())]
    Line {
        /// As it was given.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// Why.
        #[source]
        cause: serde_json::Error,
    },
}

/// Reads all files: of clients and ledgers a JSON object a line, of metrics what `/metrics` shows.
pub fn read(client: &[PathBuf], ledger: &[PathBuf], metrics: &[PathBuf]) -> Result<Evidence, EvidenceError> {
    let mut samples = Samples::default();
    for path in metrics {
        samples.add(&text(path)?);
    }
    // Who is killed while it writes leaves half a line; what it said is lost like the lines behind it.
    let half = serde_json::Error::is_eof;
    Ok(Evidence {
        client: lines(client, |_| false)?,
        ledger: lines(ledger, half)?,
        metrics: samples,
        lost_workers: BTreeSet::new(),
        lost_frontend: false,
    })
}

fn text(path: &Path) -> Result<String, EvidenceError> {
    std::fs::read_to_string(path).map_err(|cause| EvidenceError::Unreadable { path: path.to_owned(), cause })
}

fn lines<T: DeserializeOwned>(paths: &[PathBuf], ignored: impl Fn(&serde_json::Error) -> bool) -> Result<Vec<T>, EvidenceError> {
    let mut all = Vec::new();
    for path in paths {
        for (number, line) in text(path)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            match serde_json::from_str(line) {
                Ok(parsed) => all.push(parsed),
                Err(cause) if ignored(&cause) => {}
                Err(cause) => return Err(EvidenceError::Line { path: path.clone(), line: number + 1, cause }),
            }
        }
    }
    Ok(all)
}
