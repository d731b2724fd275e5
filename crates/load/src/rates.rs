//! Measures the rates with which the simulator models a worker: prompts one at a time, then answers in batches.

use crate::{
    http::{Http, UrlError},
    prompt::{MadePrompt, PromptKind},
    report::{CachedCount, Failure, MeasuredAnswer},
    request::BodyFields,
    stream::{self, WantedParts},
    target::{BenchTarget, TargetError},
};
use fastrand::Rng;
use futures::future::try_join_all;
use hyper::HeaderMap;
use serde_json::Map;
use std::{collections::BTreeSet, iter, sync::Arc, time::Duration};
use tokio::time::Instant;

/// The number of tokens in the shortest prompt.
const SHORTEST_TOKENS: u64 = 64;
/// The number of measurements of each prompt. The shortest time counts, because other work on the machine can only make a time longer.
const REPEATS: usize = 5;
/// A prompt that takes longer than this is the last one. Longer prompts are not measured.
const PROMPT_MAX: Duration = Duration::from_secs(4);
/// The number of tokens in each answer.
const ANSWER_TOKENS: u64 = 32;
/// The number of words in the first prompt, from which the number of tokens per word is computed.
const FIRST_WORDS: u64 = 32;

/// The settings of a measurement.
#[derive(Clone, Debug)]
pub struct RateSettings {
    /// The server's address, with or without `/v1`.
    pub url: String,
    /// Certificates of authorities in PEM format, which are trusted in addition to the public authorities.
    pub ca: Option<Vec<u8>>,
    /// The model that is requested; `None`: the first one that the server lists.
    pub model: Option<String>,
    /// Headers of every request, such as an API key.
    pub headers: HeaderMap,
    /// The number of tokens in the longest prompt.
    pub prompt_tokens_max: u64,
    /// The number of prompt tokens that a worker computes in one step.
    pub chunk_tokens: u64,
    /// The maximum number of answers that are generated at the same time.
    pub batch_max: usize,
    /// The time limit for all measurements together.
    pub timeout: Duration,
}

/// The rates of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredRates {
    /// The number of prompt tokens that are computed per second, not counting the fixed time of a step.
    pub prefill_tokens_per_second: f64,
    /// The fixed time of a step that computes prompt tokens.
    pub prefill_step_ms: f64,
    /// The fixed time of a step that generates tokens.
    pub decode_step_ms: f64,
    /// The time that each generating sequence adds to a step.
    pub decode_sequence_ms: f64,
    /// The measured prompts: for each, the number of computed tokens and the time to the first token in milliseconds.
    pub prompts: Vec<(u64, f64)>,
    /// The measured batches: for each, the number of answers per worker and the time between two tokens in milliseconds.
    pub batches: Vec<(f64, f64)>,
    /// The number of workers among which the batches were divided.
    pub decode_workers: usize,
}

/// The reason why rates cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum RatesError {
    /// The address or the certificates are wrong.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The server cannot be measured.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A request failed.
    #[error("a request was not answered ({}): {}", .0.class, .0.message)]
    Request(Failure),
    /// The server does not report token counts, or it generated no token.
    #[error("the server's answers report no `usage` or too few tokens; use a server that reports `usage` and obeys `ignore_eos`")]
    NoUsage,
    /// The measured times do not grow with the number of tokens, so no rate follows from them.
    #[error(
        "the time to the first token does not grow with the prompt, so no rate follows; allow longer prompts with --prompt-tokens-max"
    )]
    Flat,
    /// The time limit has passed.
    #[error(
        "the measurements were not complete within {0} s; allow more with --timeout, or use shorter prompts with --prompt-tokens-max"
    )]
    Timeout(u64),
}

/// Measures the rates of a server that serves no other requests. The server should have one worker, because a batch is divided among several
/// workers. `show` receives a line about each measurement.
///
/// # Errors
/// Fails if the server cannot be reached, refuses a request, reports no usage, or is too slow.
pub async fn rates(settings: &RateSettings, show: impl Fn(String)) -> Result<MeasuredRates, RatesError> {
    let measured = tokio::time::timeout(settings.timeout, measure(settings, &show)).await;
    measured.unwrap_or_else(|_| Err(RatesError::Timeout(settings.timeout.as_secs())))
}

