//! Runs recursive code of the parser on a thread with a large stack.

use crate::GrammarError;

/// The size of the stack in bytes. Memory is used only for the part that is needed. The deepest constraint within all limits needs a few MiB;
/// the rest is for what the limits may have overlooked, because no process survives a stack overflow.
const STACK_BYTES: usize = 256 << 20;

/// Runs `work` on a thread of its own, and waits for it. A panic becomes an error.
pub(crate) fn large<T: Send>(work: impl FnOnce() -> Result<T, GrammarError> + Send) -> Result<T, GrammarError> {
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().name("tandem-grammar".to_owned()).stack_size(STACK_BYTES).spawn_scoped(scope, work);
        let thread =
            thread.map_err(|error| GrammarError::invalid(format!("the system cannot start a thread to compile it: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(GrammarError::invalid("the parser failed on it")))
    })
}
