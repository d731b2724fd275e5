//! The command `tandem ready`: a health check, so that containers need no other program for it.

use crate::server::{ServerArgs, wrong_kind};
use anyhow::{Result, anyhow, ensure};

const WANTED: &str = "`tandem ready` asks a frontend, or the --admin-listen port of another process";

/// Checks that a frontend, or the process with this admin port, is ready.
///
/// # Errors
/// Fails with the reason if the process is not ready, or if no such process answers at the address.
pub fn check(args: &ServerArgs) -> Result<()> {
    let server = args.open(None)?;
    let reply = server.get("/ready").map_err(|error| server.no_reply(error, WANTED))?;
    ensure!(reply.status != 421, "{} does not answer under this name: {}", server.address, reply.body.trim());
    if ![200, 503].contains(&reply.status) {
        let no_ready = || anyhow!("{} has no /ready; {WANTED}", server.address);
        return Err(wrong_kind(&server.address, WANTED).unwrap_or_else(no_ready));
    }
    ensure!(reply.status == 200, "not ready: {}", reply.body.trim());
    Ok(())
}
