//! The ledger: a line of JSON for each prompt whose prefill begins on a worker (with its cached tokens), and one for the outcome of each
//! attempt.
//!
//! The worker that counted the cached tokens writes the line `scheduled`. The decode worker that owns the attempt writes the line `ended`,
//! because only this worker knows whether a first token was generated. Each line is written immediately, so a worker that is killed has
//! written what it had counted. `docs/adr/007-ledger.md` describes how the lines are read together.
//!
//! No request waits for the disk, and lost lines are counted ([`LineFile`]).

use ::metrics::Counter;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use tandem_engine::CachedTokens;
use tandem_kv::Tier;
use tandem_process::{Metrics, line_file::LineFile};

/// The name of the ledger file in logs.
const NAME: &str = "ledger";

/// The outcome of one attempt to answer a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The attempt generated the request's first token. Its number of cached tokens counts for the request.
    Won,
    /// The attempt resumed the output of an earlier attempt. The number of cached tokens of that earlier attempt counts for the request.
    Superseded,
    /// The client cancelled the attempt before its first token.
    Cancelled,
    /// The attempt failed before its first token, and reported the reason.
    Failed,
}

/// A line of the ledger. Readers skip fields that they do not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "snake_case")]
pub enum LedgerLine {
    /// A line that is written when a prompt's prefill begins.
    Scheduled {
        /// The frontend's request id, a dash, and the prompt's position in the request.
        request_id: String,
        /// The attempt's number, from 1.
        attempt: u32,
        /// The id of the worker that counted the cached tokens.
        worker: String,
        /// The number of tokens in the prompt.
        prompt: u32,
        /// The number of prompt tokens found in the prefix cache; absent if the worker's engine does not report it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cached: Option<u32>,
        /// Tokens that the worker computes: `prompt − cached`; absent if `cached` is absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        computed: Option<u32>,
        /// Prompt tokens found in the prefix cache, by the tier that held them.
        by_tier: BTreeMap<String, u32>,
        /// The time of this record, in seconds since 1970; absent in lines of older workers.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<u64>,
        /// The id of the model that the request names.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        model: String,
        /// The account of the request, if it has one.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        account: String,
    },
    /// A line that is written when the outcome of an attempt is known.
    Ended {
        /// The request id, as in the line `scheduled`.
        request_id: String,
        /// The number of the attempt, as in the line `scheduled`.
        attempt: u32,
        /// The id of the decode worker that owned the attempt.
        worker: String,
        /// The outcome of the attempt.
        outcome: Outcome,
    },
}

/// The ledger of a process. It is cheap to clone. The default ledger writes nothing.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Option<LineFile>);

impl Ledger {
    /// Opens the ledger in this file, and appends to it, as [`LineFile::open`] does.
    ///
    /// # Errors
    /// Fails if the file cannot be opened, or if another process has it open as its ledger.
    pub fn open(path: &Path) -> io::Result<Self> {
        LineFile::open(path, NAME).map(|file| Self(Some(file)))
    }

    #[cfg(test)]
    fn write_to(to: impl io::Write + Send + 'static) -> io::Result<Self> {
        LineFile::write_to(to, NAME).map(|file| Self(Some(file)))
    }

    /// Returns a handle that writes the lines of the worker `worker_id`.
    pub fn of(&self, worker_id: &str, metrics: &Metrics) -> WorkerLedger {
        let help = "Lines of the ledger that were lost: the disk was too slow or refused them.";
        let lost = metrics.counter("tandem_worker_ledger_lost_total", help, &[("worker", worker_id)]);
        WorkerLedger { ledger: self.clone(), worker: worker_id.into(), lost }
    }
}

/// Returns the cached tokens by tier. The tier `device` is always present, and another only if tokens were found in it. The result is empty if the
/// count is unknown.
pub(crate) fn by_tier(cached: Option<CachedTokens>) -> BTreeMap<String, u32> {
    let tiers = cached.into_iter().flat_map(|CachedTokens(tokens)| Tier::ALL.into_iter().zip(tokens));
    let found = tiers.filter(|(tier, tokens)| *tier == Tier::Device || *tokens > 0);
    found.map(|(tier, tokens)| (tier.name().to_owned(), tokens)).collect()
}

/// A ledger for the lines of one worker. It is cheap to clone.
#[derive(Clone)]
pub struct WorkerLedger {
    ledger: Ledger,
    worker: Arc<str>,
    lost: Counter,
}

/// The data of a `scheduled` line: a prompt whose prefill begins.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScheduledPrompt<'a> {
    /// The prompt's request id.
    pub request_id: &'a str,
    /// The attempt's number, from 1.
    pub attempt: u32,
    /// The id of the model that the request names.
    pub model: &'a str,
    /// The account of the request; empty if it has none.
    pub account: &'a str,
    /// The number of tokens in the prompt.
    pub prompt: u32,
    /// The prompt tokens found in the prefix cache; `None` if the engine does not report them.
    pub cached: Option<CachedTokens>,
}

