//! The replay of a trace against a server, from the settings to the report.

use crate::{
    dispatch::{self, RequestSource},
    http::{Http, UrlError},
    plan::{Planned, Planner, RequestTimes},
    prompt::{LocalTokenizer, LocalTokenizerError, PromptKind, PromptMaker, WordsError},
    report::{Fact, Recorder, Report, RequestOutcome, Slo},
    request::BodyFields,
    runner::RequestRunner,
    stream::WantedParts,
    target::{BenchTarget, TargetError, TokenizeError},
    trace::{Format, Trace, TraceError, TraceSettings},
};
use fastrand::Rng;
use hyper::{HeaderMap, header::HeaderName};
use serde_json::{Map, Value};
use std::{
    ops::ControlFlow,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::mpsc, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

/// The number of requests that are prepared before they are due. A prepared request may have a megabyte of text.
const PREPARED: usize = 32;
/// The maximum number of outcomes that wait to be counted. If there are more, the requests' tasks wait.
const OUTCOMES: usize = 1_024;

/// The settings of a replay.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The server's address, with or without `/v1`.
    pub url: String,
    /// Certificates of authorities in PEM format, which are trusted in addition to the public authorities.
    pub ca: Option<Vec<u8>>,
    /// The model that is requested; `None`: the first one that the server lists.
    pub model: Option<String>,
    /// Headers of every request, such as an API key.
    pub headers: HeaderMap,
    /// The rule for the times at which requests are sent.
    pub pace: Pace,
    /// The time after which no request is sent; those in flight are completed.
    pub duration: Option<Duration>,
    /// The maximum number of requests in flight in an open loop. While this many are in flight, due requests wait; the report shows how late
    /// they were sent.
    pub in_flight_max: usize,
    /// The time limit for a complete answer.
    pub timeout: Duration,
    /// The form of the prompts that are generated for traces without text.
    pub prompts: PromptKind,
    /// The path of a `tokenizer.json`, or of a folder that contains one; `None`: the server counts tokens.
    pub tokenizer: Option<PathBuf>,
    /// The number of tokens in each block of a trace without text.
    pub block_tokens: u64,
    /// The maximum length of an answer, in tokens.
    pub max_tokens: Option<u64>,
    /// Whether answers continue after an end-of-sequence token until they reach their maximum length.
    pub ignore_eos: bool,
    /// Fields that are added to every request's body.
    pub extra_body: Map<String, Value>,
    /// The seed of generated prompts and of random times.
    pub seed: u64,
    /// The response header that names the worker; `None` if the server has no such header.
    pub worker_header: Option<HeaderName>,
    /// The service levels that a request must meet to count towards the goodput.
    pub slo: Slo,
}

impl Settings {
    /// Returns the default settings of `tandem bench replay`, which sends requests at the times of the trace.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            ca: None,
            model: None,
            headers: HeaderMap::new(),
            pace: Pace::Trace { speed: 1.0 },
            duration: None,
            in_flight_max: 10_000,
            timeout: Duration::from_secs(600),
            prompts: PromptKind::Text,
            tokenizer: None,
            block_tokens: TraceSettings::default().block_tokens,
            max_tokens: None,
            ignore_eos: false,
            extra_body: Map::new(),
            seed: 0,
            worker_header: None,
            slo: Slo::default(),
        }
    }
}

/// The rule for the times at which requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// Requests are sent at the times of the trace, divided by `speed`.
    Trace {
        /// The speed, as a multiple of the recorded one.
        speed: f64,
    },
    /// Requests are sent at random times.
    Rate {
        /// The mean number of rows that are sent per second.
        per_second: f64,
    },
    /// A request or conversation is sent when another one has ended.
    Closed {
        /// The number of requests or conversations in flight.
        concurrency: usize,
    },
}

/// The progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayProgress {
    /// The number of requests in the trace.
    pub requests: u64,
    /// The number of requests that have ended.
    pub ended: u64,
    /// The number of requests that failed.
    pub failed: u64,
}

