//! The log of a simulation: a text for the reader, and a hash for comparing two runs.

use parking_lot::{Mutex, MutexGuard};
use std::{fmt::Arguments, sync::Arc};
use tokio::time::Instant;

#[derive(Clone)]
pub(super) struct Log(Arc<Mutex<State>>);

struct State {
    start: Instant,
    /// The sum of the hashes of all records with their times. The sum does not depend on the order of records that have the same time. That
    /// order varies, because a draining server wakes its connections in any order.
    trace: u64,
    lines: Vec<String>,
}

impl Log {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(State { start: Instant::now(), trace: 0, lines: Vec::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Adds a line to the text and to the hash.
    pub(super) fn record(&self, what: Arguments<'_>) {
        let mut state = self.lock();
        let line = format!("{:10.3}  {what}", state.start.elapsed().as_secs_f64());
        state.trace = state.trace.wrapping_add(hash(line.as_bytes()));
        state.lines.push(line);
    }

    /// Adds an event to the hash only.
    pub(super) fn add_to_trace(&self, what: Arguments<'_>) {
        let mut state = self.lock();
        let at = state.start.elapsed().as_nanos();
        state.trace = state.trace.wrapping_add(hash(format!("{at} {what}").as_bytes()));
    }

    pub(super) fn finish(&self) -> (u64, Vec<String>) {
        let mut state = self.lock();
        (state.trace, std::mem::take(&mut state.lines))
    }
}

/// The hash function FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}
