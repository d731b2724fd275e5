//! What `tandem audit check --result FILE` found when it last ran: the file, for the page and for an alert.

use crate::metrics::FrontendMetrics;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// What is longer is not what was written; the file takes a hundred or two.
const READ_MAX_BYTES: u64 = 64 << 10;
/// A disk that takes longer holds up no scrape.
const WAIT: Duration = Duration::from_secs(1);

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
    /// Its disk takes too long.
    #[error("{} is still being read", path.display())]
    Slow {
        /// As it was given.
        path: PathBuf,
    },
}

impl AuditResult {
    /// Reads what [`AuditResult::write`] wrote.
    pub fn read(path: &Path) -> Result<Self, AuditResultError> {
        let text = beginning(path).map_err(|cause| AuditResultError::Unreadable { path: path.to_owned(), cause })?;
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

/// At most [`READ_MAX_BYTES`] of a file. A pipe would never end, or never begin.
fn beginning(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut text = Vec::new();
    File::open(path)?.take(READ_MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// The file as this process looks at it: when it is asked for its metrics, or for the page.
pub(crate) struct LastAudit {
    path: PathBuf,
    metrics: Arc<FrontendMetrics>,
    /// Held while the file is read, also when nobody waits for it any more.
    reading: Arc<tokio::sync::Mutex<()>>,
    known: Arc<Mutex<Known>>,
}

/// What the latest reading found; `None`: none has ended.
type Known = Option<Result<AuditResult, Arc<AuditResultError>>>;

impl LastAudit {
    /// Reads nothing yet. Its time stands at 0 until something is read, so that an alert sees a file that never is.
    pub(crate) fn new(path: PathBuf, metrics: Arc<FrontendMetrics>) -> Self {
        metrics.audit_awaited();
        Self { path, metrics, reading: Arc::default(), known: Arc::default() }
    }

    /// Reads it, and keeps its gauges. One reads at a time; who has waited for [`WAIT`] is told what was known before.
    pub(crate) async fn look(&self) -> Result<AuditResult, Arc<AuditResultError>> {
        let read = async {
            let held = Arc::clone(&self.reading).lock_owned().await;
            let (path, metrics, known) = (self.path.clone(), Arc::clone(&self.metrics), Arc::clone(&self.known));
            let read = move || {
                note(AuditResult::read(&path), &metrics, &known);
                drop(held);
            };
            // The disk may be slow.
            tokio::task::spawn_blocking(read).await.expect("reading returns its errors");
        };
        // Late or not: what is known now.
        let _ = tokio::time::timeout(WAIT, read).await;
        let known = self.known.lock().clone();
        known.unwrap_or_else(|| Err(Arc::new(AuditResultError::Slow { path: self.path.clone() })))
    }
}

/// Keeps what was read. Of failures in a row the first is for the log.
fn note(found: Result<AuditResult, AuditResultError>, metrics: &FrontendMetrics, known: &Mutex<Known>) {
    let mut known = known.lock();
    match &found {
        Ok(found) => metrics.audited(found),
        Err(error) if !matches!(*known, Some(Err(_))) => {
            tracing::warn!("the last audit is not known: {error}; see --audit-result");
        }
        Err(_) => {}
    }
    *known = Some(found.map_err(Arc::new));
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_node::Metrics;

    fn last(path: &Path) -> (LastAudit, Metrics) {
        let metrics = Metrics::default();
        (LastAudit::new(path.to_owned(), Arc::new(FrontendMetrics::new(&metrics, "m"))), metrics)
    }

    #[test]
    fn what_is_no_file_or_too_long_is_not_read() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(matches!(AuditResult::read(folder.path()), Err(AuditResultError::Unreadable { .. })));
        let file = folder.path().join("audit");
        AuditResult::default().write(&file).expect("ours");
        assert_eq!(AuditResult::read(&file).expect("it was written"), AuditResult::default());
        let text = [vec![b' '; READ_MAX_BYTES as usize], fs::read(&file).expect("ours")].concat();
        fs::write(&file, text).expect("ours");
        assert!(matches!(AuditResult::read(&file), Err(AuditResultError::Other { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn while_a_reading_hangs_no_other_begins_and_what_was_known_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("audit");
        let (audit, metrics) = last(&file);
        assert!(metrics.render().contains("tandem_frontend_audit_timestamp_seconds 0"));
        let old = AuditResult { checked_unix_s: 7, findings: 1, ..AuditResult::default() };
        old.write(&file).expect("ours");
        let hangs = Arc::clone(&audit.reading).lock_owned().await;
        assert!(matches!(&*audit.look().await.expect_err("nothing is known"), AuditResultError::Slow { .. }));
        drop(hangs);
        assert_eq!(audit.look().await.expect("it is read"), old);
        let hangs = Arc::clone(&audit.reading).lock_owned().await;
        AuditResult { findings: 2, ..old }.write(&file).expect("ours");
        assert_eq!(audit.look().await.expect("it was read"), old);
        drop(hangs);
        assert_eq!(audit.look().await.expect("it is read").findings, 2);
        assert!(metrics.render().contains("tandem_frontend_audit_timestamp_seconds 7"));
    }
}
