//! The command `tandem audit check`: compares the usage that clients received with the workers' ledgers and the metrics.
//!
//! An attempt has *won* if the ledger has the outcome `won` for it: its decode worker recorded that it sent the prompt's first token to the frontend.
//! The last attempt that won is the prompt's *winning attempt*, whose token counts apply to the prompt.
//!
//! This module does no I/O: evidence is its input, and findings are its output. `docs/adr/007-ledger.md` has the rules.

mod evidence;
mod metrics;
mod report;
#[cfg(test)]
mod tests;

pub use evidence::{ClientLine, CountSource, Evidence, EvidenceError, ReportedUsage, metrics_of, read};
pub use metrics::MetricSamples;
pub use report::{UsageReport, report};

use std::collections::{BTreeMap, BTreeSet};
use tandem_frontend::AuditResult;
use tandem_worker::{LedgerLine, Outcome};

/// A contradiction in the evidence, with the prompt, request, worker or metric that it concerns.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum Finding {
    #[error(
        "prompt {prompt} attempt {attempt}: the ledger line of {worker} does not add up \
         (it must have computed + cached = prompt, sum of the tiers = cached, cached < prompt)"
    )]
    Arithmetic { prompt: String, attempt: u32, worker: String },
    #[error("prompt {prompt} attempt {attempt}: counted {times} times instead of once; is a ledger listed twice?")]
    Twice { prompt: String, attempt: u32, times: usize },
    #[error(
        "prompt {prompt} attempt {attempt}: the attempt won, but no ledger has its token counts; is a worker's ledger missing?"
    )]
    Uncounted { prompt: String, attempt: u32 },
    #[error(
        "request {request}: the client received an answer to {prompts} prompts, but the ledgers have a winning attempt for {won}; \
         is a worker's ledger missing?"
    )]
    NoWinner { request: String, prompts: usize, won: usize },
    #[error(
        "no id of the client files is in any ledger ({answers} answers, for example {example}): record the x-request-id of the response, \
         not one that the client sends"
    )]
    UnknownIds { answers: usize, example: String },
    #[error(
        "request {request}: the client's usage has {reported} {what} tokens, \
         but the workers counted {counted} for the winning attempts ({attempts})"
    )]
    Differs { request: String, what: &'static str, reported: u64, counted: Range, attempts: String },
    #[error(
        "number of requests in the ledgers (such as {example}) that are in no client file: {count}; \
         of clients that disconnected before they received their request's id: {explained}; is a client file missing?"
    )]
    WithoutClient { count: usize, example: String, explained: usize },
    #[error("{series} is {found}, but the finished answers in the client files add up to {expected}")]
    FrontendSum { series: &'static str, found: f64, expected: Range },
    #[error("{series}{{worker=\"{worker}\"}} is {found}, but the sum of the worker's ledger is {expected}")]
    WorkerSum { series: &'static str, worker: String, found: f64, expected: f64 },
    #[error(
        "worker {worker} is in the ledger but not in the metrics; add its metrics, or set --lost-worker {worker} if it was killed"
    )]
    NoMetrics { worker: String },
    #[error("worker {worker} has lost {lines} lines of its ledger, which cannot be checked")]
    LinesLost { worker: String, lines: f64 },
    #[error("worker {worker}: {free} free + {cached} cached + {in_use} in use blocks are not its capacity of {capacity}")]
    Blocks { worker: String, free: f64, cached: f64, in_use: f64, capacity: f64 },
    #[error("{series} is {found} although no request should be running: a leak, or the cluster was not idle yet")]
    Held { series: String, found: f64 },
}

/// The bounds of a sum. Three things can be uncertain: whether the frontend finished the answers of clients that disconnected, which
/// attempt is the winning one if a worker was killed, and how much a killed frontend had counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Range {
    /// The lower bound, from certain values only.
    pub min: f64,
    /// The upper bound: the sum of the certain and the possible values.
    pub max: f64,
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.min == self.max { write!(f, "{}", self.min) } else { write!(f, "{} to {}", self.min, self.max) }
    }
}

