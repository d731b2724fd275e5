//! What this process does while it starts, in words for the clients that wait for it.

use parking_lot::Mutex;

static STEP: Mutex<String> = Mutex::new(String::new());

/// Sets what the process does now, such as `downloads M: 41%`.
pub fn report(step: impl Into<String>) {
    *STEP.lock() = step.into();
}

/// Returns what the process does; empty if it has reported nothing.
pub fn step() -> String {
    STEP.lock().clone()
}
