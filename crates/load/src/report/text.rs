//! Formats a report as text for a terminal.

use super::{
    PrefixTokens, Report, TimeSummary, Tokens,
    format::{counted, decimal, percent, rounded_percent, whole},
};
use comfy_table::{CellAlignment, Table, presets::NOTHING};
use std::fmt::Write;

/// Returns the report as text of several lines, with a newline at the end.
pub fn text(report: &Report) -> String {
    let mut out = format!("{}\n\n", report.name);
    if !report.facts.is_empty() {
        out += &table(report.facts.iter().map(|fact| vec![fact.name.clone(), fact.value.clone()]).collect(), 2);
        out.push('\n');
    }
    out += &(requests(report) + "\n");
    for error in &report.errors {
        let _ = writeln!(out, "  {}: {}; the first one: {}", counted(error.count, "failure"), error.class, error.example);
    }
    let times = [
        ("TTFT, ms", &report.ttft),
        ("ITL, ms", &report.itl),
        ("E2E, ms", &report.e2e),
        ("late start, ms", &report.late.lateness),
    ];
    let mut rows = vec![["", "mean", "p50", "p90", "p99", "max"].map(str::to_owned).to_vec()];
    rows.extend(times.iter().filter_map(|(name, summary)| Some(times_row(name, summary.as_ref()?))));
    if rows.len() > 1 {
        let _ = write!(out, "\n{}", table(rows, 1));
    }
    out.push('\n');
    for sentence in sentences(report) {
        out += &(sentence + "\n");
    }
    out
}

/// A column of a comparison: the two lines of its heading, and a function that returns a report's value, which is empty if it is not known.
type ComparedColumn = (&'static str, &'static str, fn(&Report) -> String);

const COLUMNS: [ComparedColumn; 13] = [
    ("reqs", "per s", |report| decimal(report.requests.answered_per_second)),
    ("", "failed", |report| match report.requests.failed {
        0 => String::new(),
        failed => whole(failed),
    }),
    ("TTFT ms", "mean", |report| of(&report.ttft, |ttft| ttft.mean_ms)),
    ("", "p50", |report| of(&report.ttft, |ttft| ttft.p50_ms)),
    ("", "p99", |report| of(&report.ttft, |ttft| ttft.p99_ms)),
    ("ITL ms", "mean", |report| of(&report.itl, |itl| itl.mean_ms)),
    ("", "p99", |report| of(&report.itl, |itl| itl.p99_ms)),
    ("E2E ms", "mean", |report| of(&report.e2e, |e2e| e2e.mean_ms)),
    ("", "p99", |report| of(&report.e2e, |e2e| e2e.p99_ms)),
    ("hit", "rate", |report| report.tokens.hit_rate().map(rounded_percent).unwrap_or_default()),
    ("tokens", "per s", |report| decimal(report.tokens.output_per_second)),
    ("good-", "put", |report| report.goodput.as_ref().map(|goodput| percent(goodput.share)).unwrap_or_default()),
    ("busiest", "/ mean", busiest),
];

fn of(summary: &Option<TimeSummary>, value: fn(&TimeSummary) -> f64) -> String {
    summary.as_ref().map(|summary| decimal(value(summary))).unwrap_or_default()
}

