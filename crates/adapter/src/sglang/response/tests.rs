use super::*;
use serde_json::{Value, json};

/// The events have the fields of SGLang 0.5.23.
const FIRST: &str = r#"{"text":" Paris","output_ids":[7042],"meta_info":{"id":"my-id","finish_reason":null,"prompt_tokens":70,"weight_version":"default","num_retractions":0,"output_token_logprobs":[[-0.5,7042,null]],"output_top_logprobs":[[[-0.25,12,null],[-0.5,7042,null]]],"reasoning_tokens":0,"completion_tokens":1,"cached_tokens":64,"cached_tokens_details":{"device":64,"host":0}}}"#;
const LAST: &str = r#"{"text":" Paris.","output_ids":[7042,30],"meta_info":{"id":"my-id","finish_reason":{"type":"stop","matched":30},"prompt_tokens":70,"weight_version":"default","num_retractions":0,"output_token_logprobs":[[-0.5,7042,null],[-1.5,30,null]],"output_top_logprobs":[[[-0.25,12,null],[-0.5,7042,null]],[[-1.0,9,null],[-1.5,30,null]]],"reasoning_tokens":0,"completion_tokens":2,"cached_tokens":64,"cached_tokens_details":{"device":64,"host":0},"e2e_latency":0.5}}"#;
/// The answer to a request that is aborted while it waits in the server.
const ABORTED: &str = r#"{"text":"","output_ids":[],"meta_info":{"id":"my-id","finish_reason":{"type":"abort","message":"Abort in waiting queue"},"weight_version":"default","e2e_latency":0.5,"completion_tokens":0}}"#;

fn reader(top: Option<u32>, tokens: &[TokenId]) -> ChunkReader {
    ChunkReader::new(WantedLogprobs { top, tokens: tokens.to_vec() }, vec![30])
}

fn ids(chunk: &AnswerChunk) -> Vec<TokenId> {
    chunk.tokens.iter().map(|(token, _)| *token).collect()
}

/// Returns an event with these tokens, of which the answer has `completion_tokens` so far.
fn event(output_ids: &[TokenId], completion_tokens: usize, finish_reason: &Value) -> Vec<u8> {
    let meta = json!({ "finish_reason": finish_reason, "completion_tokens": completion_tokens, "cached_tokens": 16 });
    json!({ "text": "", "output_ids": output_ids, "meta_info": meta }).to_string().into_bytes()
}

#[test]
fn recorded_events_are_decoded() {
    let mut reader = reader(Some(1), &[]);
    let first = reader.chunk(FIRST.as_bytes()).expect("the recorded event is valid");
    let top = vec![TokenLogprob { token: 12, logprob: -0.25 }];
    assert_eq!(first.tokens, [(7042, Some(TokenLogprobs { logprob: -0.5, top }))]);
    assert_eq!((first.finish, first.counted, first.usage), (None, Some(64), None));
    let last = reader.chunk(LAST.as_bytes()).expect("the recorded event is valid");
    let top = vec![TokenLogprob { token: 9, logprob: -1.0 }];
    assert_eq!(last.tokens, [(30, Some(TokenLogprobs { logprob: -1.5, top }))]);
    assert_eq!(
        (last.finish, last.usage),
        (Some(Finish::Stop), Some(EngineUsage { cached_tokens: Some(64), prompt_tokens: None }))
    );
}

#[test]
fn cumulative_and_incremental_events_give_the_same_tokens() {
    let length = json!({ "type": "length", "length": 6 });
    let cumulative = [(&[1, 2][..], 2), (&[1, 2, 3], 3), (&[1, 2, 3], 3), (&[1, 2, 3, 4, 5, 6], 6)];
    let incremental = [(&[1, 2][..], 2), (&[3], 3), (&[], 3), (&[4, 5, 6], 6)];
    for events in [cumulative, incremental] {
        let mut reader = reader(None, &[]);
        let chunks = events.map(|(tokens, count)| {
            let finish = if count == 6 { length.clone() } else { Value::Null };
            reader.chunk(&event(tokens, count, &finish)).expect("the event is valid")
        });
        assert_eq!(chunks.each_ref().map(ids), [vec![1, 2], vec![3], vec![], vec![4, 5, 6]]);
        assert_eq!(chunks.each_ref().map(|chunk| chunk.finish), [None, None, None, Some(Finish::Length)]);
    }
}

/// The last event of an aborted request repeats its last token, also if events are incremental.
#[test]
fn aborted_requests_end_with_the_tokens_that_they_have() {
    let mut aborted = reader(None, &[]);
    let chunk = aborted.chunk(ABORTED.as_bytes()).expect("the recorded event is valid");
    assert_eq!((chunk.finish, chunk.counted, chunk.usage), (Some(Finish::Aborted), None, Some(EngineUsage::default())));
    let abort = json!({ "type": "abort", "message": "Aborted", "status_code": null, "err_type": null });
    aborted.chunk(&event(&[1, 2], 2, &Value::Null)).expect("the event is valid");
    let chunk = aborted.chunk(&event(&[2], 2, &abort)).expect("the event is valid");
    assert_eq!((ids(&chunk), chunk.finish), (vec![], Some(Finish::Aborted)));
    // A request that is aborted before its first token counts one token.
    let chunk = reader(None, &[]).chunk(&event(&[], 1, &abort)).expect("the event is valid");
    assert_eq!((ids(&chunk), chunk.counted), (vec![], None));
}

