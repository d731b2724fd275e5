//! `tandem bench`: measures a running server under recorded load.

mod progress;
mod replay;

pub use replay::{ReplayArgs, run as replay};

use anyhow::{Context, Result};
use std::path::PathBuf;
use tandem_load::report::{self, Report};

/// Where a report goes besides stdout.
#[derive(clap::Args, Clone, Debug, Default)]
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

    /// Writes the reports to the files.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, title: &str, reports: &[Report]) -> Result<()> {
        let json = self.json.as_ref().map(|path| (path, report::json(reports)));
        let html = self.html.as_ref().map(|path| (path, report::html(title, reports)));
        for (path, text) in json.into_iter().chain(html) {
            std::fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
        }
        Ok(())
    }
}
