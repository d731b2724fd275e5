//! The progress of a download on stderr: a bar on a terminal, otherwise a line.

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use std::{io::IsTerminal, time::Duration};
use tandem_process::telemetry::tell;

/// Shows the progress of a task until the returned bar is dropped. `total` is in bytes; while it is unknown, a spinner is shown.
pub(super) fn start(what: &str, total: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        tell(std::io::stderr(), &format!("{what}\n"));
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::no_length().with_message(what.to_owned()).with_finish(ProgressFinish::AndClear);
    bar.set_style(style("{spinner} {msg} {bytes} {bytes_per_sec}"));
    bar.enable_steady_tick(Duration::from_millis(100));
    if let Some(total) = total {
        set_total(&bar, total);
    }
    bar
}

pub(super) fn set_total(bar: &ProgressBar, total: u64) {
    if bar.length() != Some(total) {
        bar.set_style(style("{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}"));
        bar.set_length(total);
    }
}

fn style(template: &'static str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant")
}
