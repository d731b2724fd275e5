//! `tandem bench`: measures a running server, or a simulated cluster, under recorded load.

mod faults;
mod plan;
mod progress;
mod rates;
mod replay;
mod simulate;

pub use rates::{RatesArgs, run as rates};
pub use replay::{ReplayArgs, run as replay};
pub use simulate::{SimulateArgs, run as simulate};

use anyhow::{Context, Result};
use clap::Args;
use std::{path::PathBuf, time::Duration};
use tandem_load::{
    HeaderValue,
    report::{self, PlanSummary, Report, Slo},
};

/// Where a report goes besides stdout.
#[derive(Args, Clone, Debug, Default)]
pub struct ReportArgs {
    /// Also write the report to this file as JSON, with all percentiles and the course of the run
    #[arg(long, value_name = "FILE", help_heading = "Report")]
    json: Option<PathBuf>,
    /// Also write the report to this file as an HTML page with plots, which needs no other file
    #[arg(long, value_name = "FILE", help_heading = "Report")]
    html: Option<PathBuf>,
}

impl ReportArgs {
    /// Creates the files, so that a run does not end with a report that cannot be written.
    ///
    /// # Errors
    /// A file cannot be created.
    pub fn check(&self) -> Result<()> {
        for path in self.json.iter().chain(&self.html) {
            std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .with_context(|| format!("{} cannot be written", path.display()))?;
        }
        Ok(())
    }

    /// Writes the reports to the files, with the plan that they belong to, if any.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, title: &str, plan: Option<&PlanSummary>, reports: &[Report]) -> Result<()> {
        let json = self.json.as_ref().map(|path| (path, report::json(plan, reports)));
        let html = self.html.as_ref().map(|path| (path, report::html(title, plan, reports)));
        for (path, text) in json.into_iter().chain(html) {
            std::fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
        }
        Ok(())
    }
}

/// Returns the header with the API key in an environment variable; `None` if the variable is not set or empty.
fn bearer(variable: &str) -> Result<Option<HeaderValue>> {
    let Some(key) = std::env::var(variable).ok().filter(|key| !key.is_empty()) else { return Ok(None) };
    let bearer = HeaderValue::try_from(format!("Bearer {key}"));
    let mut bearer = bearer.ok().with_context(|| format!("{variable} has characters that no header can have"))?;
    bearer.set_sensitive(true);
    Ok(Some(bearer))
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Service levels, for the goodput")]
struct SloArgs {
    /// Maximum time to first token
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    slo_ttft: Option<Duration>,
    /// Maximum mean time between two tokens of an answer
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    slo_itl: Option<Duration>,
    /// Maximum time to the end of the answer
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    slo_e2e: Option<Duration>,
}

impl SloArgs {
    fn levels(&self) -> Slo {
        Slo { ttft: self.slo_ttft, itl: self.slo_itl, e2e: self.slo_e2e }
    }
}

fn positive(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|&number: &f64| number.is_finite() && number > 0.0).ok_or("write a number above 0")
}

fn milliseconds(text: &str) -> Result<Duration, &'static str> {
    Duration::try_from_secs_f64(positive(text)? / 1e3).map_err(|_| "write a smaller number")
}
