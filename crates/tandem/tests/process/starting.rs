//! What clients and operators see while a process starts, when it is open to the network, and after it has stopped.

use crate::{
    cluster::{address, ready, until},
    talk::chat,
    up::{Up, tandem},
};
use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Stdio},
};

/// Starts `up` for an engine whose server does not answer.
fn waiting_for_its_engine(at: SocketAddr) -> Up {
    let args = ["up", "--engine", "llama-cpp", "--engine-url", "http://127.0.0.1:1", "--listen", &at.to_string()];
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let up = Up::unread(tandem(&args).env("XDG_STATE_HOME", folder.path()), at);
    until("the port answers", || std::net::TcpStream::connect(at).is_ok(), |answers| *answers);
    until("the engine was tried", || up.get("/ready"), |reply| reply.contains("waits for the engine"));
    up
}

#[test]
fn process_that_starts_is_live_and_says_what_it_waits_for() {
    let up = waiting_for_its_engine(address());
    assert!(up.get("/live").starts_with("HTTP/1.1 200"));
    let completion = up.answer("/v1/chat/completions", r#"{"messages":[]}"#);
    for reply in [up.get("/ready"), up.get("/v1/models"), up.get("/dashboard"), completion] {
        let head = reply.split("\r\n\r\n").next().expect("the reply has a head");
        assert!(
            head.starts_with("HTTP/1.1 503") && head.contains("retry-after: 1") && head.contains("x-request-id: "),
            "{reply}"
        );
        assert!(
            reply.contains("\"code\":\"starting\"") && reply.contains("waits for the engine at http://127.0.0.1:1"),
            "{reply}"
        );
    }
    let messages = up.answer("/v1/messages", "{}");
    assert!(messages.contains("\"type\":\"error\"") && messages.contains("starting"), "{messages}");
    let ready = tandem(&["ready", up.address()]).output().expect("the binary runs");
    let errors = String::from_utf8_lossy(&ready.stderr).into_owned();
    assert!(ready.status.code() == Some(1) && errors.contains("waits for the engine"), "{errors}");
    up.signal("-TERM");
    assert_eq!(up.wait().0.code(), Some(0), "the start is given up at once");
}

#[test]
fn picker_is_live_at_its_admin_port_and_says_what_it_waits_for() {
    let (at, folder) = (address(), tempfile::tempdir().expect("the system can create a temporary folder"));
    let (admin, url) = (at.to_string(), "http://127.0.0.1:1");
    // The model is only read once the server has answered.
    let args = ["epp", "--engine-url", url, "--model", "no-model", "--listen", "127.0.0.1:0", "--admin-listen", &admin];
    let picker = Up::unread(tandem(&args).env("XDG_STATE_HOME", folder.path()), at);
    until("the port answers", || std::net::TcpStream::connect(at).is_ok(), |answers| *answers);
    until("the server was tried", || picker.get("/ready"), |reply| reply.contains("waits for the engine at http://127.0.0.1:1"));
    assert!(picker.get("/live").starts_with("HTTP/1.1 200"));
}

/// Returns the first line that the command writes to stderr, and ends the command.
fn first_error(mut command: Child) -> String {
    let mut line = String::new();
    let mut stderr = BufReader::new(command.stderr.take().expect("stderr is piped"));
    stderr.read_line(&mut line).expect("the text is UTF-8");
    command.kill().expect("the command waits");
    command.wait().expect("the command is a child of this process");
    line
}

#[test]
fn commands_wait_for_a_server_that_starts_and_say_why() {
    let up = waiting_for_its_engine(address());
    for args in [
        &["chat", up.address()][..],
        &["chat", up.address(), "--model", "m"],
        &["route", "explain", up.address(), "--prompt", "hi"],
        &["ready", "--wait", up.address()],
    ] {
        let mut command = tandem(args);
        let (input, mut keyboard) = std::io::pipe().expect("the system can create a pipe");
        std::io::Write::write_all(&mut keyboard, b"Hello\n").expect("the pipe has space");
        let line = first_error(command.stdin(input).spawn().expect("the binary runs"));
        assert!(line.contains("waits for the engine at http://127.0.0.1:1"), "{args:?}: {line}");
    }
}

#[test]
fn warning_is_logged_if_the_api_is_open_to_the_network() {
    let keys = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
    let file = keys.path().to_str().expect("the path is UTF-8");
    for (args, warns) in [
        (&["--listen", "0.0.0.0:0"][..], true),
        (&["--listen", "0.0.0.0:0", "--api-keys-file", file], false),
        (&["--listen", "127.0.0.1:0"], false),
    ] {
        let up = Up::spawn(&[&["up", "--engine", "sim"], args].concat(), Stdio::piped());
        up.signal("-INT");
        let (status, errors) = up.wait();
        assert_eq!(status.code(), Some(0), "{errors}");
        let line = errors.lines().find(|line| line.contains("can use the API without a key"));
        assert_eq!(line.is_some_and(|line| line.contains("WARN") && line.contains("--api-keys-file")), warns, "{errors}");
    }
}

#[test]
fn last_line_of_a_process_says_how_its_answers_ended() {
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "20", "--grace-period", "1"], Stdio::piped());
    ready(&up);
    chat(&up, "this answer is complete before the signal");
    let body = |tokens| {
        format!(
            r#"{{"model":"sim","stream":true,"max_tokens":{tokens},"logit_bias":{{"257":-100}},"messages":[{{"role":"user","content":"x"}}]}}"#
        )
    };
    let mut answers = Vec::new();
    for tokens in [100, 60_000] {
        let mut answer = up.send("/v1/chat/completions", &body(tokens)).expect("the frontend listens");
        let mut head = String::new();
        while !head.contains("data:") {
            answer.read_line(&mut head).expect("the answer is UTF-8");
        }
        answers.push(answer);
    }
    up.signal("-INT");
    let (status, errors) = up.wait();
    let last = errors.lines().last().expect("the process logs");
    assert!(last.contains("stopped") && last.contains("finished=1") && last.contains("ended_early=1"), "{status}: {errors}");
}