impl WorkerLedger {
    /// Records that a prompt's prefill begins now, on this worker.
    pub(crate) fn scheduled(&self, begun: ScheduledPrompt<'_>) {
        let ScheduledPrompt { request_id, attempt, model, account, prompt, cached } = begun;
        self.append(|worker| LedgerLine::Scheduled {
            request_id: request_id.to_owned(),
            attempt,
            worker,
            prompt,
            cached: cached.map(CachedTokens::total),
            computed: cached.map(|cached| prompt.saturating_sub(cached.total())),
            by_tier: by_tier(cached),
            at: SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs()),
            model: model.to_owned(),
            account: account.to_owned(),
        });
    }

    /// Opens the entry of an attempt that this worker owns. Dropping the entry records `Cancelled` if no other outcome was recorded.
    /// `resumes` is true if the attempt continues the output of an earlier one.
    pub fn attempt(&self, request_id: &str, attempt: u32, resumes: bool) -> LedgerEntry {
        let open = (request_id.to_owned(), attempt, if resumes { Outcome::Superseded } else { Outcome::Won });
        LedgerEntry { ledger: self.clone(), open: Mutex::new(Some(open)) }
    }

    fn append(&self, line: impl FnOnce(String) -> LedgerLine) {
        if let Some(file) = &self.ledger.0 {
            file.append(&line((*self.worker).to_owned()), &self.lost);
        }
    }
}

/// The ledger's entry of one attempt. Only its first outcome is recorded.
pub struct LedgerEntry {
    ledger: WorkerLedger,
    open: Mutex<Option<(String, u32, Outcome)>>,
}

impl LedgerEntry {
    /// Records that the attempt's first token was sent to the frontend. The outcome is `Superseded` if the attempt resumes an earlier one, otherwise
    /// `Won`.
    pub fn began(&self) {
        self.settle(None);
    }

    /// Records that the attempt failed.
    pub fn failed(&self) {
        self.settle(Some(Outcome::Failed));
    }

    fn settle(&self, outcome: Option<Outcome>) {
        let open = self.open.lock().take();
        let Some((request_id, attempt, begun)) = open else { return };
        let outcome = outcome.unwrap_or(begun);
        self.ledger.append(|worker| LedgerLine::Ended { request_id, attempt, worker, outcome });
    }
}

impl Drop for LedgerEntry {
    fn drop(&mut self) {
        self.settle(Some(Outcome::Cancelled));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, os::unix::fs::PermissionsExt};
    use tandem_process::line_file::LINES_MAX;

    const PROMPT: ScheduledPrompt<'_> =
        ScheduledPrompt { request_id: "a", attempt: 1, model: "m", account: "", prompt: 1, cached: Some(CachedTokens([0; 4])) };

    /// A fake disk, whose writes wait while a test holds the lock of `text`.
    #[derive(Clone, Default)]
    struct Disk {
        text: Arc<Mutex<Vec<u8>>>,
        refuses: bool,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.refuses {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.text.lock().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lost(metrics: &Metrics) -> u64 {
        let text = metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix("tandem_worker_ledger_lost_total{worker=\"p0\"} "));
        line.and_then(|value| value.parse().ok()).expect("the counter is registered")
    }

    fn outcomes(disk: &Disk) -> Vec<Outcome> {
        let text = String::from_utf8(disk.text.lock().clone()).expect("the ledger is UTF-8");
        let lines = text.lines().map(|line| serde_json::from_str(line).expect("the ledger line is valid"));
        lines.filter_map(|line| if let LedgerLine::Ended { outcome, .. } = line { Some(outcome) } else { None }).collect()
    }