/// Returns the balances of computed prompt tokens and of generated tokens, which share one column.
fn busiest(report: &Report) -> String {
    let Some(balance) = &report.balance else { return String::new() };
    let ratios = [balance.computed_max_to_mean, balance.output_max_to_mean];
    ratios.map(|ratio| ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"))).join(" ")
}

/// Returns a table that compares runs, with a row for each report and a newline at the end. A column without a value in any report is
/// omitted.
pub fn comparison(reports: &[Report]) -> String {
    let names = [String::new(), String::new()].into_iter().chain(reports.iter().map(|report| report.name.clone()));
    let mut rows: Vec<Vec<String>> = names.map(|name| vec![name]).collect();
    for (group, head, value) in COLUMNS {
        let values: Vec<String> = reports.iter().map(value).collect();
        if values.iter().any(|value| !value.is_empty()) {
            let cells = [group.to_owned(), head.to_owned()].into_iter().chain(values);
            rows.iter_mut().zip(cells).for_each(|(row, cell)| row.push(cell));
        }
    }
    table(rows, 1)
}

/// Returns one sentence about the number of requests.
pub(super) fn requests(report: &Report) -> String {
    let requests = &report.requests;
    let stopped = if requests.stopped > 0 { format!(", {} stopped in flight", whole(requests.stopped)) } else { String::new() };
    format!(
        "{} in {} s: {} answered ({}/s), {} failed{stopped}",
        counted(requests.sent, "request"),
        decimal(report.seconds),
        whole(requests.answered),
        decimal(requests.answered_per_second),
        whole(requests.failed)
    )
}

/// Returns the sentences about what the table of times does not show: tokens, goodput, balance, and what the reader must know to trust the
/// figures.
pub(super) fn sentences(report: &Report) -> Vec<String> {
    let tokens = &report.tokens;
    let mut found = vec![format!(
        "tokens: {} of prompts ({}/s), {} generated ({}/s)",
        whole(tokens.prompt),
        decimal(tokens.prompt_per_second),
        whole(tokens.output),
        decimal(tokens.output_per_second)
    )];
    found.extend(cached(tokens));
    found.extend(report.prefix.as_ref().into_iter().flat_map(prefixes));
    if let Some(goodput) = &report.goodput {
        let limits = [("TTFT", goodput.slo_ttft_ms), ("mean ITL", goodput.slo_itl_ms), ("E2E", goodput.slo_e2e_ms)];
        let limits: Vec<String> =
            limits.iter().filter_map(|(name, ms)| Some(format!("{name} ≤ {} ms", decimal((*ms)?)))).collect();
        let (requests, share) = (counted(goodput.requests, "request"), percent(goodput.share));
        found.push(format!(
            "goodput: {}/s: {requests}, {share} of those that ended, had {}",
            decimal(goodput.per_second),
            limits.join(", ")
        ));
    }
    if let Some(balance) = &report.balance {
        let ratio = |ratio: Option<f64>| ratio.map_or("none".to_owned(), |ratio| format!("{ratio:.2}"));
        found.push(format!(
            "balance of {}: busiest / mean {} by computed prompt tokens, {} by generated tokens",
            counted(report.workers.len() as u64, "worker"),
            ratio(balance.computed_max_to_mean),
            ratio(balance.output_max_to_mean)
        ));
    }
    if report.late.requests > 0 {
        found.push(format!(
            "{} sent more than 10 ms late; all times count from when a request was due",
            counted(report.late.requests, "request")
        ));
    }
    for (count, what) in [(tokens.other_prompt_length, "prompts"), (tokens.other_answer_length, "answers")] {
        if count > 0 {
            let advice = if what == "answers" { " (--ignore-eos makes answers as long as in the trace)" } else { "" };
            found.push(format!("{} {what} have another number of tokens than they should{advice}", whole(count)));
        }
    }
    found
}

/// Returns a sentence about the cached tokens: how many there are, and how they are known.
fn cached(tokens: &Tokens) -> Option<String> {
    let rate = tokens.hit_rate().map(rounded_percent);
    let known = [
        (tokens.cached_counted, "counted by workers"),
        (tokens.cached_estimated, "estimated"),
        (tokens.cached_unmarked, "reported without a mark"),
    ];
    let known: Vec<String> =
        known.iter().filter(|(count, _)| *count > 0).map(|(count, how)| format!("{} {how}", whole(*count))).collect();
    let unknown = match tokens.answers_without_cached {
        0 => String::new(),
        count => format!("; unknown for {}", counted(count, "answer")),
    };
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    match rate {
        Some(rate) => Some(format!("cached tokens: {rate} of prompts ({known}){unknown}")),
        None if tokens.answers_without_cached > 0 => Some("cached tokens: the server does not report them".to_owned()),
        None => None,
    }
}

/// Returns sentences about the tokens that could have been cached, and about those that were not.
fn prefixes(prefix: &PrefixTokens) -> impl Iterator<Item = String> {
    let of_prompts = |tokens: u64| rounded_percent(tokens as f64 / prefix.prompt_tokens.max(1) as f64);
    let funnel = format!(
        "cached on any worker {}, on a worker that could compute the prompt {}, expected on the chosen one {}, found {}",
        of_prompts(prefix.possible_tokens),
        of_prompts(prefix.eligible_tokens),
        of_prompts(prefix.chosen_tokens),
        of_prompts(prefix.found_tokens)
    );
    let mut causes: Vec<_> = prefix.uncached.iter().collect();
    causes.sort_by_key(|(_, tokens)| std::cmp::Reverse(**tokens));
    let causes: Vec<String> =
        causes.iter().map(|(cause, tokens)| format!("{} {}", cause.replace('_', " "), of_prompts(**tokens))).collect();
    let causes = (!causes.is_empty()).then(|| format!("not cached: {}", causes.join(", ")));
    std::iter::once(funnel).chain(causes)
}

fn times_row(name: &str, summary: &TimeSummary) -> Vec<String> {
    let times = [summary.mean_ms, summary.p50_ms, summary.p90_ms, summary.p99_ms, summary.max_ms];
    [name.to_owned()].into_iter().chain(times.map(decimal)).collect()
}

/// Formats rows as columns. The first `left` columns are left-aligned, the others right-aligned.
fn table(rows: Vec<Vec<String>>, left: usize) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).add_rows(rows);
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2)).set_cell_alignment(if at < left { CellAlignment::Left } else { CellAlignment::Right });
    }
    table.trim_fmt() + "\n"
}
