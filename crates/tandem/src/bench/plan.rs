//! `tandem bench simulate --plan`: finds the smallest cluster that meets service levels, or says why none does.

use super::{ReportArgs, progress::Bar};
use crate::{serve, text_table::counted};
use anyhow::{Result, bail};
use clap::Args;
use std::time::Duration;
use tandem_load::{
    ReplayProgress,
    report::{self, PlanSummary, Report, Slo},
};
use tandem_simulator::{ClusterPlan, IdleMisses, PlanSettings, Replay, Size};

#[derive(Args, Debug)]
#[command(next_help_heading = "Plan")]
pub(super) struct PlanArgs {
    /// Find the smallest cluster of mixed workers, and of prefill and decode workers, that meets the service levels
    #[arg(long)]
    plan: bool,
    /// Percentage of the requests that must meet all service levels
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, value_parser = percent, requires = "plan")]
    slo_percent: f64,
    /// Number of workers of the largest cluster that is tried
    #[arg(long, value_name = "NUMBER", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536), requires = "plan")]
    max_workers: u32,
}

impl PlanArgs {
    pub(super) fn is_set(&self) -> bool {
        self.plan
    }

    /// Searches for the smallest clusters, prints them, and writes the report even if no cluster was found.
    ///
    /// # Errors
    /// The trace cannot be simulated, no cluster meets the service levels, or the report cannot be written.
    pub(super) fn run(&self, replay: &Replay<'_>, title: &str, files: &ReportArgs) -> Result<()> {
        let settings = PlanSettings { share: self.slo_percent / 100.0, workers_max: self.max_workers as usize };
        let bar = Bar::new(replay.trace.requests, "");
        let mut shown = None;
        let found = tandem_simulator::plan(replay, &settings, &mut |size: Size, state: ReplayProgress| {
            if shown != Some(size) {
                shown = Some(size);
                bar.restart(&size.to_string());
            }
            bar.show(state);
        })?;
        drop(bar);
        let (result, commands) = match found.smallest() {
            Some(trial) => (Ok(self.success(trial.size, &replay.slo)), commands(trial.size)),
            None => (Err(self.failure(&found, &replay.slo)), Vec::new()),
        };
        let ClusterPlan { mixed, split, tried, nearest, .. } = found;
        let found = if result.is_ok() { mixed.into_iter().chain(split).collect() } else { nearest };
        let reports: Vec<Report> = found.into_iter().map(|trial| trial.report).collect();
        let clusters = counted(tried.len(), "cluster");
        let shown = result.clone().unwrap_or_else(|why| why);
        let plan = PlanSummary { result: shown, required_share: settings.share, tried, commands };
        let head = match &result {
            Ok(smallest) => {
                format!("{smallest}\nSimulated {clusters}; the smallest that meet the service levels:")
            }
            Err(_) => format!("Simulated {clusters}; none meets the service levels, and these are the nearest:"),
        };
        if !reports.is_empty() {
            serve::print(&format!("{head}\n\n{}", report::comparison(&reports)))?;
        }
        files.write(title, Some(&plan), &reports)?;
        result.map(drop).or_else(|why| bail!(why))
    }

    fn success(&self, size: Size, slo: &Slo) -> String {
        let (share, levels, workers) = (self.slo_percent, levels(slo), counted(size.workers(), "worker"));
        format!("Smallest cluster: {size} ({workers}) for {share}% within {levels}")
    }

    /// Returns why no cluster meets the service levels, and what to do.
    fn failure(&self, found: &ClusterPlan, slo: &Slo) -> String {
        let (share, workers) = (self.slo_percent, self.max_workers);
        if (found.idle.requests - found.idle.any) as f64 * 100.0 < share * found.idle.requests as f64 {
            return impossible(&found.idle, slo, share);
        }
        if found.tried.is_empty() {
            return "no cluster was tried: --prefill remote needs a --max-workers of at least 2".to_owned();
        }
        let best = found
            .tried
            .iter()
            .filter_map(|tried| Some((tried.share?, &tried.name)))
            .max_by(|one, other| one.0.total_cmp(&other.0));
        let nearest = best.map_or_else(
            || "all clusters that were tried meet them for less than 50%".to_owned(),
            |(share, name)| format!("the nearest one, {name}, meets them for {}", report::percent(share)),
        );
        format!(
            "no cluster of up to {workers} workers meets the service levels for {share}% of the requests: {nearest}; raise --max-workers or the levels, or lower --slo-percent"
        )
    }
}

/// Returns why no cluster of any size meets the service levels.
fn impossible(idle: &IdleMisses, slo: &Slo, share: f64) -> String {
    let part = |count: u64| count as f64 / idle.requests as f64;
    let reasons = [
        (idle.ttft, slo.ttft, "--slo-ttft", "of the prompts need longer than", "until their first token"),
        (idle.itl, slo.itl, "--slo-itl", "of the answers need longer than", "from token to token"),
        (idle.e2e, slo.e2e, "--slo-e2e", "of the answers need longer than", "until their end"),
    ];
    let reasons = reasons.into_iter().filter(|(count, ..)| *count > 0);
    let (mut texts, mut flags) = (Vec::new(), Vec::new());
    for (count, level, flag, what, until) in reasons {
        texts.push(format!("{:.1}% {what} {} {until}", part(count) * 100.0, level.map(ms).unwrap_or_default()));
        flags.push(flag);
    }
    format!(
        "no cluster of any size meets the service levels for {share}% of the requests: on an idle worker, {}, so at most {} can meet them; raise {}, lower --slo-percent, or simulate a faster device",
        texts.join(", and "),
        report::percent(1.0 - part(idle.any)),
        flags.join(" and ")
    )
}

fn ms(time: Duration) -> String {
    format!("{} ms", time.as_secs_f64() * 1e3)
}

/// Returns the service levels that are set.
fn levels(slo: &Slo) -> String {
    let levels = [("TTFT", slo.ttft), ("mean ITL", slo.itl), ("E2E", slo.e2e)];
    levels.iter().filter_map(|(name, level)| Some(format!("{name} {}", ms((*level)?)))).collect::<Vec<_>>().join(", ")
}

/// Returns the commands that start a cluster of this size: each worker on a device of its own.
fn commands(size: Size) -> Vec<String> {
    let worker = |role: &str, count: usize| format!("tandem {role} --listen 0.0.0.0:PORT      # on each of {count} devices");
    let workers = match size {
        Size::Mixed(count) => vec![worker("decode-worker", count)],
        Size::Split { prefill, decode } => vec![worker("prefill-worker", prefill), worker("decode-worker", decode)],
    };
    let others = [
        format!(
            "tandem router --listen 0.0.0.0:7000 --workers HOST:PORT,…      # the addresses of all {} workers",
            size.workers()
        ),
        "tandem frontend --listen 0.0.0.0:8000 --router HOST:7000".to_owned(),
    ];
    workers.into_iter().chain(others).collect()
}

fn percent(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|&number: &f64| number > 0.0 && number <= 100.0).ok_or("write a number above 0, up to 100")
}
