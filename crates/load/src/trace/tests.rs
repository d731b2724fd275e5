//! Tests of the formats, with valid and invalid rows.

use super::*;
use serde_json::json;
use std::io::Write;

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
    file.write_all(text.as_bytes()).expect("the temporary file is writable");
    file
}

fn open(text: &str, settings: TraceSettings) -> Result<(Trace, Vec<Row>), String> {
    let file = file(text);
    let trace = Trace::open(file.path(), settings).map_err(|error| {
        let path = file.path().display().to_string();
        error.to_string().replace(&path, "FILE")
    })?;
    let mut rows = Vec::new();
    let read = trace.read(&mut |row| {
        rows.push(row);
        ControlFlow::Continue(())
    });
    read.map_err(|error| error.to_string())?;
    Ok((trace, rows))
}

fn rows(text: &str) -> Vec<Row> {
    open(text, TraceSettings::default()).expect("the trace is valid").1
}

#[test]
fn times_of_mooncake_rows_are_counted_from_the_first_row() {
    let text = r#"{"timestamp": 1000, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]}

{"timestamp": 1250.5, "input_length": 512, "output_length": 1, "hash_ids": [0], "other": 1}
{"timestamp": 1250.5, "input_length": 600, "output_length": 1, "hash_ids": [9]}
"#;
    let (trace, rows) = open(text, TraceSettings::default()).expect("the trace is valid");
    assert_eq!((trace.format(), trace.requests, trace.timed), (Format::Mooncake, 3, true));
    assert_eq!(trace.length, Duration::from_micros(250_500));
    assert_eq!(rows[0].at, Some(Duration::ZERO));
    assert_eq!(rows[0].load, Load::Blocks(TraceBlocks { input_length: 513, output_length: 5, hash_ids: vec![0, 7] }));
    assert_eq!((rows[1].index, rows[1].at), (1, Some(Duration::from_micros(250_500))));
}

#[test]
fn row_limit_ends_reading_before_an_invalid_row() {
    let text = "{\"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]}\nnonsense\n";
    let limited = |limit| {
        open(text, TraceSettings { limit, ..TraceSettings::default() })
            .map(|(trace, rows)| (trace.requests, rows.len(), trace.timed))
    };
    assert_eq!(limited(Some(1)), Ok((1, 1, false)));
    assert!(limited(None).is_err());
}

#[test]
fn chat_row_is_a_request_body_or_a_line_of_a_batch_file() {
    let text = r#"{"timestamp": 5, "model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}
{"timestamp": 9, "custom_id": "x", "body": {"messages": [{"role": "user", "content": "b"}]}}
"#;
    let (trace, rows) = open(text, TraceSettings::default()).expect("the trace is valid");
    assert_eq!((trace.format(), trace.requests), (Format::Chat, 2));
    let bodies: Vec<Value> = rows
        .iter()
        .map(|row| match &row.load {
            Load::Chat(chat) => Value::Object(chat.body.clone()),
            other => panic!("a chat: {other:?}"),
        })
        .collect();
    assert_eq!(
        bodies[0],
        json!({ "model": "m", "messages": [{ "role": "user", "content": "a" }], "tools": [{ "type": "function" }] })
    );
    assert_eq!(bodies[1], json!({ "messages": [{ "role": "user", "content": "b" }] }));
    assert_eq!(rows[1].at, Some(Duration::from_millis(4)));
}

#[test]
fn conversations_in_vllm_and_sharegpt_format_give_the_same_steps() {
    let vllm = r#"[{"id": "a", "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "one"}, {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"}]}]"#;
    let sharegpt = r#"[{"id": "a", "conversations": [
        {"from": "gpt", "value": "hello"}, {"from": "system", "value": "s"}, {"from": "human", "value": "one"},
        {"from": "gpt", "value": "1"}, {"from": "gpt", "value": "again"}, {"from": "human", "value": "two"}]}]"#;
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let steps = vec![
        ConversationStep { messages: vec![message("system", "s"), message("user", "one")], answer: Some("1".to_owned()) },
        ConversationStep { messages: vec![message("user", "two")], answer: None },
    ];
    for text in [vllm, sharegpt] {
        let found = rows(text);
        assert_eq!(found[0].load, Load::Conversation(ConversationTrace { steps: steps.clone(), tools: None }), "{text}");
    }
    let (trace, _) = open(sharegpt, TraceSettings::default()).expect("the trace is valid");
    assert_eq!((trace.requests, trace.timed, trace.format()), (2, false, Format::Conversations));
}

