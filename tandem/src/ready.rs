//! `tandem ready`: the health check of containers that hold nothing but this binary.

use crate::http;
use anyhow::{Context, Result, bail};

/// Fails, and says why, unless the process whose HTTP is at this address is ready.
pub fn check(address: &str) -> Result<()> {
    let (status, body) = http::ask(address, "GET", "/ready", "", "")
        .with_context(|| format!("nothing answers at {address}; write host:port of a frontend or of an --admin-listen"))?;
    match status {
        Some(200) => Ok(()),
        Some(_) => bail!("not ready: {}", body.trim()),
        None => bail!("what answers at {address} does not speak HTTP; write host:port of a frontend or of an --admin-listen"),
    }
}