/// The reason why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The rows of the trace have no times.
    #[error("the trace has no times (`timestamp`); set --concurrency or --rate")]
    Untimed,
    /// The address is wrong.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The server cannot be measured.
    #[error(transparent)]
    BenchTarget(#[from] TargetError),
    /// The local tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] LocalTokenizerError),
    /// The server cannot count tokens, or no prompts of an exact length can be made for its tokenizer.
    #[error(transparent)]
    ServerPrompts(#[from] WordsError<TokenizeError>),
    /// No prompts of an exact length can be made for the local tokenizer.
    #[error(transparent)]
    LocalPrompts(#[from] WordsError<LocalTokenizerError>),
    /// The run was stopped before its first request.
    #[error("stopped before the first request was sent")]
    Stopped,
}

/// Replays a trace. Failures of requests are counted and do not end the run. When `stop` is cancelled, requests in flight are aborted, and
/// the report has the results so far. `progress` is called after each request.
///
/// # Errors
/// Fails if the server cannot be measured, or if the trace cannot be read.
pub async fn replay(
    trace: &Trace,
    settings: Settings,
    stop: CancellationToken,
    mut progress: impl FnMut(ReplayProgress),
) -> Result<Report, LoadError> {
    if matches!(settings.pace, Pace::Trace { .. }) && !trace.timed {
        return Err(LoadError::Untimed);
    }
    let (target, planner) = tokio::select! {
        prepared = prepare(trace, &settings) => prepared?,
        () = stop.cancelled() => return Err(LoadError::Stopped),
    };
    let (bodies, model) = (planner.bodies.clone(), target.model.clone());
    let (planned, mut rest) = mpsc::channel(PREPARED);
    let reading = read(trace.clone(), planner, planned);
    let first = rest.recv().await;
    let (outcomes, mut ended) = mpsc::channel::<RequestOutcome>(OUTCOMES);
    let runner = Arc::new(RequestRunner {
        http: target.http,
        bodies,
        wanted: WantedParts { worker_header: settings.worker_header.clone(), text: false },
        timeout: settings.timeout,
        start: Instant::now(),
        stop,
        outcomes,
        skipped: AtomicU64::new(0),
    });
    let source = RequestSource { first, rest };
    let sending = async {
        let shared = Arc::clone(&runner);
        match settings.pace {
            Pace::Closed { concurrency } => dispatch::closed_loop(shared, source, concurrency, settings.duration).await,
            _ => dispatch::open_loop(shared, source, settings.in_flight_max, settings.duration).await,
        }
        // The last sender of outcomes is dropped with the runner, so that their receiver ends.
        let runner = Arc::into_inner(runner).expect("all tasks have ended");
        runner.skipped.load(Ordering::Relaxed)
    };
    let mut recorder = Recorder::new(settings.slo);
    let mut state = ReplayProgress { requests: trace.requests, ..ReplayProgress::default() };
    let collecting = async {
        while let Some(outcome) = ended.recv().await {
            recorder.add(&outcome);
            state.ended += 1;
            state.failed += u64::from(outcome.result.is_err());
            progress(state);
        }
    };
    let (skipped, ()) = tokio::join!(sending, collecting);
    reading.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?;
    let name = trace.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(recorder.report(format!("replay of {name}"), facts(trace, &settings, &model, skipped)))
}

/// Reads the trace and plans its requests on a separate thread, which waits while the channel is full.
fn read(trace: Trace, mut planner: Planner, planned: mpsc::Sender<Planned>) -> JoinHandle<Result<(), TraceError>> {
    tokio::task::spawn_blocking(move || {
        trace.read(&mut |row| match planned.blocking_send(planner.plan(row)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        })
    })
}

async fn prepare(trace: &Trace, settings: &Settings) -> Result<(BenchTarget, Planner), LoadError> {
    let http = Http::new(&settings.url, settings.ca.as_deref(), settings.headers.clone())?;
    let tokenizer = settings.tokenizer.as_deref().map(LocalTokenizer::open).transpose()?;
    let target = BenchTarget::find(http, settings.model.clone()).await?;
    let (seed, block_tokens) = (settings.seed, settings.block_tokens);
    let prompts = match (trace.format(), settings.prompts, &tokenizer) {
        (Format::Mooncake, PromptKind::Ids { vocabulary }, _) => Some(PromptMaker::ids(vocabulary, seed, block_tokens)),
        (Format::Mooncake, _, Some(tokenizer)) => Some(PromptMaker::text(tokenizer, seed, block_tokens).await?),
        (Format::Mooncake, _, None) => Some(PromptMaker::text(&target, seed, block_tokens).await?),
        (Format::Chat | Format::Conversations, _, _) => None,
    };
    let bodies = BodyFields {
        model: target.model.clone(),
        max_tokens: settings.max_tokens,
        ignore_eos: settings.ignore_eos,
        extra: settings.extra_body.clone(),
    };
    let times = match settings.pace {
        Pace::Trace { speed } => RequestTimes::Trace { speed },
        Pace::Rate { per_second } => RequestTimes::Random { per_second, rng: Rng::with_seed(seed), last: Duration::ZERO },
        Pace::Closed { .. } => RequestTimes::Closed,
    };
    Ok((target, Planner { bodies, times, prompts, kind: settings.prompts, tokenizer }))
}

fn facts(trace: &Trace, settings: &Settings, model: &str, skipped: u64) -> Vec<Fact> {
    let pace = match settings.pace {
        Pace::Trace { speed } => format!("open loop at the times of the trace × {speed}"),
        Pace::Rate { per_second } => format!("open loop at {per_second} a second, random"),
        Pace::Closed { concurrency } => format!("closed loop, {concurrency} in flight"),
    };
    let mut facts = vec![
        Fact::new("trace", trace.path().display()),
        Fact::new("format", trace.format()),
        Fact::new("server", &settings.url),
        Fact::new("model", model),
        Fact::new("pace", pace),
    ];
    if trace.format() == Format::Mooncake {
        let prompts = match settings.prompts {
            PromptKind::Text => "text of completions",
            PromptKind::Chat => "text of chats",
            PromptKind::Ids { .. } => "token ids of completions",
        };
        facts.push(Fact::new("prompts", format!("{prompts}, seed {}", settings.seed)));
    }
    if let Some(tokens) = settings.max_tokens {
        facts.push(Fact::new("answers", format!("at most {tokens} tokens")));
    }
    if skipped > 0 {
        facts.push(Fact::new("not sent", format!("{skipped} requests of conversations in which an earlier one failed")));
    }
    facts
}