async fn measure(settings: &RateSettings, show: &impl Fn(String)) -> Result<MeasuredRates, RatesError> {
    let http = Http::new(&settings.url, settings.ca.as_deref(), settings.headers.clone())?;
    let target = BenchTarget::find(http, settings.model.clone()).await?;
    let bodies = BodyFields { model: target.model.clone(), max_tokens: None, ignore_eos: true, extra: Map::new() };
    let mut probe = Probe { http: target.http, bodies, rng: Rng::new(), tokens_per_word: 1.0 };
    let first = probe.ask(FIRST_WORDS, 2).await?;
    probe.tokens_per_word = first.prompt_tokens.ok_or(RatesError::NoUsage)? as f64 / FIRST_WORDS as f64;
    let (batches, decode_workers) = probe.batches(settings.batch_max, show).await?;
    let (_, least_ms) = probe.shortest(1).await?;
    let prompts = probe.prompts(settings.prompt_tokens_max, show).await?;
    let rates = MeasuredRates::of(prompts, batches, least_ms, settings.chunk_tokens, decode_workers);
    if rates.prefill_tokens_per_second.is_finite() { Ok(rates) } else { Err(RatesError::Flat) }
}

impl MeasuredRates {
    /// Returns the rates that follow from these measurements. `least_ms` is the time to the first token of a prompt of one token: the time of
    /// the network, of the API and of the first step of an answer. It is part of the time of every other prompt. Prompts are computed in
    /// chunks of `chunk_tokens` tokens.
    fn of(prompts: Vec<(u64, f64)>, batches: Vec<(f64, f64)>, least_ms: f64, chunk_tokens: u64, decode_workers: usize) -> Self {
        let (decode_step_ms, decode_sequence_ms) = fit(batches.iter().map(|(batch, ms)| ([1.0, *batch], *ms, *ms)));
        let of_prompt = |(tokens, ms): &(u64, f64)| {
            let steps = tokens.div_ceil(chunk_tokens);
            ([steps as f64, *tokens as f64], (ms - least_ms).max(0.0), *ms)
        };
        let (prefill_step_ms, token_ms) = fit(prompts.iter().map(of_prompt));
        let prefill_tokens_per_second = 1e3 / token_ms;
        Self { prefill_tokens_per_second, prefill_step_ms, decode_step_ms, decode_sequence_ms, prompts, batches, decode_workers }
    }
}

struct Probe {
    http: Http,
    bodies: BodyFields,
    rng: Rng,
    tokens_per_word: f64,
}

impl Probe {
    /// Returns a prompt of this many random words, so that no prompt begins like another one. For 0 words the prompt is a single letter.
    fn prompt(&mut self, words: u64) -> MadePrompt {
        let word = |_| iter::repeat_with(|| self.rng.lowercase()).take(4).chain([' ']).collect::<String>();
        let text: String = (0..words).map(word).collect();
        MadePrompt::Text(if text.is_empty() { "a".to_owned() } else { text })
    }

    /// Returns the answer to a new prompt of about this many tokens. The times in the answer are counted from the moment when the request is
    /// sent.
    fn ask(&mut self, tokens: u64, answer_tokens: u64) -> impl Future<Output = Result<MeasuredAnswer, RatesError>> + use<> {
        let prompt = self.prompt((tokens as f64 / self.tokens_per_word) as u64);
        let request = self.bodies.completion(&prompt, answer_tokens, PromptKind::Text);
        let http = self.http.clone();
        async move {
            let start = Instant::now();
            let response =
                http.post(request.path, request.body).await.map_err(|error| RatesError::Request(Failure::of(&error)))?;
            let received = stream::read(response, start, &WantedParts::default()).await.map_err(RatesError::Request)?;
            Ok(received.answer)
        }
    }

