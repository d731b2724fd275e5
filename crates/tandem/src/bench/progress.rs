//! The progress of a run on stderr, if that is a terminal.

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use std::{io::IsTerminal, time::Duration};
use tandem_load::ReplayProgress;

/// A progress bar, which is shown until it is dropped.
pub(super) struct Bar(ProgressBar);

impl Bar {
    /// Returns a bar that begins with `prefix`.
    pub(super) fn new(requests: u64, prefix: &str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let template = "{prefix}[{wide_bar}] {pos}/{len} requests {elapsed}{msg}";
        let style = ProgressStyle::with_template(template).expect("the template is a constant");
        let bar = ProgressBar::new(requests).with_finish(ProgressFinish::AndClear).with_style(style);
        bar.enable_steady_tick(Duration::from_millis(200));
        let bar = Self(bar);
        bar.restart(prefix);
        bar
    }

    /// Starts again at 0 with this prefix. A second bar would be drawn below this one.
    pub(super) fn restart(&self, prefix: &str) {
        self.0.reset();
        self.0.set_message("");
        self.0.set_prefix(if prefix.is_empty() { String::new() } else { format!("{prefix} ") });
    }

    pub(super) fn show(&self, progress: ReplayProgress) {
        self.0.set_position(progress.ended);
        if progress.failed > 0 {
            self.0.set_message(format!(", {} failed", progress.failed));
        }
    }
}
