//! `tandem bench replay`: sends the requests of a trace to a server, and reports times, tokens and cache hits.

use super::{ReportArgs, SloArgs, bearer, positive, progress::Bar};
use crate::{
    files,
    serve::{self, Signals},
    server::{KEY_VARIABLE, ServerArgs, ServerPlace},
};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};
use std::{path::PathBuf, time::Duration};
use tandem_load::{
    HeaderMap, HeaderName, HeaderValue, Pace, PromptKind, Settings,
    report::{self, Report},
    trace::{Format, Trace, TraceSettings},
};
use tokio_util::sync::CancellationToken;

/// The arguments of `tandem bench replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// The trace: Mooncake's JSON lines (lengths and `hash_ids`), JSON lines with bodies of chat requests, or a JSON array of conversations
    /// (`messages`, or ShareGPT's `conversations`), each of which is sent step by step with the answers that were received
    #[arg(value_name = "FILE")]
    pub trace: PathBuf,

    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    server: ReplayServerArgs,
    #[command(flatten)]
    pace: PaceArgs,
    #[command(flatten)]
    requests: ReplayRequestArgs,
    #[command(flatten)]
    slo: SloArgs,
    #[command(flatten)]
    report: ReportArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Trace")]
struct SourceArgs {
    /// Format of the trace [default: recognised by its first row]
    #[arg(long)]
    format: Option<FormatName>,
    /// Number of rows that are sent [default: all]
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Tokens of each block of `hash_ids`
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
    block_tokens: u64,
    /// How the prompts of `hash_ids` are made. Equal ids are equal text, or equal token ids
    #[arg(long, value_name = "KIND", default_value = "text")]
    prompt: PromptName,
    /// Token ids of --prompt ids are below this
    #[arg(long, value_name = "IDS", default_value_t = 30_000, value_parser = clap::value_parser!(u32).range(2..))]
    vocabulary: u32,
    /// The model's tokenizer.json, or a folder with it, by which prompts get their length [default: the server's /tokenize]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// Prompts and random times follow from this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    seed: u64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Server")]
struct ReplayServerArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Id of the requested model [default: the first one in the server's /v1/models]
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// Environment variable with the server's API key [default: TANDEM_API_KEY, if it is set]
    #[arg(long, value_name = "NAME")]
    key_env: Option<String>,
    /// Header of all requests; can be repeated
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,
    /// Response header that names the worker, for the balance between workers. Tandem's answers name it anyway
    #[arg(long, value_name = "NAME")]
    worker_header: Option<HeaderName>,
}

/// When requests are sent. At most one of the first three may be given.
#[derive(Args, Debug)]
#[command(next_help_heading = "Pace")]
struct PaceArgs {
    /// Open loop: send each row at its time in the trace, which runs this many times as fast [default: 1]
    #[arg(long, value_name = "FACTOR", value_parser = positive, conflicts_with_all = ["rate", "concurrency"])]
    speed: Option<f64>,
    /// Open loop: send rows at random times, this many a second on average
    #[arg(long, value_name = "PER_SECOND", value_parser = positive, conflicts_with = "concurrency")]
    rate: Option<f64>,
    /// Closed loop: keep this many requests or conversations in flight
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Option<u32>,
    /// Send no request after this time; those in flight are completed
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    duration: Option<Duration>,
    /// Maximum number of requests in flight of an open loop. With more, requests are sent late, and the report says so
    #[arg(long, value_name = "NUMBER", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    max_in_flight: u32,
    /// Time limit for a whole answer
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    timeout: Duration,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Requests")]
struct ReplayRequestArgs {
    /// Maximum length of an answer [default: as in the trace]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    max_tokens: Option<u64>,
    /// Send `ignore_eos`, with which vLLM, SGLang and Tandem generate answers of full length
    #[arg(long)]
    ignore_eos: bool,
    /// JSON object whose fields are added to the body of every request
    #[arg(long, value_name = "JSON", value_parser = object, default_value = "{}", hide_default_value = true)]
    extra_body: Map<String, Value>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatName {
    /// Lengths and `hash_ids`
    Mooncake,
    /// Bodies of chat requests
    Chat,
    /// Conversations of several steps
    Conversations,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PromptName {
    /// /v1/completions with prompts as text
    Text,
    /// /v1/chat/completions with messages as text, to which the chat template adds tokens
    Chat,
    /// /v1/completions with prompts as token ids
    Ids,
}

impl ReplayArgs {
    fn trace_settings(&self) -> TraceSettings {
        let format = self.source.format.map(|format| match format {
            FormatName::Mooncake => Format::Mooncake,
            FormatName::Chat => Format::Chat,
            FormatName::Conversations => Format::Conversations,
        });
        TraceSettings { format, limit: self.source.limit, block_tokens: self.source.block_tokens }
    }

    /// Returns the settings of a replay against the server at this place.
    fn settings(&self, place: &ServerPlace) -> Result<Settings> {
        let Self { source, server, pace, requests, slo, .. } = self;
        let mut headers: HeaderMap = server.headers.iter().cloned().collect();
        let name = server.key_env.as_deref().unwrap_or(KEY_VARIABLE);
        let key = bearer(name)?;
        ensure!(server.key_env.is_none() || key.is_some(), "--key-env: the variable {name} is not set");
        // A key that --header gives takes precedence over the one of the user's environment.
        if let Some(key) = key.filter(|_| server.key_env.is_some() || !headers.contains_key(tandem_load::AUTHORIZATION)) {
            headers.insert(tandem_load::AUTHORIZATION, key);
        }
        let sent = match (pace.concurrency, pace.rate) {
            (Some(concurrency), _) => Pace::Closed { concurrency: concurrency as usize },
            (None, Some(per_second)) => Pace::Rate { per_second },
            (None, None) => Pace::Trace { speed: pace.speed.unwrap_or(1.0) },
        };
        let prompts = match source.prompt {
            PromptName::Text => PromptKind::Text,
            PromptName::Chat => PromptKind::Chat,
            PromptName::Ids => PromptKind::Ids { vocabulary: source.vocabulary },
        };
        Ok(Settings {
            url: place.address.url().to_owned(),
            ca: place.authority()?,
            model: server.model.clone(),
            headers,
            pace: sent,
            duration: pace.duration,
            in_flight_max: pace.max_in_flight as usize,
            timeout: pace.timeout,
            prompts,
            tokenizer: source.tokenizer.clone(),
            block_tokens: source.block_tokens,
            max_tokens: requests.max_tokens,
            ignore_eos: requests.ignore_eos,
            extra_body: requests.extra_body.clone(),
            seed: source.seed,
            worker_header: server.worker_header.clone(),
            slo: slo.levels(),
        })
    }
}

/// Replays the trace and prints the report; also after Ctrl-C.
///
/// # Errors
/// The trace cannot be read, the server cannot be measured, no request was answered, or a report cannot be written.
pub fn run(args: ReplayArgs) -> Result<()> {
    let place = args.server.server.place("tandem bench replay TRACE")?;
    let settings = args.settings(&place)?;
    args.report.check()?;
    let trace = Trace::open(&args.trace, args.trace_settings())?;
    place.check()?;
    files::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the process cannot start threads")?;
    let report = runtime.block_on(replay(&trace, settings));
    runtime.shutdown_background();
    let report = report?;
    serve::print(&format!("{}\n", report::text(&report).trim_end()))?;
    let answered = report.requests.answered;
    args.report.write(&report.name.clone(), None, &[report])?;
    ensure!(answered > 0, "no request was answered; the report names the failures");
    Ok(())
}

/// Replays the trace. The first signal ends the run with a report of the results so far, the second one without a report.
async fn replay(trace: &Trace, settings: Settings) -> Result<Report> {
    let mut signals = Signals::new().context("the process cannot receive signals")?;
    let stop = CancellationToken::new();
    let bar = Bar::new(trace.requests, "");
    let replaying = tandem_load::replay(trace, settings, stop.clone(), |progress| bar.show(progress));
    let stopping = async {
        signals.next().await;
        stop.cancel();
        signals.next().await;
    };
    tokio::select! {
        report = replaying => Ok(report?),
        () = stopping => bail!("stopped by a second signal, without a report"),
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), &'static str> {
    let parsed = text
        .split_once(':')
        .and_then(|(name, value)| Some((HeaderName::try_from(name.trim()).ok()?, HeaderValue::try_from(value.trim()).ok()?)));
    parsed.ok_or("write a name, a colon and a value")
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("write a JSON object: {error}"))
}

pub(super) fn seconds(text: &str) -> Result<Duration, &'static str> {
    Duration::try_from_secs_f64(positive(text)?).map_err(|_| "write a smaller number")
}
