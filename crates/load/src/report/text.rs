//! A report as text for a terminal.

use super::{
    Report, TimeSummary, Tokens,
    format::{counted, decimal, percent, whole},
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

/// Returns a table with a row for each report, to compare runs, with a newline at the end.
pub fn comparison(reports: &[Report]) -> String {
    let heads = [
        "",
        "answers/s",
        "failed",
        "TTFT mean",
        "p50",
        "p90",
        "p99",
        "ITL mean",
        "p99",
        "E2E mean",
        "p99",
        "hit rate",
        "output/s",
        "goodput",
        "computed max/mean",
        "output max/mean",
    ];
    let ms = |summary: &Option<TimeSummary>, of: fn(&TimeSummary) -> f64| {
        summary.as_ref().map(|summary| decimal(of(summary))).unwrap_or_default()
    };
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(reports.iter().map(|report| {
        let ratio = |of: fn(&super::Balance) -> Option<f64>| {
            report.balance.as_ref().and_then(of).map(|ratio| format!("{ratio:.2}")).unwrap_or_default()
        };
        vec![
            report.name.clone(),
            decimal(report.requests.answered_per_second),
            whole(report.requests.failed),
            ms(&report.ttft, |summary| summary.mean_ms),
            ms(&report.ttft, |summary| summary.p50_ms),
            ms(&report.ttft, |summary| summary.p90_ms),
            ms(&report.ttft, |summary| summary.p99_ms),
            ms(&report.itl, |summary| summary.mean_ms),
            ms(&report.itl, |summary| summary.p99_ms),
            ms(&report.e2e, |summary| summary.mean_ms),
            ms(&report.e2e, |summary| summary.p99_ms),
            report.tokens.hit_rate().map(percent).unwrap_or_default(),
            decimal(report.tokens.output_per_second),
            report.goodput.as_ref().map(|goodput| percent(goodput.share)).unwrap_or_default(),
            ratio(|balance| balance.computed_max_to_mean),
            ratio(|balance| balance.output_max_to_mean),
        ]
    }));
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

/// Returns what is not in the table of times: tokens, goodput, balance, and what the reader must know to trust the figures.
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
            found.push(format!("{} {what} have another number of tokens than they should", whole(count)));
        }
    }
    found
}

/// Returns a sentence about the cached tokens: how many there are, and how they are known.
fn cached(tokens: &Tokens) -> Option<String> {
    let rate = tokens.hit_rate().map(percent);
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

fn times_row(name: &str, summary: &TimeSummary) -> Vec<String> {
    let times = [summary.mean_ms, summary.p50_ms, summary.p90_ms, summary.p99_ms, summary.max_ms];
    [name.to_owned()].into_iter().chain(times.map(decimal)).collect()
}

/// Formats rows as columns. The first `left` columns are aligned to the left.
fn table(rows: Vec<Vec<String>>, left: usize) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).add_rows(rows);
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2)).set_cell_alignment(if at < left { CellAlignment::Left } else { CellAlignment::Right });
    }
    table.trim_fmt() + "\n"
}