impl std::iter::Sum for Range {
    fn sum<I: Iterator<Item = Self>>(ranges: I) -> Self {
        ranges.fold(Self::default(), |sum, range| Self { min: sum.min + range.min, max: sum.max + range.max })
    }
}

impl Range {
    fn add(&mut self, finished: bool, value: u64) {
        self.max += value as f64;
        if finished {
            self.min += value as f64;
        }
    }

    fn over(values: impl Iterator<Item = u64>) -> Self {
        let values = values.map(|value| value as f64);
        values
            .fold(Self { min: f64::MAX, max: 0.0 }, |range, value| Self { min: range.min.min(value), max: range.max.max(value) })
    }

    fn holds(self, value: f64) -> bool {
        (self.min..=self.max).contains(&value)
    }
}

#[derive(Default)]
struct Attempt {
    /// The worker, prompt tokens and cached tokens of each `scheduled` line. More than one such line is a finding.
    counted: Vec<(String, u32, u32)>,
    won: bool,
    /// Whether the ledger has the attempt's outcome. When no request runs, an outcome is missing only if the decode worker was killed.
    ended: bool,
}

/// The winning attempt of a prompt, whose token counts apply to the prompt.
#[derive(Default)]
struct Winner<'a> {
    /// The token counts of the winning attempt. If a killed worker makes it uncertain which attempt won, the list has the counts of all attempts that
    /// may have won.
    counts: Vec<Count<'a>>,
    /// Whether a count is lost because the worker that had recorded it was killed.
    unknown: bool,
}

struct Count<'a> {
    attempt: u32,
    worker: &'a str,
    prompt: u64,
    cached: u64,
}

impl Winner<'_> {
    fn prompt(&self) -> Range {
        Range::over(self.counts.iter().map(|count| count.prompt))
    }

    fn cached(&self) -> Range {
        Range::over(self.counts.iter().map(|count| count.cached))
    }
}

/// The amount of evidence that an audit has checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// The number of complete answers that clients received.
    pub answers: usize,
    /// The number of answers whose cached tokens are marked as an estimate.
    pub estimates: usize,
    /// The number of attempts in the ledgers.
    pub attempts: usize,
    /// The number of workers whose metrics were read.
    pub workers: usize,
    /// The number of answers whose usage cannot be compared with the ledgers, because the counts of a prompt were lost with a killed
    /// worker.
    pub unverified: usize,
}

impl Checked {
    /// Returns the result that a frontend shows on its dashboard and in its metrics.
    pub fn result(&self, findings: usize) -> AuditResult {
        let [findings, answers, estimates, unverified] =
            [findings, self.answers, self.estimates, self.unverified].map(|count| count as u64);
        AuditResult { findings, answers, estimates, unverified, checked_unix_s: 0 }
    }
}

/// Checks the evidence; returns how much was checked, and all contradictions.
pub fn check(evidence: &Evidence) -> (Checked, Vec<Finding>) {
    let mut findings = Vec::new();
    let prompts = attempts(&evidence.ledger, &mut findings);
    let lost = !evidence.lost_workers.is_empty();
    let mut requests: Requests<'_> = BTreeMap::new();
    for (prompt, attempts) in &prompts {
        requests.entry(request_of(prompt)).or_default().extend(winner(prompt, attempts, lost, &mut findings));
    }
    let (sums, unverified) = check_clients(evidence, &requests, &mut findings);
    for (series, mut expected) in sums {
        if evidence.lost_frontend {
            expected.min = 0.0;
        }
        let found = evidence.metrics.sum(series.0, series.1);
        if !expected.holds(found) {
            findings.push(Finding::FrontendSum { series: series.0, found, expected });
        }
    }
    check_workers(evidence, &mut findings);
    let usages = || evidence.client.iter().filter_map(|line| line.usage.as_ref());
    let checked = Checked {
        answers: usages().count(),
        estimates: usages().filter(|usage| usage.source != CountSource::Worker).count(),
        attempts: prompts.values().map(BTreeMap::len).sum(),
        workers: evidence.metrics.values("tandem_worker_kv_capacity_blocks", "worker").len(),
        unverified,
    };
    (checked, findings)
}

