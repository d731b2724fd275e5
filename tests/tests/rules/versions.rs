//! Versions may mix: what this version writes and reads is compared with the recordings of earlier versions in tests/data/wire
//! (docs/versions.md).
//!
//! `TANDEM_RECORD=1` records what has no recording yet, in a new file. It never changes a recording, because processes of that version run.

mod lines;
mod messages;

use messages::{compiled, differences, hex, kept, missing, shown, unhex};
use prost::{DecodeError, Message};
use protox::prost_reflect::{DescriptorPool, DynamicMessage};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{collections::BTreeMap, fmt::Write as _, fs, path::PathBuf};
use tandem_proto::v1;
use tandem_tests::workspace::{files, root, text};

const ADVICE: &str =
    "record it with TANDEM_RECORD=1 cargo test -p tandem-tests --release --test rules versions, and commit the new file";

/// One line of a file in tests/data/wire.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Recording {
    /// A message in hexadecimal digits, and its fields by number, name and type.
    Message {
        message: String,
        bytes: String,
        fields: Value,
    },
    Enum {
        #[serde(rename = "enum")]
        name: String,
        values: Value,
    },
    Service {
        service: String,
        methods: Value,
    },
    /// A line or value of JSON.
    Line {
        line: String,
        value: Value,
    },
}

fn folder() -> PathBuf {
    root().join("tests/data/wire")
}

fn recorded() -> Vec<Recording> {
    let mut paths = files(&folder());
    paths.sort();
    let lines = paths.iter().flat_map(|path| text(path).lines().map(str::to_owned).collect::<Vec<_>>());
    lines.map(|line| serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in {line}"))).collect()
}

fn descriptors() -> DescriptorPool {
    let folder = root().join("proto");
    let relative = |path: PathBuf| path.strip_prefix(&folder).expect("the file is in the folder").display().to_string();
    let names: Vec<String> = files(&folder.join("tandem")).into_iter().map(relative).collect();
    assert!(names.len() >= 3, "the .proto files were not found: {names:?}");
    compiled(&folder, &names)
}

#[test]
fn every_recording_of_earlier_versions_is_still_understood_and_nothing_lacks_a_recording() {
    let (pool, recorded) = (descriptors(), recorded());
    let mut wrong = differences(&pool, &recorded);
    wrong.extend(lines::differences(&recorded));
    assert!(wrong.is_empty(), "other versions send and expect what was recorded (docs/versions.md):\n{}", wrong.join("\n"));
    let mut new = missing(&pool, &recorded);
    new.extend(lines::missing(&recorded));
    if new.is_empty() {
        return;
    }
    let text = new.iter().fold(String::new(), |mut text, recording| {
        writeln!(text, "{}", serde_json::to_string(recording).expect("a recording can be serialized"))
            .expect("a string takes text");
        text
    });
    assert!(std::env::var("TANDEM_RECORD").is_ok_and(|value| value == "1"), "nothing recorded for this; {ADVICE}:\n{text}");
    let path = (1..).map(|number| folder().join(format!("{number:04}.jsonl"))).find(|path| !path.exists());
    fs::write(path.expect("numbers do not end"), text).expect("the folder is writable");
}

type Decode = fn(&[u8]) -> Result<Vec<u8>, DecodeError>;

/// Decodes the bytes as the product does, and encodes what it has read.
fn decoded<M: Message + Default>(bytes: &[u8]) -> Result<Vec<u8>, DecodeError> {
    M::decode(bytes).map(|message| message.encode_to_vec())
}

macro_rules! decoders {
    ($($name:ident,)*) => { BTreeMap::from([$((concat!("tandem.v1.", stringify!($name)), decoded::<v1::$name> as Decode)),*]) };
}

/// The types with which the product decodes messages.
fn decoders() -> BTreeMap<&'static str, Decode> {
    #[rustfmt::skip]
    let mut all = decoders![
    AnswerFinished, AttemptFailed, BadWord, BookedLoad, BookedRequest, BookingChange, BookingChanges, BookingState, BookingsReply,
    BookingsRequest, CacheTotals, Candidate, Cleared, Constraint, Cost, DecodeStarted, DescribeRequest, Draining, EqualPrompt,
    ExistingPlacement, ExplainReply, ExplainRequest, ExplainedWorker, Failure, FinishReply, FinishRequest, Finished, GenerateReply,
    GenerateRequest, Identity, Image, KnownPrefix, KvEvent, KvEventBatch, KvHandle, KvPulled, KvRoom, Load, Loras, ModelView, NcclControlReply, NcclControlRequest,
    Placement, PlacementTotals, PrefixFacts, PrefillChunk, PrefillDone, PrefillFinished, PrefillReply, PrefillRequest, PrefillStart,
    PrefillTimeline, Priority, PromptLogprobs, PushReply, PushRequest, ReadyBlocks, Removed, ResumedSample, RoutePrompt, RouteReply,
    RouteRequest, Sampling, Scheduled, SnapshotChunk, SnapshotRequest, StepTotals, Stored, Submitted, Ticket, Token, TokenLogprob,
    TierView, TokenSequence, Tokens, TransferCapabilities, UnavailableWorker, Waiting, WatchReply, WatchRequest, WorkerInfo, WorkerRef,
    WorkerView, WorkersReply, WorkersRequest, EngineEndpoint, WantedEndpoints, WantedWorkers, DrainRequest, DrainReply,
    ];
    all.insert("tandem.v1.Constraint.CallInput", decoded::<v1::constraint::CallInput>);
    all.insert("tandem.v1.Constraint.Choices", decoded::<v1::constraint::Choices>);
    all.insert("tandem.v1.Constraint.InputPlace", decoded::<v1::constraint::InputPlace>);
    all
}