    #[test]
    fn each_attempt_has_one_outcome_and_all_ledger_lines_are_written_when_the_ledger_is_dropped() {
        let (disk, metrics) = (Disk::default(), Metrics::default());
        let ledger = Ledger::write_to(disk.clone()).expect("the system can start a thread");
        let worker = ledger.of("p0", &metrics);
        worker.scheduled(ScheduledPrompt {
            request_id: "a \"name\"\n",
            attempt: 1,
            model: "m",
            account: "acme",
            prompt: 100,
            cached: Some(CachedTokens::on_device(96)),
        });
        let won = worker.attempt("a", 1, false);
        won.began();
        won.failed();
        worker.attempt("a", 2, true).began();
        worker.attempt("a", 3, false).failed();
        drop(worker.attempt("a", 4, true));
        drop((won, worker, ledger));
        assert_eq!(outcomes(&disk), [Outcome::Won, Outcome::Superseded, Outcome::Failed, Outcome::Cancelled]);
        let text = String::from_utf8(disk.text.lock().clone()).expect("the ledger is UTF-8");
        let first = text.lines().next().expect("the ledger has a line");
        let (before, after) = first.split_once(",\"at\":").expect("the line has a time");
        let expected = r#"{"line":"scheduled","request_id":"a \"name\"\n","attempt":1,"worker":"p0","prompt":100,"cached":96,"computed":4,"by_tier":{"device":96}"#;
        assert_eq!(before, expected);
        assert!(after.ends_with(r#","model":"m","account":"acme"}"#), "{first}");
        let LedgerLine::Scheduled { at, model, account, .. } =
            serde_json::from_str(&(expected.to_owned() + "}")).expect("the ledger line is valid")
        else {
            panic!("the line is not a Scheduled line");
        };
        assert_eq!((at, model.as_str(), account.as_str()), (None, "", ""));
        assert_eq!(lost(&metrics), 0);
    }

    #[test]
    fn lost_ledger_lines_are_counted() {
        let (disk, metrics) = (Disk::default(), Metrics::default());
        let held = disk.text.lock();
        let ledger = Ledger::write_to(disk.clone()).expect("the system can start a thread");
        let worker = ledger.of("p0", &metrics);
        // While the disk is blocked, the writing thread may have taken up to `LINES_MAX` + 1 lines from the queue.
        for _ in 0..=2 * LINES_MAX + 1 {
            worker.scheduled(PROMPT);
        }
        let dropped = lost(&metrics);
        assert!(dropped >= 1 && dropped <= LINES_MAX as u64 + 2, "{dropped}");
        drop(held);
        drop((worker, ledger));
        let lines = disk.text.lock().iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(lines as u64 + dropped, 2 * LINES_MAX as u64 + 2);

        let ledger = Ledger::write_to(Disk { refuses: true, ..Disk::default() }).expect("the system can start a thread");
        ledger.of("p0", &metrics).scheduled(PROMPT);
        drop(ledger);
        assert_eq!(lost(&metrics), dropped + 1);
    }

    #[test]
    fn ledger_file_that_another_process_writes_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
        let ledger = Ledger::open(file.path()).expect("the ledger can be opened");
        let refused = Ledger::open(file.path()).expect_err("a ledger that has a writer is refused");
        assert!(refused.to_string().contains("a file of its own"), "{refused}");
        drop(ledger);
        Ledger::open(file.path()).expect("the ledger has no writer any more");
    }

    #[test]
    fn incomplete_line_in_a_ledger_file_does_not_damage_the_next_line() {
        let file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
        let mut expected = String::new();
        for before in ["", "{\"line\":\"sched"] {
            let mut end = std::fs::OpenOptions::new().append(true).open(file.path()).expect("the temporary file is writable");
            end.write_all(before.as_bytes()).expect("the temporary file is writable");
            let ledger = Ledger::open(file.path()).expect("the ledger can be opened");
            ledger.of("p0", &Metrics::default()).scheduled(PROMPT);
            drop(ledger);
            expected += if before.is_empty() { "whole\n" } else { "half\nwhole\n" };
            let text = std::fs::read_to_string(file.path()).expect("the file is UTF-8");
            let lines =
                text.lines().map(|line| if serde_json::from_str::<LedgerLine>(line).is_ok() { "whole\n" } else { "half\n" });
            assert_eq!(lines.collect::<String>(), expected, "{text}");
        }
    }

    #[test]
    fn default_ledger_writes_no_lines_and_reports_none_as_lost() {
        let metrics = Metrics::default();
        let worker = Ledger::default().of("p0", &metrics);
        worker.scheduled(PROMPT);
        worker.attempt("a", 1, false).began();
        assert_eq!(lost(&metrics), 0);
    }

    #[test]
    fn new_ledger_file_is_private_and_wider_permissions_cause_a_warning() {
        #[derive(Clone, Default)]
        struct Log(Arc<Mutex<Vec<u8>>>);
        impl Write for Log {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().extend(bytes);
                Ok(bytes.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let mode = |path: &Path| std::fs::metadata(path).expect("the file exists").permissions().mode() & 0o777;
        let opened = |path: &Path| {
            let log = Log::default();
            let writer = log.clone();
            let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
            tracing::subscriber::with_default(subscriber, || drop(Ledger::open(path).expect("the ledger can be opened")));
            String::from_utf8(log.0.lock().clone()).expect("the log is UTF-8")
        };
        let made = folder.path().join("made");
        assert_eq!((opened(&made), mode(&made)), (String::new(), 0o600));
        assert_eq!(opened(&made), "");

        let wide = folder.path().join("wide");
        std::fs::write(&wide, "").expect("the folder is writable");
        std::fs::set_permissions(&wide, PermissionsExt::from_mode(0o640)).expect("the test owns the file");
        let log = opened(&wide);
        assert!(log.contains("WARN") && log.contains("640") && log.contains("chmod 600"), "{log}");
        assert_eq!(mode(&wide), 0o640, "an existing file keeps its permissions");
    }
}
