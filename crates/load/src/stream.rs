//! Reads a streamed answer of the OpenAI API, and records the times at which its tokens arrive.

use crate::{
    http::message,
    report::{CAUSES_MAX, CachedCount, Failure, FailureClass, Gap, MeasuredAnswer, PrefixTokens},
};
use futures::{Stream, StreamExt};
use hyper::{Response, body::Incoming, header::CONTENT_TYPE};
use serde::{Deserialize, de::IgnoredAny};
use std::{collections::BTreeMap, pin::pin, sync::Arc, time::Duration};
use tandem_client::{HttpError, events, whole};
use tokio::time::Instant;

/// The maximum number of bytes in the text of one answer, and in the body of a refusal.
const ANSWER_MAX: usize = 64 << 20;

/// The parts of an answer that are read in addition to its times.
#[derive(Clone, Debug, Default)]
pub(crate) struct WantedParts {
    /// The response header that names the worker; `None` if the server has no such header.
    pub(crate) worker_header: Option<hyper::header::HeaderName>,
    /// Whether the text is needed, because the next request of the conversation repeats it.
    pub(crate) text: bool,
}

/// A complete answer, with its text if the text is wanted.
#[derive(Debug, PartialEq)]
pub(crate) struct Received {
    pub(crate) answer: MeasuredAnswer,
    pub(crate) text: String,
}

/// One event of the stream. Unknown fields are ignored.
#[derive(Deserialize)]
struct StreamEvent {
    #[serde(default)]
    choices: Vec<StreamChoice>,
    #[serde(default)]
    usage: Option<StreamedUsage>,
    #[serde(default)]
    error: Option<IgnoredAny>,
    #[serde(default)]
    object: Option<String>,
    #[serde(default)]
    tandem: Option<TandemDetails>,
}

#[derive(Deserialize)]
struct StreamChoice {
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    delta: Option<StreamDelta>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct StreamDelta {
    #[serde(default)]
    role: Option<IgnoredAny>,
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
}

#[derive(Deserialize)]
struct StreamedUsage {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<StreamPromptDetails>,
}

#[derive(Deserialize)]
struct StreamPromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

/// The details that Tandem adds to an answer.
#[derive(Deserialize)]
struct TandemDetails {
    #[serde(default)]
    cached_tokens_source: Option<String>,
    #[serde(default)]
    prefill_worker: Option<String>,
    #[serde(default)]
    decode_worker: Option<String>,
    #[serde(default)]
    prefix: Option<StreamedPrefix>,
}

/// The part of [`TandemDetails`] about the prompt's prefix.
#[derive(Deserialize)]
struct StreamedPrefix {
    #[serde(default)]
    possible_tokens: u64,
    #[serde(default)]
    eligible_tokens: u64,
    #[serde(default)]
    chosen_tokens: u64,
    #[serde(default)]
    uncached: Option<BTreeMap<String, u64>>,
}

impl StreamChoice {
    /// Returns whether the choice contains a token. The first event of a chat contains only the role. The last event of some servers contains
    /// only the reason why the answer ended. The text of any other token may be empty.
    fn has_token(&self) -> bool {
        let filled = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let (text, role) = match &self.delta {
            Some(delta) => {
                let texts = [&delta.content, &delta.reasoning_content, &delta.reasoning, &delta.refusal];
                let called = delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
                (called || texts.into_iter().any(filled), delta.role.is_some())
            }
            None => (filled(&self.text), false),
        };
        let empty = self.text.is_some() || self.delta.as_ref().is_some_and(|delta| delta.content.is_some());
        text || (empty && !role && self.finish_reason.is_none())
    }

