//! What a person sees of a download: a bar on a terminal, a line elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::{io::IsTerminal, time::Duration};

/// One thing that takes a while. It leaves the screen when dropped.
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// `total` in bytes; a spinner while it is not known.
    #[expect(clippy::print_stderr, reason = "progress is for the person who waits, on stderr")]
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

    /// At most the total: what is copied to its place lies there twice for a moment.
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
