//! The progress of a download: a bar on a terminal, otherwise lines on stderr, and words for clients that wait until the process has started.

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use parking_lot::Mutex;
use std::{
    io::{self, IsTerminal, Read, stderr},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tandem_process::{starting, telemetry::tell};
use tokio::time::Instant;

/// The time after which a line follows the last one without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// The part of a task, in per cent, after which a line follows the last one.
const LINE_PERCENT: u64 = 10;
/// The maximum length of the text before a bar, which has to fit on a terminal of 80 columns together with the numbers behind the bar.
const MESSAGE_MAX: usize = 30;

/// The progress of a task, which ends when it is dropped.
pub(super) struct TaskProgress {
    /// Shows the highest position so far: a part that is done again does not show.
    bar: ProgressBar,
    position: AtomicU64,
    what: String,
    last: Mutex<LastLine>,
}

/// What the last line said.
struct LastLine {
    at: Instant,
    percent: u64,
}

impl LastLine {
    /// Whether another line is due. Remembers it if it is.
    fn is_followed(&mut self, now: Instant, percent: u64) -> bool {
        let is_due = percent >= self.percent + LINE_PERCENT || now.duration_since(self.at) >= LINE_INTERVAL;
        if is_due {
            *self = Self { at: now, percent };
        }
        is_due
    }
}

/// Begins to show the progress of a task. `total` is in bytes; while it is unknown, a spinner is shown.
pub(super) fn start(what: String, total: Option<u64>) -> TaskProgress {
    let bar = if stderr().is_terminal() {
        let bar = ProgressBar::no_length().with_message(shortened(&what)).with_finish(ProgressFinish::AndClear);
        bar.set_style(style("{spinner} {msg} {bytes} {bytes_per_sec}"));
        bar.enable_steady_tick(Duration::from_millis(100));
        bar
    } else {
        tell(stderr(), &format!("{what}\n"));
        ProgressBar::hidden()
    };
    let last = LastLine { at: Instant::now(), percent: 0 };
    let progress = TaskProgress { bar, position: AtomicU64::new(0), what, last: Mutex::new(last) };
    starting::report(progress.what.clone());
    if let Some(total) = total {
        progress.set_total(total);
    }
    progress
}

impl TaskProgress {
    /// Returns the reader, whose bytes count as progress.
    pub(super) fn read(self, reader: impl Read) -> impl Read {
        CountedReader(reader, self)
    }

    pub(super) fn position(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    pub(super) fn total(&self) -> Option<u64> {
        self.bar.length()
    }

    pub(super) fn set_total(&self, total: u64) {
        if self.bar.length() != Some(total) {
            self.bar.set_style(style("{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}"));
            self.bar.set_length(total);
        }
    }

    pub(super) fn add(&self, bytes: u64) {
        self.set_position(self.position() + bytes);
    }

    pub(super) fn set_position(&self, bytes: u64) {
        self.position.store(bytes, Ordering::Relaxed);
        self.bar.set_position(bytes.max(self.bar.position()));
        let text = self.text();
        if self.bar.is_hidden() && self.last.lock().is_followed(Instant::now(), self.percent().unwrap_or_default()) {
            tell(stderr(), &format!("{text}\n"));
        }
        starting::report(text);
    }

    fn percent(&self) -> Option<u64> {
        self.total().map(|total| (self.bar.position().saturating_mul(100) / total.max(1)).min(100))
    }

    /// Returns the task, and how much of it is done.
    fn text(&self) -> String {
        let unknown = || format!("{} MB", self.bar.position() / 1_000_000);
        format!("{}: {}", self.what, self.percent().map_or_else(unknown, |percent| format!("{percent}%")))
    }
}

/// A reader whose bytes count as progress.
struct CountedReader<R>(R, TaskProgress);

impl<R: Read> Read for CountedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(buffer)?;
        self.1.add(count as u64);
        Ok(count)
    }
}

/// Returns the beginning of a text that is too long for a terminal.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(MESSAGE_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn style(template: &'static str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_follows_after_ten_per_cent_or_ten_seconds() {
        let start = Instant::now();
        let mut last = LastLine { at: start, percent: 0 };
        for (seconds, percent, is_due) in
            [(1, 9, false), (2, 10, true), (3, 19, false), (4, 25, true), (13, 26, false), (14, 26, true), (15, 100, true)]
        {
            assert_eq!(last.is_followed(start + Duration::from_secs(seconds), percent), is_due, "{percent}% after {seconds} s");
        }
    }

    #[test]
    fn progress_has_per_cent_if_the_size_is_known() {
        let progress = start("downloads é.gguf".to_owned(), Some(200));
        progress.add(50);
        progress.add(33);
        assert_eq!((progress.position(), &*progress.text()), (83, "downloads é.gguf: 41%"));
        progress.set_position(0);
        progress.add(20);
        assert_eq!((progress.position(), &*progress.text()), (20, "downloads é.gguf: 41%"));
        progress.set_position(500);
        assert_eq!(progress.text(), "downloads é.gguf: 100%");
        let unknown = start("downloads é.gguf".to_owned(), None);
        unknown.add(2_500_000);
        assert_eq!(unknown.text(), "downloads é.gguf: 2 MB");
        assert_eq!(shortened(&"é".repeat(31)), format!("{}…", "é".repeat(30)));
    }
}
