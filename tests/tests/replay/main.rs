//! Traces that are replayed against a cluster, and against servers that fail.

mod fake;
mod rates;

use anyhow::{Context, Result};
use fake::{Behaviour, Fake};
use serde_json::{Value, json};
use std::{io::Write, time::Duration};
use tandem_load::{
    LoadError, Pace, PromptKind, ReplayProgress, Settings,
    report::{self, Report, Slo},
    trace::{Trace, TraceSettings},
};
use tandem_tests::{Client, sim_settings, start, start_without_cached_tokens, wait_until};
use tokio_util::sync::CancellationToken;

fn file(text: &str) -> Result<tempfile::NamedTempFile> {
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(text.as_bytes())?;
    Ok(file)
}

fn open(file: &tempfile::NamedTempFile) -> Result<Trace> {
    Ok(Trace::open(file.path(), TraceSettings::default())?)
}

async fn replay(trace: &str, settings: Settings) -> Result<Report> {
    let trace = file(trace)?;
    Ok(tandem_load::replay(&open(&trace)?, settings, CancellationToken::new(), |_| {}).await?)
}

/// Returns a row of a Mooncake trace whose prompt fills its blocks.
fn blocks(at_ms: u64, hash_ids: &[u64], output_length: u64) -> String {
    let input_length = 512 * hash_ids.len();
    json!({ "timestamp": at_ms, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids }).to_string()
        + "\n"
}

fn closed(concurrency: usize) -> Pace {
    Pace::Closed { concurrency }
}