#[test]
fn explicit_format_overrides_the_recognised_format() {
    let text = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n";
    let format = Some(Format::Conversations);
    let (trace, rows) = open(text, TraceSettings { format, ..TraceSettings::default() }).expect("the trace is valid");
    assert_eq!(trace.format(), Format::Conversations);
    assert!(matches!(rows[0].load, Load::Conversation(_)));
}

#[test]
fn invalid_rows_are_refused_with_their_line_number() {
    let good = r#"{"timestamp": 7, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]}"#;
    let chat = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
    for (text, expected) in [
        (
            format!("{good}\n{{\"input"),
            "FILE, line 2: the row is not JSON (a trace has a JSON object a line, or one array of them): EOF while parsing a string at column 7",
        ),
        (
            format!("{good}\n\n{}", good.replace("[0, 7]", "[0]").replace("513", "1024")),
            "FILE, line 3: 1 `hash_ids` of 512 tokens are not a prompt of 1024 tokens",
        ),
        (
            format!("{good}\n{}", good.replace("[0, 7]", "[0, 1, 7]")),
            "line 2: 3 `hash_ids` of 512 tokens are not a prompt of 513 tokens; --block-tokens",
        ),
        (good.replace("513", "0"), "line 1: `input_length` must be at least 1"),
        (good.replace("th\": 5,", "th\": 0,"), "line 1: `output_length` must be at least 1"),
        (good.replace("th\": 5,", "th\": -5,"), "line 1: invalid value: integer `-5`"),
        (good.replace("\"output_length\": 5, ", ""), "line 1: the row has no field `output_length`"),
        (good.replace("7,", "\"7\","), "line 1: `timestamp` must be a number of milliseconds"),
        (good.replace("7,", "-7,"), "line 1: `timestamp` must be a number of milliseconds"),
        (format!("{good}\n{}", good.replace("7,", "6.9,")), "line 2: the row's `timestamp` is earlier"),
        (
            format!("{good}\n{}", good.replace("\"timestamp\": 7, ", "")),
            "line 2: some rows have a `timestamp` and some have none",
        ),
        (format!("{chat}\n{{}}"), "line 2: the row has no field `messages`"),
        (format!("{chat}\n{{\"messages\": []}}"), "line 2: there is no message to answer"),
        (format!("{chat}\n{{\"messages\": [\"a\"]}}"), "line 2: `messages` is not a list of objects"),
        (format!("{chat}\n[]"), "line 2: the row is not an object"),
        (format!("[{chat},\n\n{{\"messages\": 5}}]"), "line 3: `messages` is not a list"),
        (format!("[{chat},\n {{\"messages\": [{{\"role\": \"system\"}}]}}]"), "line 2: there is no message to answer"),
        (format!("[{chat},\n {{\"messages\": [{{\"content\": \"a\"}}]}}]"), "line 2: a message has no `role`"),
        (
            format!("[{chat},\n nonsense]"),
            "line 2: the row is not JSON (a trace has a JSON object a line, or one array of them): expected",
        ),
        (
            format!("[{chat}"),
            "line 1: the row is not JSON (a trace has a JSON object a line, or one array of them): EOF while parsing a list",
        ),
        (r#"[{"conversations": [{"from": "alien", "value": "a"}]}]"#.to_owned(), "line 1: `from` is \"alien\""),
        ("{\"filetype\": \"generate_conversations\"}".to_owned(), "FILE describes conversations that vLLM's benchmark generates"),
        ("{\"prompt\": \"a\"}".to_owned(), "the format of FILE is not recognised"),
        ("\n \n".to_owned(), "FILE has no rows"),
        ("[]".to_owned(), "FILE has no rows"),
    ] {
        let error = open(&text, TraceSettings::default()).expect_err(&text);
        assert!(error.contains(expected), "{text:?}: {error}");
    }
    let missing = Trace::open(Path::new("/no/such/file"), TraceSettings::default()).expect_err("there is no file");
    assert_eq!(missing.to_string(), "/no/such/file cannot be read");
}

#[test]
fn reading_ends_when_the_callback_returns_break() {
    for text in [
        "{\"messages\": [{}]}\n{\"messages\": [{}]}\n",
        "[{\"messages\": [{\"role\": \"user\"}]}, {\"messages\": [{\"role\": \"user\"}]}]",
    ] {
        let file = file(text);
        let trace = Trace::open(file.path(), TraceSettings::default()).expect("the trace is valid");
        let mut read = 0;
        trace
            .read(&mut |_| {
                read += 1;
                ControlFlow::Break(())
            })
            .expect("the trace is valid");
        assert_eq!(read, 1, "{text}");
    }
}
