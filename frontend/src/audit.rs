//! The result of the last `tandem audit check --result FILE`, for the dashboard and for alerts.

use crate::clock::unix_time;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File, Permissions},
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tandem_process::Metrics;

/// The maximum number of bytes read from a file. A result has less than 200 bytes.
const READ_MAX_BYTES: u64 = 64 << 10;
/// The maximum time that a request for the metrics or the dashboard waits for the file to be read.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// The result of one `tandem audit check`. Readers skip fields that they do not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditResult {
    /// The time at which the check ended, in seconds since 1970.
    pub checked_unix_s: u64,
    /// The number of discrepancies found.
    pub findings: u64,
    /// The number of checked answers.
    pub answers: u64,
    /// The number of checked answers whose cached tokens are estimates.
    pub estimates: u64,
    /// The number of checked answers whose ledger entries were lost because a worker was killed.
    pub unverified: u64,
}

/// The error of a result file that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be read: {cause}", path.display())]
pub struct AuditResultError {
    path: PathBuf,
    #[source]
    cause: io::Error,
}

impl AuditResult {
    /// Reads a file that [`AuditResult::write`] wrote.
    ///
    /// # Errors
    /// The file cannot be read, or is not a result.
    pub fn read(path: &Path) -> Result<Self, AuditResultError> {
        let malformed = |error: serde_json::Error| {
            let text = format!("the content is not a result of `tandem audit check --result` ({error})");
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        let read = beginning(path).and_then(|text| serde_json::from_slice(&text).map_err(malformed));
        read.map_err(|cause| AuditResultError { path: path.to_owned(), cause })
    }

    /// Replaces the file atomically: a reader sees the old or the new result.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Frontends of other users read the file, too.
        let mut new = tempfile::Builder::new().permissions(Permissions::from_mode(0o644)).tempfile_in(folder)?;
        new.write_all(&serde_json::to_vec(self)?)?;
        new.persist(path).map_err(|error| error.error)?;
        Ok(())
    }

    /// Returns this result with `checked_unix_s` set to the current time.
    pub fn now(self) -> Self {
        Self { checked_unix_s: unix_time().as_secs(), ..self }
    }
}

/// Reads the first [`READ_MAX_BYTES`] of a regular file. Other kinds of file are refused, because reading a pipe could block forever.
fn beginning(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut text = Vec::new();
    File::open(path)?.take(READ_MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// The result file of the last audit. It is read whenever the metrics or the dashboard are requested.
pub(crate) struct LastAudit {
    path: PathBuf,
    metrics: Metrics,
    /// Locked while the file is read. The lock is held even if the caller of [`LastAudit::read`] no longer waits for the result.
    reading: Arc<tokio::sync::Mutex<()>>,
    known: Arc<Mutex<KnownResult>>,
}

/// The outcome of the latest read; `None` before the first read.
type KnownResult = Option<Result<AuditResult, Arc<AuditResultError>>>;

impl LastAudit {
    /// Creates the value without reading the file. The metric of the last audit's time is 0 until a result is read, so that an alert fires
    /// if the file is missing.
    pub(crate) fn new(path: PathBuf, metrics: Metrics) -> Self {
        audited_at(&metrics).set(0.0);
        Self { path, metrics, reading: Arc::default(), known: Arc::default() }
    }

    /// Reads the file, updates the metrics and returns the result. One read runs at a time. If the read does not end within
    /// [`READ_TIMEOUT`], the last known result is returned.
    ///
    /// # Errors
    /// The last read failed because the file is unreadable or is not a result, or no read has ended yet.
    pub(crate) async fn read(&self) -> Result<AuditResult, Arc<AuditResultError>> {
        let read = async {
            let held = Arc::clone(&self.reading).lock_owned().await;
            let (path, metrics, known) = (self.path.clone(), self.metrics.clone(), Arc::clone(&self.known));
            let read = move || {
                note(AuditResult::read(&path), &metrics, &known);
                drop(held);
            };
            tokio::task::spawn_blocking(read).await.expect("the read returns its errors");
        };
        let _ = tokio::time::timeout(READ_TIMEOUT, read).await;
        let known = self.known.lock().clone();
        let slow = || AuditResultError { path: self.path.clone(), cause: io::ErrorKind::TimedOut.into() };
        known.unwrap_or_else(|| Err(Arc::new(slow())))
    }
}

/// Stores the outcome of a read, and updates the metrics. Logs a failure unless the previous read failed, too.
fn note(found: Result<AuditResult, AuditResultError>, metrics: &Metrics, known: &Mutex<KnownResult>) {
    let mut known = known.lock();
    match &found {
        Ok(found) => {
            audited_at(metrics).set(found.checked_unix_s as f64);
            let help = "Discrepancies that the last `tandem audit check` found.";
            metrics.gauge("tandem_frontend_audit_findings", help, &[]).set(found.findings as f64);
        }
        Err(error) if !matches!(*known, Some(Err(_))) => {
            tracing::warn!("the result of the last audit is not shown: {error}; check --audit-result");
        }
        Err(_) => {}
    }
    *known = Some(found.map_err(Arc::new));
}

fn audited_at(metrics: &Metrics) -> metrics::Gauge {
    let help = "The end of the last `tandem audit check`, in seconds since 1970; 0: no result was read yet.";
    metrics.gauge("tandem_frontend_audit_timestamp_seconds", help, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(path: &Path) -> (LastAudit, Metrics) {
        let metrics = Metrics::default();
        (LastAudit::new(path.to_owned(), metrics.clone()), metrics)
    }

    #[test]
    fn audit_result_that_is_a_folder_or_too_long_is_refused() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let kind = |path: &Path| AuditResult::read(path).expect_err("the audit result is refused").cause.kind();
        assert_eq!(kind(folder.path()), io::ErrorKind::InvalidInput);
        let file = folder.path().join("audit");
        AuditResult::default().write(&file).expect("the folder is writable");
        assert_eq!(AuditResult::read(&file).expect("the file has an audit result"), AuditResult::default());
        let text = [vec![b' '; READ_MAX_BYTES as usize], fs::read(&file).expect("the folder is writable")].concat();
        fs::write(&file, text).expect("the folder is writable");
        assert_eq!(kind(&file), io::ErrorKind::InvalidData);
    }

    #[tokio::test(start_paused = true)]
    async fn last_known_audit_result_is_used_while_a_read_hangs() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let file = folder.path().join("audit");
        let (audit, metrics) = last(&file);
        assert!(metrics.render().contains("tandem_frontend_audit_timestamp_seconds 0"));
        let old = AuditResult { checked_unix_s: 7, findings: 1, ..AuditResult::default() };
        old.write(&file).expect("the folder is writable");
        let hangs = Arc::clone(&audit.reading).lock_owned().await;
        assert_eq!(audit.read().await.expect_err("no audit result is known yet").cause.kind(), io::ErrorKind::TimedOut);
        drop(hangs);
        assert_eq!(audit.read().await.expect("the audit result is read"), old);
        let hangs = Arc::clone(&audit.reading).lock_owned().await;
        AuditResult { findings: 2, ..old }.write(&file).expect("the folder is writable");
        assert_eq!(audit.read().await.expect("an earlier audit result is known"), old);
        drop(hangs);
        assert_eq!(audit.read().await.expect("the audit result is read").findings, 2);
        assert!(metrics.render().contains("tandem_frontend_audit_timestamp_seconds 7"));
    }
}
