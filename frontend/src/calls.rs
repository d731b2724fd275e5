//! Calls of the API: the key with which a client makes one, and the line that the audit log has for it.

use crate::{clock::timestamp, keys::Key, metrics::CLIENT_CLOSED, usage::Usage};
use ::metrics::Counter;
use axum::http::StatusCode;
use parking_lot::Mutex;
use serde::Serialize;
use std::sync::Arc;
use tandem_node::{Metrics, line_file::LineFile};
use tokio::time::Instant;

/// The maximum length of a path in the audit log, in bytes. Only `/v1/models/ID` can be longer.
const PATH_MAX: usize = 256;

/// The audit log: a line for each call of the API. Cheap to clone.
#[derive(Clone)]
pub(crate) struct CallLog {
    file: LineFile,
    lost: Counter,
}

/// A call of the API. The default has no key and is not recorded.
#[derive(Default)]
pub(crate) struct Call {
    pub(crate) key: Option<Arc<Key>>,
    /// `None`: there is no audit log.
    record: Option<Record>,
}

/// What the audit log will have about a call. Dropping this value writes the line.
struct Record {
    log: CallLog,
    since: Instant,
    line: Mutex<Line>,
}

/// A line of the audit log. It has neither text nor tokens of prompts and answers.
#[derive(Serialize)]
struct Line {
    at: String,
    request_id: String,
    /// The key's name; `None`: the call has no valid key, or the frontend has no keys.
    key: Option<String>,
    /// `None`: the call has no account.
    account: Option<String>,
    method: String,
    path: String,
    /// The id of the served model that the request names.
    model: Option<String>,
    status: u16,
    /// The counts that the client received; `None`: the call has no answer of a model.
    prompt_tokens: Option<u32>,
    cached_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    duration_ms: f64,
}

/// The head of a call.
#[derive(Clone, Copy)]
pub(crate) struct CallHead<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
}

impl CallLog {
    pub(crate) fn new(file: LineFile, metrics: &Metrics) -> Self {
        let help = "Lines of the audit log that were lost: the disk was too slow or refused them.";
        let lost = metrics.counter("tandem_frontend_audit_log_lost_total", help, &[]);
        lost.increment(0);
        Self { file, lost }
    }
}

impl Call {
    /// Begins a call. With a log, the line is written when the returned value is dropped.
    pub(crate) fn begin(key: Option<Arc<Key>>, log: Option<&CallLog>, head: CallHead<'_>) -> Self {
        let record = log.map(|log| {
            let path = head.path;
            let line = Line {
                at: timestamp(),
                request_id: head.request_id.to_owned(),
                key: key.as_ref().map(|key| key.entry.name.clone()),
                account: key.as_ref().map(|key| key.entry.account().to_owned()),
                method: head.method.to_owned(),
                path: path[..path.floor_char_boundary(PATH_MAX.min(path.len()))].to_owned(),
                model: None,
                status: CLIENT_CLOSED,
                prompt_tokens: None,
                cached_tokens: None,
                completion_tokens: None,
                duration_ms: 0.0,
            };
            Record { log: log.clone(), since: Instant::now(), line: Mutex::new(line) }
        });
        Self { key, record }
    }

    /// Records the account that a proxy has set.
    pub(crate) fn set_account(&self, account: &str) {
        self.set(|line| line.account = (!account.is_empty()).then(|| account.to_owned()));
    }

    /// Records the served model that the request names.
    pub(crate) fn set_model(&self, model: &str) {
        self.set(|line| line.model = Some(model.to_owned()));
    }

    /// Records the status of the reply. Until then, or after [`Call::cancelled`], the client counts as disconnected.
    pub(crate) fn answered(&self, status: StatusCode) {
        self.set(|line| line.status = status.as_u16());
    }

    /// Records that the client has disconnected.
    pub(crate) fn cancelled(&self) {
        self.set(|line| line.status = CLIENT_CLOSED);
    }

    /// Records the usage of an answer, complete or not.
    pub(crate) fn used(&self, usage: &Usage) {
        self.set(|line| {
            line.prompt_tokens = Some(usage.prompt_tokens);
            line.cached_tokens = usage.prompt_tokens_details.cached_tokens;
            line.completion_tokens = Some(usage.completion_tokens);
        });
    }

    fn set(&self, change: impl FnOnce(&mut Line)) {
        if let Some(record) = &self.record {
            change(&mut record.line.lock());
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let line = self.line.get_mut();
        line.duration_ms = (self.since.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        self.log.file.append(line, &self.log.lost);
    }
}