    /// Measures prompts of increasing length. Returns, for each, the number of computed tokens and the time to the first token in
    /// milliseconds.
    async fn prompts(&mut self, tokens_max: u64, show: &impl Fn(String)) -> Result<Vec<(u64, f64)>, RatesError> {
        let mut found = Vec::new();
        let mut tokens = SHORTEST_TOKENS;
        while tokens <= tokens_max {
            // The length is a little below a power of two, so that no chunk has only one or two tokens.
            let (computed, ms) = self.shortest(tokens * 15 / 16).await?;
            show(format!("computed tokens: {computed}, TTFT {ms:.2} ms"));
            found.push((computed, ms));
            if found.len() > 1 && ms > PROMPT_MAX.as_secs_f64() * 1e3 {
                break;
            }
            tokens *= 2;
        }
        if found.len() < 2 { Err(RatesError::NoUsage) } else { Ok(found) }
    }

    /// Measures several prompts of about this many tokens. Returns the number of computed tokens, and the shortest time to the first token in
    /// milliseconds.
    async fn shortest(&mut self, tokens: u64) -> Result<(u64, f64), RatesError> {
        let mut best: Option<(u64, Duration)> = None;
        for _ in 0..REPEATS {
            let answer = self.ask(tokens, 2).await?;
            let prompt = answer.prompt_tokens.ok_or(RatesError::NoUsage)?;
            // Some tokens have no text, such as an end that the server ignores. Their arrival cannot be seen.
            let Some(first) = answer.first_token else { continue };
            let cached = CachedCount::tokens(answer.cached).unwrap_or(0);
            // The last token of the prompt is computed in the first step of the answer.
            let computed = prompt.saturating_sub(cached + 1);
            best = best.filter(|(_, shortest)| *shortest <= first).or(Some((computed, first)));
        }
        let (computed, shortest) = best.ok_or(RatesError::NoUsage)?;
        Ok((computed, shortest.as_secs_f64() * 1e3))
    }

    /// Measures batches of increasing size. Returns, for each, the number of answers per worker and the time between two tokens in
    /// milliseconds. Also returns the number of workers.
    async fn batches(&mut self, batch_max: usize, show: &impl Fn(String)) -> Result<(Vec<(f64, f64)>, usize), RatesError> {
        let (mut found, mut workers_max) = (Vec::new(), 1);
        let mut batch = 1;
        while batch <= batch_max {
            let asked: Vec<_> = (0..batch).map(|_| self.ask(SHORTEST_TOKENS / 2, ANSWER_TOKENS)).collect();
            let answers = try_join_all(asked).await?;
            let workers: BTreeSet<&Arc<str>> = answers.iter().filter_map(|answer| answer.decode_worker.as_ref()).collect();
            let workers = workers.len().max(1);
            let ms = token_ms(&answers).ok_or(RatesError::NoUsage)?;
            show(format!("answers at once: {batch}, ITL {ms:.2} ms"));
            found.push((batch as f64 / workers as f64, ms));
            workers_max = workers_max.max(workers);
            batch *= 2;
        }
        Ok((found, workers_max))
    }
}

/// Returns the time between two tokens while all answers were generated: the median of all gaps, multiplied by the number of gaps per token,
/// because a server may send several tokens at once.
fn token_ms(answers: &[MeasuredAnswer]) -> Option<f64> {
    let gaps = answers.iter().flat_map(|answer| &answer.gaps).flat_map(|gap| iter::repeat_n(gap.length, gap.count as usize));
    let mut gaps: Vec<Duration> = gaps.collect();
    gaps.sort_unstable();
    let tokens: u64 = answers.iter().map(|answer| answer.output_tokens.saturating_sub(1)).sum();
    let median = gaps.get(gaps.len() / 2)?;
    (tokens > 0).then(|| median.as_secs_f64() * 1e3 * gaps.len() as f64 / tokens as f64)
}