    fn text(&self) -> &str {
        let chat = self.delta.as_ref().and_then(|delta| delta.content.as_deref());
        chat.or(self.text.as_deref()).unwrap_or_default()
    }
}

/// Reads an answer to its end. Times are counted from `start`.
pub(crate) async fn read(response: Response<Incoming>, start: Instant, wanted: &WantedParts) -> Result<Received, Failure> {
    let status = response.status();
    if !status.is_success() {
        let body = whole(response, ANSWER_MAX).await.unwrap_or_default();
        return Err(failure(FailureClass::Status(status.as_u16()), message(&body)));
    }
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("text/event-stream") {
        return Err(failure(
            FailureClass::MalformedStream,
            format!("the answer is not a stream of events, but has the type {kind:?}"),
        ));
    }
    let worker = wanted.worker_header.as_ref().and_then(|name| response.headers().get(name)?.to_str().ok().map(Arc::from));
    let mut received = read_events(pin!(events(response, ANSWER_MAX)), start, wanted).await?;
    if let Some(worker) = worker {
        received.answer.prefill_worker = Some(Arc::clone(&worker));
        received.answer.decode_worker = Some(worker);
    }
    Ok(received)
}

async fn read_events(
    mut events: impl Stream<Item = Result<String, HttpError>> + Unpin,
    start: Instant,
    wanted: &WantedParts,
) -> Result<Received, Failure> {
    let (mut answer, mut text) = (MeasuredAnswer::default(), String::new());
    let (mut last, mut with_tokens, mut bytes): (Option<Duration>, u64, usize) = (None, 0, 0);
    let (mut usage, mut details): (Option<StreamedUsage>, Option<TandemDetails>) = (None, None);
    loop {
        let data = match events.next().await {
            Some(Ok(data)) => data,
            Some(Err(HttpError::Body(error))) => {
                return Err(failure(FailureClass::CutStream, format!("the connection was lost within the stream: {error}")));
            }
            Some(Err(error)) => return Err(failure(FailureClass::MalformedStream, error.to_string())),
            None => return Err(failure(FailureClass::CutStream, "the stream ended without [DONE]".to_owned())),
        };
        if data == "[DONE]" {
            break;
        }
        let now = start.elapsed();
        bytes += data.len();
        if bytes > ANSWER_MAX {
            return Err(failure(FailureClass::MalformedStream, "the answer has no end".to_owned()));
        }
        let event: StreamEvent = serde_json::from_str(&data).map_err(|error| {
            failure(FailureClass::MalformedStream, format!("an event is not what the API specifies: {error}"))
        })?;
        if event.error.is_some() || event.object.as_deref() == Some("error") {
            return Err(failure(FailureClass::ErrorEvent, message(data.as_bytes())));
        }
        if event.choices.iter().any(StreamChoice::has_token) {
            with_tokens += 1;
            match last {
                None => answer.first_token = Some(now),
                Some(last) => answer.gaps.push(Gap { length: now.saturating_sub(last), count: 1 }),
            }
            last = Some(now);
        }
        if wanted.text {
            event.choices.iter().take(1).for_each(|choice| text.push_str(choice.text()));
        }
        usage = event.usage.or(usage);
        details = event.tandem.or(details);
    }
    add_counts(&mut answer, usage, details, with_tokens);
    Ok(Received { answer, text })
}

/// Adds the counts that the server reported to the answer. `with_tokens` is the number of events that contain tokens.
fn add_counts(answer: &mut MeasuredAnswer, usage: Option<StreamedUsage>, details: Option<TandemDetails>, with_tokens: u64) {
    let cached = usage.as_ref().and_then(|usage| usage.prompt_tokens_details.as_ref()?.cached_tokens);
    let source = details.as_ref().and_then(|details| details.cached_tokens_source.as_deref());
    answer.cached = match (cached, source) {
        (None, _) | (_, Some("unknown")) => CachedCount::Unknown,
        (Some(tokens), Some("worker")) => CachedCount::Counted(tokens),
        (Some(tokens), Some(_)) => CachedCount::Estimated(tokens),
        (Some(tokens), None) => CachedCount::Unmarked(tokens),
    };
    answer.prompt_tokens = usage.as_ref().and_then(|usage| usage.prompt_tokens);
    // If the server reports no usage, each event that contains tokens is assumed to contain one.
    answer.output_tokens = usage.and_then(|usage| usage.completion_tokens).unwrap_or(with_tokens);
    if let Some(details) = details {
        let decode = details.decode_worker.map(Arc::from);
        answer.prefill_worker = details.prefill_worker.map(Arc::from).or_else(|| decode.clone());
        answer.decode_worker = decode;
        answer.prefix = details.prefix.and_then(|prefix| {
            Some(PrefixTokens {
                prompt_tokens: answer.prompt_tokens?,
                possible_tokens: prefix.possible_tokens,
                eligible_tokens: prefix.eligible_tokens,
                chosen_tokens: prefix.chosen_tokens,
                found_tokens: answer.cached.tokens()?,
                uncached: prefix.uncached?.into_iter().take(CAUSES_MAX).collect(),
            })
        });
    }
}

fn failure(class: FailureClass, message: String) -> Failure {
    Failure { class, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;
    use tandem_client::events_of;

    /// Reads a stream whose events arrive 10 ms apart.
    async fn received(events: &[&str]) -> Result<Received, Failure> {
        let start = Instant::now();
        let events: Vec<String> = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        let chunks = stream::iter(events).then(async |event| {
            tokio::time::sleep(Duration::from_millis(10)).await;
            Ok(event)
        });
        read_events(pin!(events_of(chunks, ANSWER_MAX)), start, &WantedParts { worker_header: None, text: true }).await
    }

    #[tokio::test(start_paused = true)]
    async fn chat_begins_with_its_first_token_and_not_with_the_role() {
        let found = received(&[
            r#"{"choices": [{"delta": {"role": "assistant", "content": ""}}]}"#,
            r#"{"choices": [{"delta": {"content": "a"}, "finish_reason": null}], "usage": null}"#,
            r#"{"choices": [{"delta": {"content": ""}, "finish_reason": null}]}"#,
            r#"{"choices": [{"delta": {"content": "b"}, "finish_reason": null}]}"#,
            r#"{"choices": [{"delta": {}, "finish_reason": "stop"}]}"#,
            r#"{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}"#,
            "[DONE]",
        ])
        .await
        .expect("the answer is complete");
        let ms = Duration::from_millis;
        assert_eq!(found.answer.first_token, Some(ms(20)));
        assert_eq!(found.answer.gaps, [Gap { length: ms(10), count: 1 }; 2]);
        assert_eq!(
            (found.answer.prompt_tokens, found.answer.output_tokens, found.answer.cached),
            (Some(7), 3, CachedCount::Unmarked(4))
        );
        assert_eq!((&*found.text, found.answer.decode_worker), ("ab", None));
    }

    #[tokio::test(start_paused = true)]
    async fn reasoning_tool_calls_and_completions_have_tokens() {
        for event in [
            r#"{"choices": [{"delta": {"reasoning_content": "a"}}]}"#,
            r#"{"choices": [{"delta": {"reasoning": "a", "content": null}}]}"#,
            r#"{"choices": [{"delta": {"role": "assistant", "tool_calls": [{"index": 0}]}}]}"#,
            r#"{"choices": [{"text": "a", "finish_reason": "length"}]}"#,
            r#"{"choices": [{"text": "", "finish_reason": null}]}"#,
        ] {
            let found = received(&[event, "[DONE]"]).await.expect("the answer is complete");
            assert_eq!((found.answer.first_token, found.answer.output_tokens), (Some(Duration::from_millis(10)), 1), "{event}");
            assert_eq!((found.answer.prompt_tokens, found.answer.cached), (None, CachedCount::Unknown), "{event}");
        }
        let found = received(&[r#"{"choices": [{"text": "", "finish_reason": "stop"}]}"#, "[DONE]"]).await.expect("complete");
        assert_eq!((found.answer.first_token, found.answer.output_tokens), (None, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn tandem_details_give_the_source_of_the_cached_count_and_name_the_workers() {
        for (source, prefill, expected) in [
            ("worker", "\"p\"", CachedCount::Counted(4)),
            ("router_estimate", "null", CachedCount::Estimated(4)),
            ("unknown", "null", CachedCount::Unknown),
        ] {
            let prefix = r#"{"possible_tokens": 6, "eligible_tokens": 5, "chosen_tokens": 5, "uncached": {"evicted": 2, "new_text": 3}, "nearest": null}"#;
            let details = format!(
                r#"{{"cached_tokens_source": "{source}", "prefill_worker": {prefill}, "decode_worker": "d", "prefix": {prefix}}}"#
            );
            let usage = r#"{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}"#;
            let last = format!(r#"{{"usage": {usage}, "tandem": {details}}}"#);
            let found = received(&[&last, "[DONE]"]).await.expect("the answer is complete");
            let workers = (found.answer.prefill_worker.as_deref(), found.answer.decode_worker.as_deref());
            let prefix = found.answer.prefix.clone();
            assert_eq!(prefix.is_some(), expected != CachedCount::Unknown);
            assert!(prefix.is_none_or(|prefix| (prefix.prompt_tokens, prefix.found_tokens, prefix.uncached.len()) == (9, 4, 2)));
            assert_eq!((found.answer.cached, workers), (expected, (Some(if source == "worker" { "p" } else { "d" }), Some("d"))));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_streams_are_reported_with_their_failure_class() {
        let token = r#"{"choices": [{"text": "a"}]}"#;
        for (events, class, expected) in [
            (&[token][..], FailureClass::CutStream, "without [DONE]"),
            (&[], FailureClass::CutStream, "without [DONE]"),
            (&[token, "{\"choices\": 5}"], FailureClass::MalformedStream, "invalid type"),
            (&["nonsense"], FailureClass::MalformedStream, "not what the API specifies"),
            (&[token, r#"{"error": {"message": "lost a worker"}}"#], FailureClass::ErrorEvent, "lost a worker"),
        ] {
            let failure = received(events).await.expect_err("the answer is not complete");
            assert_eq!(failure.class, class, "{events:?}");
            assert!(failure.message.contains(expected), "{failure:?}");
        }
    }
}
