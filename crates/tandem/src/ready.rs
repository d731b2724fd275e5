//! The command `tandem ready`: a health check, so that containers need no other program for it.

use crate::{
    http::HttpReply,
    serve::printable,
    server::{HttpServer, SILENT, ServerArgs, kind, wrong_kind},
};
use anyhow::{Result, anyhow, ensure};
use std::{thread::sleep, time::Duration};
use tandem_process::telemetry::tell;

const WANTED: &str = "`tandem ready` asks a frontend, or the --admin-listen port of another process";

/// The arguments of `tandem ready`.
#[derive(clap::Args, Debug)]
pub struct ReadyArgs {
    /// The process.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Wait until the process is ready, and print meanwhile why it is not
    #[arg(long)]
    wait: bool,
}

const WAIT_INTERVAL: Duration = Duration::from_secs(1);

/// Checks that a frontend, or the process with this admin port, is ready; with `--wait`, until it is.
///
/// # Errors
/// Fails with the reason if the process is not ready, or if no such process answers at the address.
pub fn check(args: &ReadyArgs) -> Result<()> {
    let mut printed = String::new();
    loop {
        // Each check looks for the server again, and so finds a cluster that starts meanwhile.
        let server = args.server.open("tandem ready", None)?;
        let reply = match answer(&server) {
            Err(error) => match kind(&server.address) {
                None | Some(SILENT) => Err(error),
                // The process may have opened its port since the first request. If it has not, the error stays.
                Some(_) => Ok(answer(&server)?),
            },
            reply => reply,
        };
        let reason = match reply {
            Ok(HttpReply { status: 200, .. }) => return Ok(()),
            Ok(reply) => format!("not ready: {}", status(&reply.body)),
            Err(error) if args.wait => error.to_string(),
            Err(error) => return Err(error),
        };
        ensure!(args.wait, "{reason}");
        if printed != reason {
            tell(std::io::stderr(), &format!("{}\n", printable(&reason.replace('\n', " "))));
            printed = reason;
        }
        sleep(WAIT_INTERVAL);
    }
}

/// Returns the status in the body of a reply.
fn status(body: &str) -> String {
    let json: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    json["status"].as_str().unwrap_or(body.trim()).to_owned()
}

/// Returns the server's reply to a readiness check, with the status 200 or 503.
fn answer(server: &HttpServer) -> Result<HttpReply> {
    let reply = server.get_now("/ready").map_err(|error| server.no_reply(error, WANTED))?;
    ensure!(reply.status != 421, "{} does not answer under this name: {}", server.address, reply.body.trim());
    if ![200, 503].contains(&reply.status) {
        let no_ready = || anyhow!("{} has no /ready; {WANTED}", server.address);
        return Err(wrong_kind(&server.address, WANTED).unwrap_or_else(no_ready));
    }
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::{
        io::{Read, Write},
        net::TcpListener,
        thread::spawn,
    };
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[derive(Parser)]
    struct Ready {
        #[command(flatten)]
        args: ReadyArgs,
    }

    #[test]
    fn process_that_opens_its_port_after_the_first_request_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let at = listener.local_addr().expect("the listener is bound").to_string();
        spawn(move || {
            for (request, stream) in listener.incoming().enumerate() {
                let mut stream = stream.expect("the listener accepts");
                let _ = stream.read(&mut [0; 4096]);
                if request > 0 {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                }
            }
        });
        let ready = |args: &[&str]| check(&Ready::parse_from([&["ready", &*at], args].concat()).args);
        ready(&["--wait"]).expect("the second request is answered");
    }

    #[test]
    fn process_that_opens_its_port_at_any_time_is_waited_for() {
        const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\nconnection: close\r\n\r\n{\"status\":\"ok\"}";
        let runtime = tokio::runtime::Runtime::new().expect("the runtime can be built");
        let waiting = |number: u64| {
            // The port is this test's, but closed until the socket listens.
            let socket = tokio::net::TcpSocket::new_v4().expect("the system has sockets");
            socket.bind(([127, 0, 0, 1], 0).into()).expect("a port is free");
            let at = socket.local_addr().expect("the socket is bound").to_string();
            let handle = runtime.handle().clone();
            spawn(move || {
                // The first requests take about this long, so the port is opened before, between or after them.
                sleep(Duration::from_micros(number * 40));
                handle.block_on(async {
                    let listener = socket.listen(16).expect("the socket is bound");
                    while let Ok((mut stream, _)) = listener.accept().await {
                        let _ = stream.read(&mut [0; 4096]).await;
                        let _ = stream.write_all(OK).await;
                    }
                });
            });
            spawn(move || check(&Ready::parse_from(["ready", &at, "--wait"]).args))
        };
        let all: Vec<_> = (0..40).map(waiting).collect();
        for ready in all {
            ready.join().expect("no thread panics").expect("the process becomes ready");
        }
    }
}