/// Fits two factors, neither of which is negative, by least squares. Each point has two numbers x, a value y, and a measured time above 0.
/// The error of a point is the difference between `first * x[0] + second * x[1]` and y, divided by the measured time.
fn fit(points: impl Iterator<Item = ([f64; 2], f64, f64)>) -> (f64, f64) {
    let (mut a, mut b) = ([[0.0; 2]; 2], [0.0; 2]);
    for (x, y, measured) in points {
        let x = x.map(|x| x / measured);
        for row in 0..2 {
            b[row] += x[row] * y / measured;
            (0..2).for_each(|column| a[row][column] += x[row] * x[column]);
        }
    }
    let determinant = a[0][0] * a[1][1] - a[0][1] * a[1][0];
    let both = ((b[0] * a[1][1] - b[1] * a[0][1]) / determinant, (b[1] * a[0][0] - b[0] * a[1][0]) / determinant);
    match both {
        (first, second) if first >= 0.0 && second >= 0.0 => (first, second),
        (first, _) if first < 0.0 => (0.0, b[1] / a[1][1]),
        _ => (b[0] / a[0][0], 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Gap;

    #[test]
    fn fitted_factors_match_the_points_and_are_never_negative() {
        let near = |(found, other): (f64, f64), expected: (f64, f64)| {
            assert!((found - expected.0).abs() < 1e-9 && (other - expected.1).abs() < 1e-9, "{found} {other}");
        };
        let line = |step: f64, each: f64| [1.0, 4.0, 16.0].map(|batch| ([1.0, batch], step + each * batch, 1.0));
        near(fit(line(6.0, 0.1).into_iter()), (6.0, 0.1));
        near(fit(line(6.0, 0.0).into_iter()), (6.0, 0.0));
        // The fitted line never begins below zero and never falls.
        assert_eq!(fit([([1.0, 1.0], 1.0, 1.0), ([1.0, 2.0], 3.0, 3.0)].into_iter()).0, 0.0);
        assert_eq!(fit([([1.0, 1.0], 3.0, 3.0), ([1.0, 2.0], 1.0, 1.0)].into_iter()).1, 0.0);
    }

    #[test]
    fn rates_computed_from_measured_times_equal_the_rates_of_the_device() {
        // The network and the API add 3 ms to the time of every prompt.
        let prompt = |tokens: u64| (tokens, 3.0 + 6.1 + 4.0 * tokens.div_ceil(512) as f64 + tokens as f64 / 20.0);
        let batch = |answers: f64| (answers, 6.0 + 0.1 * answers);
        let prompts = [59, 119, 239, 479, 959, 1_919].map(prompt).to_vec();
        let found = MeasuredRates::of(prompts, [1.0, 2.0, 4.0, 8.0].map(batch).to_vec(), 9.1, 512, 1);
        let rates = [found.prefill_tokens_per_second, found.prefill_step_ms, found.decode_step_ms, found.decode_sequence_ms];
        for (found, given) in rates.into_iter().zip([20_000.0, 4.0, 6.0, 0.1]) {
            assert!((found / given - 1.0).abs() < 1e-6, "{rates:?}");
        }
    }

    /// On this device all short prompts take one step of the same duration, so only long prompts show the rate.
    #[test]
    fn short_prompts_of_equal_duration_do_not_distort_the_rate() {
        let of = |short_ms: f64| {
            let prompts = vec![(59, short_ms), (1_919, 9.0 + 96.0), (3_839, 9.0 + 192.0), (7_679, 9.0 + 384.0)];
            MeasuredRates::of(prompts, vec![(1.0, 6.0), (2.0, 6.0)], 9.0, 8_192, 1).prefill_tokens_per_second
        };
        for short_ms in [8.9, 9.0, 9.05, 12.0] {
            assert!((of(short_ms) / 20_000.0 - 1.0).abs() < 0.1, "{short_ms} ms: {} tokens/s", of(short_ms));
        }
        let flat = MeasuredRates::of(vec![(59, 9.0), (119, 9.0)], vec![(1.0, 6.0), (2.0, 6.0)], 9.0, 512, 1);
        assert!(!flat.prefill_tokens_per_second.is_finite());
    }

    #[test]
    fn token_time_is_the_median_gap_divided_by_the_tokens_that_arrive_together() {
        let ms = Duration::from_millis;
        let answer = |tokens, gaps: &[(u64, u32)]| MeasuredAnswer {
            output_tokens: tokens,
            gaps: gaps.iter().map(|(length, count)| Gap { length: ms(*length), count: *count }).collect(),
            ..MeasuredAnswer::default()
        };
        assert_eq!(token_ms(&[answer(6, &[(500, 1), (10, 4)])]), Some(10.0));
        assert_eq!(token_ms(&[answer(9, &[(20, 4)])]), Some(10.0));
        assert_eq!(token_ms(&[answer(1, &[])]), None);
    }
}
