//! The command `tandem ready`: a health check, so that containers need no other program for it.

use crate::http;
use anyhow::{Context, Result, ensure};

/// Checks that the process with HTTP at this `host:port` is ready.
///
/// # Errors
/// Fails with the reason if the process is not ready, or if no process answers HTTP at this address.
pub fn check(address: &str) -> Result<()> {
    let reply = http::get(address, "/ready").with_context(|| {
        format!("no process answers HTTP at {address}; give the host:port of a frontend, or of another process's --admin-listen")
    })?;
    ensure!(reply.status == 200, "not ready: {}", reply.body.trim());
    Ok(())
}