/// Returns the id of the prompt's request. A prompt's id is its request's id, a dash, and its index.
fn request_of(prompt: &str) -> &str {
    prompt.rsplit_once('-').map_or(prompt, |(request, _)| request)
}

fn attempts<'a>(ledger: &'a [LedgerLine], findings: &mut Vec<Finding>) -> BTreeMap<&'a str, BTreeMap<u32, Attempt>> {
    let mut prompts: BTreeMap<&str, BTreeMap<u32, Attempt>> = BTreeMap::new();
    for line in ledger {
        match line {
            LedgerLine::Scheduled { request_id, attempt, worker, prompt, cached, computed, by_tier, .. } => {
                let tiers: u64 = by_tier.values().map(|tokens| u64::from(*tokens)).sum();
                let adds_up = match (cached, computed) {
                    (Some(cached), Some(computed)) => {
                        u64::from(*computed) + u64::from(*cached) == u64::from(*prompt)
                            && tiers == u64::from(*cached)
                            && cached < prompt
                    }
                    // The worker's engine does not report cached tokens, so the usage of the answer has an estimate.
                    (None, None) => tiers == 0,
                    _ => false,
                };
                if !adds_up {
                    let (prompt, worker) = (request_id.clone(), worker.clone());
                    findings.push(Finding::Arithmetic { prompt, attempt: *attempt, worker });
                }
                let entry = prompts.entry(request_id).or_default().entry(*attempt).or_default();
                entry.counted.push((worker.clone(), *prompt, cached.unwrap_or(0)));
            }
            LedgerLine::Ended { request_id, attempt, outcome, .. } => {
                let entry = prompts.entry(request_id).or_default().entry(*attempt).or_default();
                entry.won |= *outcome == Outcome::Won;
                entry.ended = true;
            }
        }
    }
    for (prompt, attempts) in &prompts {
        for (attempt, entry) in attempts.iter().filter(|(_, entry)| entry.counted.len() > 1) {
            let (prompt, times) = ((*prompt).to_owned(), entry.counted.len());
            findings.push(Finding::Twice { prompt, attempt: *attempt, times });
        }
    }
    prompts
}

/// Returns the prompt's winning attempt, which is the last attempt that won; `None` if no attempt has won. An earlier attempt may also have won, if
/// the frontend abandoned it while its first token was in flight. If workers were `lost`, a later attempt without a recorded outcome may have won
/// instead, so the result has the token counts of such attempts, too.
fn winner<'a>(prompt: &str, attempts: &'a BTreeMap<u32, Attempt>, lost: bool, findings: &mut Vec<Finding>) -> Option<Winner<'a>> {
    let won = attempts.iter().rev().find(|(_, entry)| entry.won).map_or(0, |(attempt, _)| *attempt);
    let mut winner = Winner::default();
    for (attempt, entry) in attempts.range(won..).filter(|(attempt, entry)| **attempt == won || lost && !entry.ended) {
        match entry.counted.first() {
            Some((worker, tokens, cached)) => {
                winner.counts.push(Count { attempt: *attempt, worker, prompt: u64::from(*tokens), cached: u64::from(*cached) })
            }
            None if lost => winner.unknown = true,
            None => findings.push(Finding::Uncounted { prompt: prompt.to_owned(), attempt: *attempt }),
        }
    }
    (winner.unknown || !winner.counts.is_empty()).then_some(winner)
}

