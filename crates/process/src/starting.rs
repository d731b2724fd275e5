//! A text that describes what this process is doing while it starts, for the clients that wait for it.

use parking_lot::Mutex;

static STEP: Mutex<String> = Mutex::new(String::new());

/// Sets the text that describes the current step of the start, such as `downloads M: 41%`.
pub fn report(step: impl Into<String>) {
    *STEP.lock() = step.into();
}

/// Returns the text that describes the current step; empty if no step was reported.
pub fn step() -> String {
    STEP.lock().clone()
}
