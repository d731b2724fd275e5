//! The progress of a download on stderr: a bar on a terminal, else a line.

use indicatif::{ProgressBar, ProgressStyle};
use std::{io::IsTerminal, time::Duration};

/// A task that takes a while. Dropping it removes it from the terminal.
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Shows the task; `total` is in bytes, and a spinner is shown while it is unknown.
    #[expect(clippy::print_stderr, reason = "progress is for the waiting user, on stderr")]
    pub(super) fn start(what: &str, total: Option<u64>) -> Self {
        if !std::io::stderr().is_terminal() {
            eprintln!("{what}");
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::no_length();
        bar.set_message(what.to_owned());
        bar.set_style(style("{spinner} {msg} {bytes} {bytes_per_sec}"));
        bar.enable_steady_tick(Duration::from_millis(100));
        let progress = Self(bar);
        if let Some(total) = total {
            progress.set_total(total);
        }
        progress
    }

    /// Turns the spinner into a bar.
    pub(super) fn set_total(&self, total: u64) {
        if self.0.length() != Some(total) {
            self.0.set_style(style("{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}"));
            self.0.set_length(total);
        }
    }

    /// Sets the position, at most the total: while a file is copied, its bytes count twice for a moment.
    pub(super) fn set_position(&self, bytes: u64) {
        self.0.set_position(bytes.min(self.0.length().unwrap_or(u64::MAX)));
    }

    pub(super) fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

impl hf_hub::api::Progress for &Progress {
    fn init(&mut self, size: usize, _filename: &str) {
        self.set_total(size as u64);
        self.set_position(0);
    }

    fn update(&mut self, size: usize) {
        self.advance(size as u64);
    }

    fn finish(&mut self) {}
}

fn style(template: &'static str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant")
}
