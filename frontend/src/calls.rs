//! API calls: the key of each call, and its line in the audit log.

use crate::{clock::timestamp, keys::Key, metrics::CLIENT_CLOSED, prefix::Uncached};
use ::metrics::Counter;
use axum::http::StatusCode;
use parking_lot::Mutex;
use serde::Serialize;
use std::{collections::HashMap, convert::Infallible, net::IpAddr, sync::Arc, time::Duration};
use tandem_api::answer::Usage;
use tandem_process::{Metrics, line_file::LineFile, listen::ClientNetwork};
use tokio::time::{Instant, sleep};

/// The maximum length of a path in the audit log, in bytes. Only `/v1/models/ID` can be longer.
const PATH_MAX: usize = 256;

/// The interval at which the lines of calls without a valid key are written.
const SUMMED_UP: Duration = Duration::from_secs(1);
/// The maximum number of addresses that have their own line in an interval. All other addresses share one line.
const PEERS_MAX: usize = 1024;

/// The audit log: a line for each API call. Calls without a valid key have one line for each address and second, because no known client is
/// responsible for them. Cheap to clone.
#[derive(Clone)]
pub(crate) struct CallLog(Arc<Log>);

struct Log {
    file: LineFile,
    lost: Counter,
    /// The lines of this second's calls without a valid key, by address. The key `None` stands for further and unknown addresses.
    refused: Mutex<HashMap<Option<ClientNetwork>, Line>>,
}

/// A call of the API. The default has no key and is not recorded.
#[derive(Default)]
pub(crate) struct Call {
    pub(crate) key: Option<Arc<Key>>,
    /// `None`: there is no audit log.
    record: Option<CallRecord>,
}

/// The line that the audit log will have for a call. Dropping this value writes the line.
struct CallRecord {
    log: CallLog,
    peer: Option<ClientNetwork>,
    since: Instant,
    line: Mutex<Line>,
}

/// A line of the audit log. It has neither text nor tokens of prompts and answers.
#[derive(Default, Serialize)]
struct Line {
    at: String,
    request_id: String,
    /// The id that the client gave to the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    client_request_id: Option<String>,
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
    /// The prompt tokens that were not cached, by cause; absent if it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    uncached: Option<Uncached>,
    duration_ms: f64,
    /// The address of calls without a valid key; `None`: the call has a key, or its address has no line of its own.
    address: Option<IpAddr>,
    /// The number of calls that the line stands for. The other fields are those of the first one.
    count: u64,
}

/// The head of a call.
#[derive(Clone)]
pub(crate) struct CallHead<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) client_request_id: Option<Arc<str>>,
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    pub(crate) peer: Option<ClientNetwork>,
}

impl CallLog {
    pub(crate) fn new(file: LineFile, metrics: &Metrics) -> Self {
        let help = "Lines of the audit log that were lost: the disk was too slow or refused them.";
        let lost = metrics.counter("tandem_frontend_audit_log_lost_total", help, &[]);
        lost.increment(0);
        Self(Arc::new(Log { file, lost, refused: Mutex::default() }))
    }

    /// Writes the lines of calls without a valid key once a second, for ever.
    pub(crate) async fn sum_up(self) -> Infallible {
        loop {
            sleep(SUMMED_UP).await;
            self.0.write_refused();
        }
    }
}

impl Log {
    fn refuse(&self, peer: Option<ClientNetwork>, line: Line) {
        let mut refused = self.refused.lock();
        let peer = peer.filter(|peer| refused.len() < PEERS_MAX || refused.contains_key(&Some(*peer)));
        let sum = refused.entry(peer).or_insert(Line { address: peer.map(|ClientNetwork(address)| address), count: 0, ..line });
        sum.count += 1;
    }

    fn write_refused(&self) {
        let refused = std::mem::take(&mut *self.refused.lock());
        refused.values().for_each(|line| self.file.append(line, &self.lost));
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.write_refused();
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
                client_request_id: head.client_request_id.map(|id| (*id).to_owned()),
                key: key.as_ref().map(|key| key.entry.name.clone()),
                account: key.as_ref().map(|key| key.entry.account().to_owned()),
                method: head.method.to_owned(),
                path: path[..path.floor_char_boundary(PATH_MAX.min(path.len()))].to_owned(),
                status: CLIENT_CLOSED,
                count: 1,
                ..Line::default()
            };
            CallRecord { log: log.clone(), peer: head.peer, since: Instant::now(), line: Mutex::new(line) }
        });
        Self { key, record }
    }

    /// Records the account that a proxy has set.
    pub(crate) fn set_account(&self, account: &str) {
        self.set(|line| line.account = (!account.is_empty()).then(|| account.to_owned()));
    }

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

    /// Records the usage of an answer, complete or not, and why tokens of its prompts were not cached.
    pub(crate) fn used(&self, usage: &Usage, uncached: Option<Uncached>) {
        self.set(|line| {
            line.uncached = uncached;
            line.prompt_tokens = Some(usage.prompt_tokens);
            line.cached_tokens = usage.prompt_tokens_details.cached_tokens;
            line.completion_tokens = Some(usage.completion_tokens);
        });
    }

    /// Records the token counts that another server has reported. How many tokens it had cached is not known.
    pub(crate) fn passed(&self, prompt_tokens: Option<u32>, completion_tokens: Option<u32>) {
        self.set(|line| (line.prompt_tokens, line.completion_tokens) = (prompt_tokens, completion_tokens));
    }

    fn set(&self, change: impl FnOnce(&mut Line)) {
        if let Some(record) = &self.record {
            change(&mut record.line.lock());
        }
    }
}