#[test]
fn answer_ends_at_a_stop_token_even_if_the_server_continues() {
    let chunk = reader(None, &[]).chunk(&event(&[1, 30, 2], 3, &Value::Null)).expect("the event is valid");
    assert_eq!((ids(&chunk), chunk.finish, chunk.usage.is_some()), (vec![1, 30], Some(Finish::Stop), true));
}

#[test]
fn requested_tokens_are_the_alternatives() {
    let with = |alternatives: Value| {
        let meta = json!({ "completion_tokens": 1, "output_token_logprobs": [[-0.5, 4, null]], "output_token_ids_logprobs": alternatives });
        let event = json!({ "output_ids": [4], "meta_info": meta }).to_string();
        reader(Some(1), &[8, 7]).chunk(event.as_bytes())
    };
    let chunk = with(json!([[[-2.0, 7, null], [-3.0, 8, null]]])).expect("the event is valid");
    let top = [(8, -3.0), (7, -2.0)].map(|(token, logprob)| TokenLogprob { token, logprob }).to_vec();
    assert_eq!(chunk.tokens, [(4, Some(TokenLogprobs { logprob: -0.5, top }))]);
    assert!(matches!(with(json!([])), Err(EngineFailure::Protocol(_))));
}

#[test]
fn invalid_events_are_protocol_errors() {
    let mut wants_logprobs = reader(Some(0), &[]);
    assert!(
        matches!(wants_logprobs.chunk(&event(&[1], 1, &Value::Null)), Err(EngineFailure::Protocol(_))),
        "logprobs are missing"
    );
    let mut reader = reader(None, &[]);
    assert_eq!(ids(&reader.chunk(&event(&[1, 2], 2, &Value::Null)).expect("the event is valid")), [1, 2]);
    for invalid in [
        event(&[1], 1, &Value::Null),
        br#"{"output_ids":[3],"meta_info":{}}"#.to_vec(),
        event(&[3], 9, &Value::Null),
        event(&[3], 3, &json!({ "type": "bored" })),
        event(&[3], 3, &json!({})),
        b"{".to_vec(),
    ] {
        assert!(matches!(reader.chunk(&invalid), Err(EngineFailure::Protocol(_))), "{}", String::from_utf8_lossy(&invalid));
    }
}

#[test]
fn errors_in_events_are_failures_of_their_status() {
    let failure = |event: Value| reader(None, &[]).chunk(event.to_string().as_bytes()).expect_err("the event is an error");
    let error = |code: Value| json!({ "error": { "message": "too long", "type": "invalid_request_error", "code": code, "retryable": false } });
    assert!(matches!(failure(error(json!(400))), EngineFailure::Invalid(message) if message == "too long"));
    assert!(matches!(failure(error(Value::Null)), EngineFailure::Failed(_)));
    let aborted = |status: u16| {
        let reason = json!({ "type": "abort", "message": "busy", "status_code": status, "err_type": null });
        json!({ "output_ids": [], "meta_info": { "finish_reason": reason, "completion_tokens": 0 } })
    };
    assert!(matches!(failure(aborted(503)), EngineFailure::Full(message) if message == "busy"));
    assert!(matches!(failure(aborted(500)), EngineFailure::Failed(_)));
    assert!(matches!(failure(aborted(400)), EngineFailure::Invalid(_)));
}

#[test]
fn prompt_logprobs_are_in_the_order_of_the_prompt() {
    let json = r#"{"text":"","output_ids":[],"meta_info":{"finish_reason":{"type":"length","length":0},"completion_tokens":1,"input_token_logprobs":[[null,1,null],[-9.5,20,null]],"input_top_logprobs":[null,[[-0.5,29,null],[-1.0,3,null]]]}}"#;
    let of = |json: &str, top| prompt_logprobs(&answer(json.as_bytes()).expect("the answer is valid"), &[1, 20], top);
    let top = vec![TokenLogprob { token: 29, logprob: -0.5 }];
    assert_eq!(of(json, 1).expect("the answer is complete"), [None, Some(TokenLogprobs { logprob: -9.5, top })]);
    let alone = TokenLogprobs { logprob: -9.5, top: Vec::new() };
    assert_eq!(of(json, 0).expect("the answer is complete"), [None, Some(alone)]);
    for (from, to) in [("20,null", "21,null"), ("[-9.5,20", "[null,20"), (",[-9.5,20,null]", "")] {
        assert!(matches!(of(&json.replace(from, to), 0), Err(EngineFailure::Protocol(_))), "{to}");
    }
}
