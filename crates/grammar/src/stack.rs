//! Runs recursive code on a thread with a large stack.

use std::io;

/// The size of the stack in bytes. Memory is used only for the part that is needed. The deepest constraint or template within all limits needs
/// less than half of it; the rest is for what the limits may have overlooked, because no process survives a stack overflow.
const STACK_BYTES: usize = 256 << 20;

/// The reason why the work has no result.
#[derive(Debug, thiserror::Error)]
pub enum StackError {
    /// The system cannot start a thread.
    #[error("the system cannot start a thread for it: {0}")]
    Thread(io::Error),
    /// The work panicked.
    #[error("the program failed on it")]
    Panic,
}

/// Runs `work` on a thread of its own, which has this name and a stack of 256 MiB, and waits for it.
///
/// # Errors
/// The system cannot start a thread, or the work panics.
pub fn on_large_stack<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> Result<T, StackError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn_scoped(scope, work);
        thread.map_err(StackError::Thread)?.join().map_err(|_| StackError::Panic)
    })
}