/// Conversations of three users: each prompt begins with a system prompt and continues the user's previous one.
fn conversations() -> String {
    let mut trace = String::new();
    for step in 0..4_u64 {
        for user in 0..3_u64 {
            let ids: Vec<u64> = [0].into_iter().chain((0..=step).map(|step| 10 * (user + 1) + step)).collect();
            trace += &blocks(300 * step + 100 * user, &ids, 5 + user);
        }
    }
    trace
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_sends_the_recorded_lengths_and_reports_the_cached_tokens_of_the_frontend() -> Result<()> {
    let cluster = start(sim_settings()).await?;
    let client = Client::new(cluster.frontend());
    let settings = Settings {
        ignore_eos: true,
        slo: Slo { ttft: Some(Duration::from_secs(60)), ..Slo::default() },
        ..Settings::new(format!("http://{}/v1", cluster.frontend()))
    };
    let report = replay(&conversations(), settings).await?;
    assert_eq!((report.requests.sent, report.requests.answered), (12, 12), "{}", report::text(&report));
    let tokens = &report.tokens;
    // Three users with prompts of 2, 3, 4 and 5 blocks, and answers of 5, 6 and 7 tokens.
    assert_eq!((tokens.prompt, tokens.output), (3 * 14 * 512, 4 * 18));
    assert_eq!((tokens.other_prompt_length, tokens.other_answer_length), (0, 0));
    assert_eq!(client.metric("tandem_frontend_prompt_tokens_total", "").await?, tokens.prompt as f64);
    let counted = client.metric("tandem_frontend_cached_tokens_total", "source=\"worker\"").await?;
    assert_eq!((tokens.cached_counted as f64, tokens.cached_estimated, tokens.cached_unmarked), (counted, 0, 0));
    // Each prompt continues its user's previous one. The router may place some of them on the other worker, which has cached less.
    assert!(tokens.cached_counted >= 3 * (2 + 3 + 4) * 512 / 2, "{}", report::text(&report));
    assert_eq!(report.goodput.as_ref().map(|goodput| goodput.share), Some(1.0));
    assert!(report.seconds >= 1.1, "the trace lasts 1.1 s, the run {} s", report.seconds);
    let prompts: u64 = report.workers.iter().map(|worker| worker.prompts).sum();
    let answers: u64 = report.workers.iter().map(|worker| worker.answers).sum();
    assert_eq!((prompts, answers), (12, 12));
    assert!(report.workers.iter().any(|worker| worker.name.starts_with("decode")), "{:?}", report.workers);
    cluster.assert_idle().await?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn estimated_cached_tokens_are_marked() -> Result<()> {
    let cluster = start_without_cached_tokens(sim_settings()).await?;
    let settings = Settings { pace: closed(1), max_tokens: Some(2), ..Settings::new(format!("http://{}", cluster.frontend())) };
    let trace = blocks(0, &[1, 2], 50) + &blocks(0, &[1, 2], 50);
    let report = replay(&trace, settings).await?;
    let tokens = &report.tokens;
    assert_eq!((tokens.cached_counted, tokens.cached_unmarked, tokens.answers_without_cached), (0, 0, 0));
    assert_eq!((report.requests.answered, tokens.prompt), (2, 2_048));
    assert!(tokens.output <= 4, "{tokens:?}");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn open_loop_sends_at_the_times_of_the_trace_even_if_no_answer_arrives() -> Result<()> {
    // No answer begins before all requests have arrived.
    let fake = Fake::start(fake::Settings { permits: 0, ..Default::default() }, |_| Behaviour::Tokens(1)).await?;
    let trace: String = (0..6).map(|row| blocks(200 * row, &[row], 1)).collect();
    let settings = Settings { pace: Pace::Trace { speed: 2.0 }, ..Settings::new(&fake.url) };
    let waiting = async {
        wait_until("all requests have arrived", async || Ok(fake.requests().len() == 6)).await?;
        fake.allow(6);
        anyhow::Ok(())
    };
    let (report, waited) = tokio::join!(replay(&trace, settings), waiting);
    waited?;
    let report = report?;
    assert_eq!((report.requests.answered, fake.in_flight_max()), (6, 6));
    let requests = fake.requests();
    for (row, request) in requests.iter().enumerate() {
        let after = request.at.duration_since(requests[0].at);
        // The first request may have been late, so that the others seem early.
        assert!(
            after + Duration::from_millis(60) >= Duration::from_millis(100) * row as u32,
            "row {row} was sent after {after:?}"
        );
    }
    // The first request was answered after the last one, which was due 500 ms later.
    let ttft = report.ttft.as_ref().context("no token arrived")?;
    assert!(ttft.max_ms >= 495.0, "{ttft:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn time_to_first_token_is_counted_from_the_due_time_of_the_request() -> Result<()> {
    let fake =
        Fake::start(fake::Settings { holds: Duration::from_millis(60), ..Default::default() }, |_| Behaviour::Tokens(1)).await?;
    let trace: String = (0..5).map(|row| blocks(0, &[row], 1)).collect();
    let settings = Settings { in_flight_max: 1, ..Settings::new(&fake.url) };
    let report = replay(&trace, settings).await?;
    // All requests were due at the same time, and each waited for the end of the request before it.
    let ttft = report.ttft.as_ref().context("no token arrived")?;
    assert!(ttft.max_ms >= 300.0 && ttft.p50_ms >= 180.0, "{ttft:?}");
    assert!(report.late.requests >= 4, "{:?}", report.late);
    assert_eq!((fake.in_flight_max(), report.requests.answered), (1, 5));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_loop_keeps_the_set_number_of_requests_in_flight() -> Result<()> {
    let fake = Fake::start(fake::Settings { permits: 0, ..Default::default() }, |_| Behaviour::Tokens(2)).await?;
    let trace: String = (0..9).map(|row| blocks(0, &[row], 1)).collect();
    let settings = Settings { pace: closed(3), ..Settings::new(&fake.url) };
    let waiting = async {
        wait_until("three requests have arrived", async || Ok(fake.requests().len() == 3)).await?;
        fake.allow(9);
        anyhow::Ok(())
    };
    let (report, waited) = tokio::join!(replay(&trace, settings), waiting);
    waited?;
    let report = report?;
    assert_eq!((fake.in_flight_max(), report.requests.answered, report.tokens.output), (3, 9, 18));
    // A closed loop has no times at which requests are due.
    assert_eq!(report.late.requests, 0);
    // The answers were longer than the rows of the trace demand.
    assert_eq!(report.tokens.other_answer_length, 9);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_counted_by_class_and_do_not_end_the_run() -> Result<()> {
    const BEHAVIOURS: [Behaviour; 8] = [
        Behaviour::Refuse(503),
        Behaviour::Refuse(400),
        Behaviour::ErrorEvent,
        Behaviour::Malformed,
        Behaviour::Cut,
        Behaviour::Lost,
        Behaviour::Stall,
        Behaviour::Whole,
    ];
    // The prompt's number of blocks selects the behaviour of the server. One block: it answers with tokens.
    let fake = Fake::start(fake::Settings::default(), |body| {
        let blocks = body["prompt"].as_str().unwrap_or_default().len() / 512;
        BEHAVIOURS.get(blocks.wrapping_sub(2)).copied().unwrap_or(Behaviour::Tokens(3))
    })
    .await?;
    let mut trace = String::new();
    for count in [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 1] {
        trace += &blocks(0, &(0..count).collect::<Vec<u64>>(), 3);
    }
    let settings = Settings { pace: closed(2), timeout: Duration::from_secs(1), ..Settings::new(&fake.url) };
    let report = replay(&trace, settings).await?;
    let errors: Vec<(&str, u64)> = report.errors.iter().map(|error| (&*error.class, error.count)).collect();
    let expected = [
        ("HTTP status 400", 1),
        ("HTTP status 503", 2),
        ("timeout", 1),
        ("error in the stream", 1),
        ("cut stream", 2),
        ("malformed stream", 2),
    ];
    assert_eq!(errors, expected, "{}", report::text(&report));
    assert_eq!((report.requests.sent, report.requests.answered, report.requests.failed), (11, 2, 9));
    assert!(report.errors.iter().any(|error| error.example == "refused by the test"), "{:?}", report.errors);
    assert!(report.errors.iter().any(|error| error.example == "failed by the test"), "{:?}", report.errors);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_cannot_be_reached_is_a_failure_of_its_requests() -> Result<()> {
    let fake = Fake::start(fake::Settings::default(), |_| Behaviour::Tokens(1)).await?;
    let url = fake.url.clone();
    drop(fake);
    let trace = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
    let settings = |model: Option<&str>| Settings { model: model.map(str::to_owned), pace: closed(1), ..Settings::new(&url) };
    let report = replay(trace, settings(Some("m"))).await?;
    assert_eq!(report.errors.iter().map(|error| (&*error.class, error.count)).collect::<Vec<_>>(), [("connection", 1)]);
    let error = replay(trace, settings(None)).await.expect_err("the server lists no models");
    assert!(error.to_string().contains("name the model with --model"), "{error}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_step_of_a_conversation_has_the_answers_that_were_received() -> Result<()> {
    let fake = Fake::start(fake::Settings::default(), |body| match body["messages"][0]["content"].as_str() {
        Some("refused") => Behaviour::Refuse(500),
        _ => Behaviour::Tokens(2),
    })
    .await?;
    let turns = |first: &str| {
        json!({ "messages": [
            { "role": "user", "content": first }, { "role": "assistant", "content": "recorded and not sent" },
            { "role": "user", "content": "second" }, { "role": "assistant", "content": "four" },
            { "role": "user", "content": "third" }
        ] })
    };
    let trace = json!([turns("first"), turns("refused")]).to_string();
    let report = replay(&trace, Settings { pace: closed(1), ..Settings::new(&fake.url) }).await?;
    let bodies: Vec<Value> = fake.requests().into_iter().map(|request| request.body).collect();
    assert_eq!(bodies.len(), 4);
    let contents = |body: &Value| -> Vec<String> {
        body["messages"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|message| message["content"].as_str().map(str::to_owned))
            .collect()
    };
    assert_eq!(contents(&bodies[0]), ["first"]);
    assert_eq!(contents(&bodies[2]), ["first", "answer 1!", "second", "answer 2!", "third"]);
    assert_eq!(bodies[2]["messages"][1]["role"], "assistant");
    // The recorded answer has 21 bytes; the last step has none.
    assert_eq!(
        (&bodies[0]["max_tokens"], &bodies[1]["max_tokens"], &bodies[2]["max_tokens"]),
        (&json!(6), &json!(1), &Value::Null)
    );
    assert_eq!((report.requests.answered, report.requests.failed), (3, 1));
    assert!(
        report.facts.iter().any(|fact| fact.name == "not sent" && fact.value.starts_with("2 requests")),
        "{:?}",
        report.facts
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_rows_are_sent_as_recorded_with_key_and_extra_fields() -> Result<()> {
    let fake = Fake::start(fake::Settings { tokenizes: false, ..Default::default() }, |_| Behaviour::Tokens(4)).await?;
    let trace = r#"{"timestamp": 0, "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}], "model": "old", "max_tokens": 90}"#;
    let mut settings = Settings::new(&fake.url);
    settings.headers.insert("authorization", "Bearer secret".parse()?);
    settings.max_tokens = Some(16);
    settings.worker_header = Some("x-worker".parse()?);
    settings.extra_body = json!({ "temperature": 0 }).as_object().cloned().context("the value is not an object")?;
    let report = replay(trace, settings).await?;
    let [request] = &fake.requests()[..] else { anyhow::bail!("the number of requests is not one") };
    let streamed = json!({ "include_usage": true });
    let expected = json!({
        "messages": [{ "role": "user", "content": "a" }], "tools": [{ "type": "function" }], "model": "fake", "max_tokens": 16,
        "temperature": 0, "stream": true, "stream_options": streamed,
    });
    assert_eq!((&request.body, request.authorization.as_deref()), (&expected, Some("Bearer secret")));
    assert_eq!((report.tokens.output, report.tokens.answers_without_cached, report.tokens.hit_rate()), (4, 1, None));
    assert_eq!(report.workers.iter().map(|worker| (&*worker.name, worker.output_tokens)).collect::<Vec<_>>(), [("worker-1", 4)]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_a_tokenize_endpoint_gets_token_ids_or_no_requests() -> Result<()> {
    let fake = Fake::start(fake::Settings { tokenizes: false, ..Default::default() }, |_| Behaviour::Tokens(1)).await?;
    let trace = blocks(0, &[5, 6], 1) + &blocks(0, &[5, 7], 1);
    let error = replay(&trace, Settings::new(&fake.url)).await.expect_err("text has no length");
    assert!(error.to_string().contains("--tokenizer") && error.to_string().contains("--prompt ids"), "{error}");
    assert_eq!(fake.requests().len(), 0);
    let settings = Settings { prompts: PromptKind::Ids { vocabulary: 200 }, pace: closed(1), ..Settings::new(&fake.url) };
    let report = replay(&trace, settings).await?;
    assert_eq!((report.requests.answered, report.tokens.prompt, report.tokens.other_prompt_length), (2, 2_048, 0));
    let prompts: Vec<Value> = fake.requests().into_iter().map(|mut request| request.body["prompt"].take()).collect();
    let ids = |prompt: &Value| {
        prompt.as_array().map(|ids| ids.iter().filter_map(Value::as_u64).collect::<Vec<u64>>()).unwrap_or_default()
    };
    let (one, other) = (ids(&prompts[0]), ids(&prompts[1]));
    assert_eq!((one.len(), &one[..512]), (1_024, &other[..512]));
    assert_ne!(one[512..], other[512..]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_run_reports_the_requests_so_far() -> Result<()> {
    let fake = Fake::start(fake::Settings::default(), |body| {
        // The first two prompts have two blocks and are answered; the others never end.
        if body["prompt"].as_str().unwrap_or_default().len() == 1_024 { Behaviour::Tokens(1) } else { Behaviour::Stall }
    })
    .await?;
    let trace: String = [&[1, 2][..], &[3, 4], &[5], &[6]].map(|ids| blocks(0, ids, 1)).concat() + &blocks(600_000, &[7], 1);
    let trace = file(&trace)?;
    let (stop, stopping) = (CancellationToken::new(), CancellationToken::new());
    let stopped = stop.clone();
    let replaying = async {
        let progress = |progress: ReplayProgress| {
            if progress.ended == 2 {
                stopping.cancel();
            }
        };
        tandem_load::replay(&open(&trace)?, Settings::new(&fake.url), stop.clone(), progress).await.map_err(anyhow::Error::from)
    };
    let ending = async {
        stopping.cancelled().await;
        wait_until("the other requests have arrived", async || Ok(fake.requests().len() == 4)).await?;
        stopped.cancel();
        anyhow::Ok(())
    };
    let (report, ended) = tokio::join!(replaying, ending);
    ended?;
    let requests = report?.requests;
    assert_eq!((requests.sent, requests.answered, requests.stopped, requests.failed), (4, 2, 2, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn duration_ends_the_run_after_the_answers_in_flight() -> Result<()> {
    let fake =
        Fake::start(fake::Settings { holds: Duration::from_millis(150), ..Default::default() }, |_| Behaviour::Tokens(1)).await?;
    let trace: String = (0..200).map(|row| blocks(0, &[row], 1)).collect();
    let duration = Some(Duration::from_millis(400));
    let report = replay(&trace, Settings { pace: closed(1), duration, ..Settings::new(&fake.url) }).await?;
    assert!((1..=4).contains(&report.requests.sent), "{:?}", report.requests);
    assert_eq!(report.requests.answered, report.requests.sent);
    let late = blocks(0, &[1], 1) + &blocks(500, &[2], 1);
    let report = replay(&late, Settings { duration, ..Settings::new(&fake.url) }).await?;
    assert_eq!(report.requests.answered, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn trace_without_times_needs_a_rate_or_a_concurrency() -> Result<()> {
    let fake = Fake::start(fake::Settings::default(), |_| Behaviour::Tokens(1)).await?;
    let trace = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n".repeat(20);
    let error = replay(&trace, Settings::new(&fake.url)).await.expect_err("there are no times");
    assert!(matches!(error.downcast_ref(), Some(LoadError::Untimed)), "{error}");
    let report = replay(&trace, Settings { pace: Pace::Rate { per_second: 200.0 }, ..Settings::new(&fake.url) }).await?;
    assert_eq!(report.requests.answered, 20);
    Ok(())
}
