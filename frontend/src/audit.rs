//! What `tandem audit check --result FILE` found when it last ran: the file, for the page and for an alert.

use crate::metrics::FrontendMetrics;
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// One check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditResult {
    /// When it ended, in seconds since 1970.
    pub checked_unix_s: u64,
    /// Things that do not reconcile.
    pub findings: u64,
    /// Answers that were looked at.
    pub answers: u64,
    /// Of them, those whose cached tokens are estimates.
    pub estimates: u64,
    /// Of them, those of which only killed workers knew.
    pub unverified: u64,
}

/// There is no such file, or something else is in it.
#[derive(Debug, thiserror::Error)]
pub enum AuditResultError {
    /// Not there, or not ours to read.
    #[error("{} cannot be read: {cause}", path.display())]
    Unreadable {
        /// As it was given.
        path: PathBuf,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// Another file.
    #[error("{} is not what `tandem audit check --result` writes: {cause}", path.display())]
    Other {
        /// As it was given.
        path: PathBuf,
        /// Why.
        #[source]
        cause: serde_json::Error,
    },
}

impl AuditResult {
    /// Reads what [`AuditResult::write`] wrote.
    pub fn read(path: &Path) -> Result<Self, AuditResultError> {
        let text = fs::read(path).map_err(|cause| AuditResultError::Unreadable { path: path.to_owned(), cause })?;
        serde_json::from_slice(&text).map_err(|cause| AuditResultError::Other { path: path.to_owned(), cause })
    }

    /// Replaces the file; who reads it meanwhile reads the one or the other, whole.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        fs::write(&part, serde_json::to_vec(self)?)?;
        fs::rename(&part, path)
    }

    /// The same, ended now.
    pub fn now(self) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { checked_unix_s: now, ..self }
    }
}

/// The file as this process looks at it: when it is asked for its metrics, or for the page.
pub(crate) struct LastAudit(pub(crate) PathBuf);

impl LastAudit {
    /// Reads it, and keeps its gauges.
    pub(crate) async fn look(&self, metrics: &FrontendMetrics) -> Result<AuditResult, AuditResultError> {
        let path = self.0.clone();
        // The disk may be slow.
        let found = tokio::task::spawn_blocking(move || AuditResult::read(&path)).await.expect("reading returns its errors");
        if let Ok(found) = &found {
            metrics.audited(found);
        }
        found
    }
}