impl Drop for CallRecord {
    fn drop(&mut self) {
        let line = self.line.get_mut();
        line.duration_ms = (self.since.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        let CallLog(log) = &self.log;
        if line.status == StatusCode::UNAUTHORIZED {
            log.refuse(self.peer, std::mem::take(line));
        } else {
            log.file.append(line, &log.lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::io::{self, Write};
    use tandem_proto::{Causes, v1::PrefixFacts};

    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<Vec<u8>>>);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Runs `story` with a new log. Returns the lines that the log has written.
    async fn lines(story: impl AsyncFnOnce(&CallLog)) -> Vec<Value> {
        let disk = Disk::default();
        let file = LineFile::write_to(disk.clone(), "audit log").expect("the system can start a thread");
        let log = CallLog::new(file, &Metrics::default());
        tokio::select! {
            () = story(&log) => {}
            never = log.clone().sum_up() => match never {},
        }
        // Waits until the lines are written.
        drop(log);
        let text = disk.0.lock().clone();
        serde_json::Deserializer::from_slice(&text).into_iter().map(|line| line.expect("a line is JSON")).collect()
    }

    /// Programs of operators read the lines of all versions: fields may be added here, but none may change (docs/versions.md).
    #[test]
    fn fields_of_the_audit_log_keep_their_names_and_types() {
        let line = Line {
            at: "2026-11-28T10:00:00.000Z".to_owned(),
            request_id: "r".to_owned(),
            client_request_id: Some("c".to_owned()),
            key: Some("k".to_owned()),
            account: Some("a".to_owned()),
            method: "POST".to_owned(),
            path: "/v1/completions".to_owned(),
            model: Some("m".to_owned()),
            status: 200,
            prompt_tokens: Some(20),
            cached_tokens: Some(16),
            completion_tokens: Some(5),
            uncached: Some(Uncached(Causes::of(&PrefixFacts { reusable_blocks: 1, ..Default::default() }, 20, 16, 0))),
            duration_ms: 1.5,
            address: Some(IpAddr::from([10, 0, 0, 1])),
            count: 1,
        };
        let expected = r#"{"at":"2026-11-28T10:00:00.000Z","request_id":"r","client_request_id":"c","key":"k","account":"a","method":"POST","path":"/v1/completions","model":"m","status":200,"prompt_tokens":20,"cached_tokens":16,"completion_tokens":5,"uncached":{"new_text":16,"below_block":4},"duration_ms":1.5,"address":"10.0.0.1","count":1}"#;
        assert_eq!(serde_json::to_string(&line).expect("a line can be serialized"), expected);
    }

    fn call(log: &CallLog, peer: u32, status: StatusCode) {
        let peer = Some(ClientNetwork::from(IpAddr::from(peer.to_be_bytes())));
        let head = CallHead { request_id: "r", client_request_id: None, method: "GET", path: "/v1/models", peer };
        Call::begin(None, Some(log), head).answered(status);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_without_a_key_have_one_line_for_each_address_and_second() {
        let mut found = lines(async |log| {
            for count in [500, 7] {
                (0..count).for_each(|_| call(log, 0x0a00_0001, StatusCode::UNAUTHORIZED));
                call(log, 0x0a00_0002, StatusCode::UNAUTHORIZED);
                sleep(Duration::from_millis(1500)).await;
            }
            (0..3).for_each(|_| call(log, 0x0a00_0001, StatusCode::NOT_FOUND));
        })
        .await;
        let of = |line: &Value| (line["status"].clone(), line["address"].clone(), line["count"].clone());
        found.sort_by_key(|line| of(line).2.as_u64());
        let found: Vec<_> = found.iter().map(|line| serde_json::json!([of(line).0, of(line).1, of(line).2])).collect();
        assert_eq!(
            serde_json::json!(found[found.len() - 2..]),
            serde_json::json!([[401, "10.0.0.1", 7], [401, "10.0.0.1", 500]])
        );
        let alone = |status: u16| found.iter().filter(|line| line[0] == status && line[2] == 1).count();
        assert_eq!((found.len(), alone(401), alone(404)), (7, 2, 3), "{found:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn calls_from_many_addresses_without_a_key_are_summed_up_in_a_bounded_table() {
        let calls = PEERS_MAX as u64 + 500;
        let found = lines(async |log| (0..calls as u32).for_each(|peer| call(log, peer, StatusCode::UNAUTHORIZED))).await;
        assert_eq!(found.len(), PEERS_MAX + 1);
        assert_eq!(found.iter().map(|line| line["count"].as_u64().expect("each line has a count")).sum::<u64>(), calls);
        let others = found.iter().find(|line| line["address"].is_null()).expect("further addresses have one line");
        assert_eq!(others["count"], 500);
    }
}
