//! Lines and values of JSON that processes of several versions exchange: members in etcd, ledgers, and the evidence and result of an audit.

use super::{Recording, messages::kept};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tandem::audit::{ClientLine, CountSource, ReportedUsage};
use tandem_frontend::AuditResult;
use tandem_process::discovery::{MemberRecord, Role};
use tandem_worker::{LedgerLine, Outcome};

/// Parses a value as the product does, and writes what it has read.
fn read<T: DeserializeOwned + Serialize>(value: &Value) -> serde_json::Result<Value> {
    serde_json::from_str::<T>(&value.to_string()).and_then(serde_json::to_value)
}

type Read = fn(&Value) -> serde_json::Result<Value>;

/// The kinds of lines with their readers, and whether the readers skip unknown fields. A client's line is written by hand, so a misspelt
/// field is an error.
const READERS: [(&str, Read, bool); 4] = [
    ("member in etcd", read::<MemberRecord>, true),
    ("ledger", read::<LedgerLine>, true),
    ("audit client", read::<ClientLine>, false),
    ("audit result", read::<AuditResult>, true),
];

/// Returns examples with all fields that this version writes.
fn examples() -> Vec<Recording> {
    let roles = [Role::Frontend, Role::Router, Role::PrefillWorker, Role::DecodeWorker];
    let members = roles.map(|role| ("member in etcd", json!(member(role))));
    let outcomes = [Outcome::Won, Outcome::Superseded, Outcome::Cancelled, Outcome::Failed];
    let ended = outcomes.map(|outcome| {
        ("ledger", json!(LedgerLine::Ended { request_id: "r-0".to_owned(), attempt: 2, worker: "d".to_owned(), outcome }))
    });
    let sources = [CountSource::Worker, CountSource::RouterEstimate, CountSource::Unknown];
    let clients = sources.map(|source| {
        let usage = ReportedUsage { prompts: 2, prompt_tokens: 20, cached_tokens: 16, source };
        ("audit client", json!(ClientLine { request_id: Some("r".to_owned()), usage: Some(usage) }))
    });
    let result = AuditResult { checked_unix_s: 5, findings: 4, answers: 3, estimates: 2, unverified: 1 };
    let all = members.into_iter().chain([("ledger", json!(scheduled()))]).chain(ended).chain(clients);
    all.chain([("audit result", json!(result))]).map(|(line, value)| Recording::Line { line: line.to_owned(), value }).collect()
}

fn member(role: Role) -> MemberRecord {
    MemberRecord {
        role,
        address: "h:1".to_owned(),
        instance_id: "i".to_owned(),
        version: "0.1.0".to_owned(),
        worker_id: "d".to_owned(),
        model: "m".to_owned(),
        revision: "r".to_owned(),
        block_size: 16,
        capacity_blocks: 1_024,
        context_length: 8_192,
        signature: vec![1, 2, 255],
    }
}

fn scheduled() -> LedgerLine {
    LedgerLine::Scheduled {
        request_id: "r-0".to_owned(),
        attempt: 2,
        worker: "p".to_owned(),
        prompt: 20,
        cached: Some(16),
        computed: Some(4),
        by_tier: [("device".to_owned(), 16)].into(),
        at: Some(5),
        model: "m".to_owned(),
        account: "a".to_owned(),
    }
}

/// Returns the recorded lines that this version reads in another way than the version that wrote them.
pub(super) fn differences(recorded: &[Recording]) -> Vec<String> {
    let lines = recorded.iter().filter_map(|recording| match recording {
        Recording::Line { line, value } => Some((line, value)),
        _ => None,
    });
    lines.filter_map(|(line, value)| difference(line, value).err()).collect()
}

fn difference(line: &str, value: &Value) -> Result<(), String> {
    let Some((_, read, skips_unknown)) = READERS.iter().find(|(kind, ..)| *kind == line) else {
        return Err(format!("no reader of {line}"));
    };
    let known = read(value).map_err(|error| format!("{line} {value} cannot be read: {error}"))?;
    kept(line, value, &known)?;
    let mut later = value.clone();
    later["added_later"] = json!([{"a": 1}]);
    match read(&later) {
        Ok(read) if *skips_unknown && read == known => Ok(()),
        Err(_) if !skips_unknown => Ok(()),
        read => Err(format!("a {line} with an unknown field is read as {read:?}")),
    }
}

/// Returns the examples that have a field, or a text that stands for a variant, which no recording of their kind has.
pub(super) fn missing(recorded: &[Recording]) -> Vec<Recording> {
    let parts = |recording: &Recording| {
        let mut parts = BTreeSet::new();
        if let Recording::Line { line, value } = recording {
            collect(line, value, &mut parts);
        }
        parts
    };
    let known: BTreeSet<String> = recorded.iter().flat_map(parts).collect();
    examples().into_iter().filter(|example| !parts(example).is_subset(&known)).collect()
}

fn collect(path: &str, value: &Value, parts: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| collect(&format!("{path} / {name}"), value, parts)),
        Value::String(text) => drop(parts.insert(format!("{path} = {text}"))),
        _ => drop(parts.insert(path.to_owned())),
    }
}

#[test]
fn missing_or_retyped_field_of_a_line_is_detected_and_added_field_needs_a_recording() {
    let recorded = examples();
    assert_eq!((differences(&recorded), missing(&recorded).len()), (vec![], 0));
    let ledger = |value: Value| differences(&[Recording::Line { line: "ledger".to_owned(), value }]);
    let ended = json!({"line": "ended", "request_id": "r-0", "attempt": 2, "worker": "d", "outcome": "won"});
    assert_eq!(ledger(ended.clone()), Vec::<String>::new());
    for (field, value) in [("outcome", json!("lost")), ("attempt", json!("2")), ("gone", json!(1)), ("line", json!("begun"))] {
        let mut other = ended.clone();
        other[field] = value;
        assert_eq!(ledger(other).len(), 1, "{field}");
    }
    let without = |field: &str| {
        let fewer = examples().into_iter().map(|recording| match recording {
            Recording::Line { line, mut value } => {
                value.as_object_mut().expect("a line is an object").remove(field);
                Recording::Line { line, value }
            }
            other => other,
        });
        missing(&fewer.collect::<Vec<_>>()).len()
    };
    assert_eq!((without("account"), without("outcome"), without("signature")), (1, 4, 4));
}