/// The winning attempts of each request's prompts, by the request's id.
type Requests<'a> = BTreeMap<&'a str, Vec<Winner<'a>>>;

/// The name of a metric, and a text that the labels of the summed series contain.
type Series = (&'static str, &'static str);

const PROMPTS: Series = ("tandem_frontend_request_cached_tokens_count", "");
const PROMPT_TOKENS: Series = ("tandem_frontend_request_prompt_tokens_sum", "");
const CACHED_TOKENS: Series = ("tandem_frontend_request_cached_tokens_sum", "");
const CACHED_BY_WORKERS: Series = ("tandem_frontend_cached_tokens_total", "source=\"worker\"");

/// The sums that the frontends' metrics must equal, within these bounds.
#[derive(Default)]
struct Sums {
    prompts: Range,
    prompt_tokens: Range,
    cached_tokens: Range,
    by_workers: Range,
}

impl Sums {
    /// Raises the upper bounds by the answers to one request, which its client has not received, but which the frontend may have finished.
    fn add_possible(&mut self, winners: &[Winner<'_>]) {
        for winner in winners {
            self.prompts.max += 1.0;
            self.prompt_tokens.max += winner.prompt().max;
            self.cached_tokens.max += winner.prompt().max;
            self.by_workers.max += winner.cached().max;
        }
    }
}

/// Compares each client's usage with the winning attempts; returns the expected sums of the frontends, and the number of answers that could
/// not be compared.
fn check_clients(evidence: &Evidence, requests: &Requests<'_>, findings: &mut Vec<Finding>) -> ([(Series, Range); 4], usize) {
    let mut sums = Sums::default();
    let mut known = BTreeSet::new();
    let (mut disconnected, mut unverified) = (0, 0);
    for line in &evidence.client {
        let winners = line.request_id.as_deref().and_then(|request| requests.get(request)).map_or(&[][..], Vec::as_slice);
        match &line.request_id {
            Some(request) => drop(known.insert(request.as_str())),
            None => disconnected += 1,
        }
        let Some(usage) = &line.usage else {
            sums.add_possible(winners);
            continue;
        };
        let request = line.request_id.clone().unwrap_or_default();
        sums.prompts.add(true, usage.prompts as u64);
        sums.prompt_tokens.add(true, usage.prompt_tokens);
        sums.cached_tokens.add(true, usage.cached_tokens);
        if usage.source == CountSource::Worker {
            sums.by_workers.add(true, usage.cached_tokens);
        } else if usage.prompts > 1 {
            // Workers may have counted some of the answer's prompts.
            sums.by_workers.add(false, usage.cached_tokens);
        }
        if !evidence.lost_workers.is_empty()
            && winners.len() <= usage.prompts
            && (winners.len() < usage.prompts || winners.iter().any(|winner| winner.unknown))
        {
            unverified += 1;
            continue;
        }
        if winners.len() != usage.prompts {
            findings.push(Finding::NoWinner { request, prompts: usage.prompts, won: winners.len() });
            continue;
        }
        let counts = winners.iter().flat_map(|winner| &winner.counts);
        let attempts: Vec<String> = counts.map(|count| format!("attempt {} on {}", count.attempt, count.worker)).collect();
        let mut compare = |what, reported, counted: Range| {
            if !counted.holds(reported as f64) {
                let (request, attempts) = (request.clone(), attempts.join(", "));
                findings.push(Finding::Differs { request, what, reported, counted, attempts });
            }
        };
        compare("prompt", usage.prompt_tokens, winners.iter().map(Winner::prompt).sum());
        // An estimate is not compared: the answer marks it, and it may differ from the workers' counts.
        if usage.source == CountSource::Worker {
            compare("cached", usage.cached_tokens, winners.iter().map(Winner::cached).sum());
        }
    }
    // If no client's id is in a ledger, one finding replaces those of all answers, because they have the same reason.
    if !known.is_empty() && !known.iter().any(|id| requests.contains_key(id)) {
        let missing: Vec<Finding> = findings.extract_if(.., |finding| matches!(finding, Finding::NoWinner { .. })).collect();
        if let Some(Finding::NoWinner { request, .. }) = missing.first() {
            findings.push(Finding::UnknownIds { answers: missing.len(), example: request.clone() });
        }
    }
    let without_client = requests.iter().filter(|(request, winners)| !known.contains(**request) && !winners.is_empty());
    let without_client: Vec<_> = without_client.collect();
    without_client.iter().for_each(|(_, winners)| sums.add_possible(winners));
    if let Some((example, _)) = without_client.first().filter(|_| without_client.len() > disconnected) {
        findings.push(Finding::WithoutClient {
            count: without_client.len(),
            example: (**example).to_owned(),
            explained: disconnected,
        });
    }
    let Sums { prompts, prompt_tokens, cached_tokens, by_workers } = sums;
    let sums =
        [(PROMPTS, prompts), (PROMPT_TOKENS, prompt_tokens), (CACHED_TOKENS, cached_tokens), (CACHED_BY_WORKERS, by_workers)];
    (sums, unverified)
}

#[derive(Clone, Copy, Default)]
struct Tally {
    prompts: f64,
    prompt_tokens: f64,
    cached_tokens: f64,
}

fn check_workers(evidence: &Evidence, findings: &mut Vec<Finding>) {
    let metrics = &evidence.metrics;
    let mut tallies: BTreeMap<&str, Tally> = BTreeMap::new();
    for line in &evidence.ledger {
        if let LedgerLine::Scheduled { worker, prompt, cached: Some(cached), .. } = line {
            let tally = tallies.entry(worker).or_default();
            tally.prompts += 1.0;
            tally.prompt_tokens += f64::from(*prompt);
            tally.cached_tokens += f64::from(*cached);
        }
    }
    let capacities = metrics.values("tandem_worker_kv_capacity_blocks", "worker");
    for worker in tallies.keys().filter(|worker| !capacities.contains_key(**worker) && !evidence.lost_workers.contains(**worker))
    {
        findings.push(Finding::NoMetrics { worker: (*worker).to_owned() });
    }
    for (worker, capacity) in &capacities {
        let of_worker = format!("worker=\"{worker}\"");
        let sum = |series, labels: &str| metrics.sum_of(series, &[&of_worker, labels]);
        let tally = tallies.get(worker.as_str()).copied().unwrap_or_default();
        for (series, expected) in [
            ("tandem_worker_prefix_cache_requests_total", tally.prompts),
            ("tandem_worker_prompt_tokens_total", tally.prompt_tokens),
            ("tandem_worker_cached_tokens_total", tally.cached_tokens),
        ] {
            let found = sum(series, "");
            if found != expected && !evidence.lost_workers.contains(worker) {
                findings.push(Finding::WorkerSum { series, worker: worker.clone(), found, expected });
            }
        }
        let lines = sum("tandem_worker_ledger_lost_total", "");
        if lines > 0.0 {
            findings.push(Finding::LinesLost { worker: worker.clone(), lines });
        }
        let [free, cached, in_use] =
            ["free", "cached", "in_use"].map(|state| sum("tandem_worker_kv_blocks", &format!("state=\"{state}\"")));
        if free + cached + in_use != *capacity {
            findings.push(Finding::Blocks { worker: worker.clone(), free, cached, in_use, capacity: *capacity });
        }
        if in_use > 0.0 {
            findings.push(Finding::Held {
                series: format!("tandem_worker_kv_blocks{{{of_worker},state=\"in_use\"}}"),
                found: in_use,
            });
        }
    }
    for series in ["tandem_router_bookings", "tandem_frontend_inflight_requests"] {
        let found = metrics.sum(series, "");
        if found > 0.0 {
            findings.push(Finding::Held { series: series.to_owned(), found });
        }
    }
}