#[test]
fn the_product_reads_every_recorded_message_and_skips_fields_of_later_versions() {
    /// Field 1,000 as a text of two bytes, and field 1,001 as the number 7.
    const UNKNOWN: [u8; 8] = [0xc2, 0x3e, 0x02, 0xff, 0xff, 0xc8, 0x3e, 7];
    let (pool, decoders) = (descriptors(), decoders());
    for message in pool.all_messages().filter(|message| !message.is_map_entry()) {
        assert!(decoders.contains_key(message.full_name()), "add {} to `decoders`", message.full_name());
    }
    let mut read = 0;
    for recording in recorded() {
        let Recording::Message { message, bytes, fields } = recording else { continue };
        let descriptor = pool.get_message_by_name(&message).unwrap_or_else(|| panic!("{message} is missing"));
        let later = [unhex(&bytes), UNKNOWN.to_vec()].concat();
        for bytes in [unhex(&bytes), later] {
            let kept_bytes = decoders[&*message](&bytes).unwrap_or_else(|error| panic!("{message}: {error}"));
            let read = DynamicMessage::decode(descriptor.clone(), &*kept_bytes).expect("what was encoded can be decoded");
            kept(&message, &fields, &shown(&read)).expect("the product reads every recorded field");
        }
        read += 1;
    }
    assert!(read >= decoders.len(), "{read} messages are recorded");
}

/// Compiles one version of a protocol.
fn version(source: &str) -> DescriptorPool {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    fs::write(folder.path().join("p.proto"), format!("syntax = \"proto3\"; package p; {source}"))
        .expect("the folder is writable");
    compiled(folder.path(), &["p.proto".to_owned()])
}

#[test]
fn changed_field_is_detected_and_added_field_needs_a_recording() {
    const FIRST: &str = "message A { uint32 a = 1; optional string b = 2; oneof c { B d = 3; bytes e = 4; } repeated E f = 5; map<uint32, float> g = 6; }
        message B {} enum E { NONE = 0; ONE = 1; } service S { rpc Call(A) returns (stream B); }";
    let recorded = missing(&version(FIRST), &[]);
    assert_eq!(recorded.len(), 5, "two variants of A, and one recording of B, E and S each: {recorded:?}");
    let changed = |from: &str, to: &str| {
        assert!(FIRST.contains(from), "{from}");
        let pool = version(&FIRST.replace(from, to));
        (differences(&pool, &recorded).len(), missing(&pool, &recorded).len())
    };
    assert_eq!(changed("a = 1", "a = 1"), (0, 0));
    for (from, to) in [
        ("a = 1", "a = 7"),
        ("uint32 a", "uint64 a"),
        ("uint32 a", "sint32 a"),
        ("uint32 a = 1;", ""),
        ("uint32 a", "uint32 z"),
        ("uint32 a", "repeated uint32 a"),
        ("optional string", "string"),
        ("string b", "bytes b"),
        ("B d", "bytes d"),
        ("bytes e = 4;", ""),
        ("float> g", "double> g"),
        ("ONE = 1", "TWO = 1"),
        ("ONE = 1", "ONE = 2"),
        ("stream B", "B"),
        ("Call", "Ask"),
    ] {
        assert!(changed(from, to).0 > 0, "{from} to {to} is not found");
    }
    for (from, to, lines) in [
        ("a = 1;", "a = 1; uint32 h = 7;", 2),
        ("bytes e = 4;", "bytes e = 4; bool h = 7;", 1),
        ("message B {}", "message B {} message C {}", 1),
        ("ONE = 1;", "ONE = 1; TWO = 2;", 1),
        ("(stream B);", "(stream B); rpc Ask(B) returns (B);", 1),
    ] {
        assert_eq!(changed(from, to), (0, lines), "{from} to {to}");
    }
    assert_eq!(hex(&unhex("00ff7a")), "00ff7a");
}
