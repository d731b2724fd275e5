//! The terminal at stdout.

/// Returns its width in columns; `None` if stdout is no terminal.
pub(crate) fn width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}
