//! `tandem chat` with messages from a pipe.

use crate::{
    cluster::until,
    talk::metric,
    up::{Up, tandem},
};
use std::{
    io::Write,
    net::TcpListener,
    process::{Child, Output, Stdio},
};

fn chat(args: &[&str], key: Option<&str>, messages: &str) -> Output {
    let mut command = tandem(&[&["chat"], args].concat());
    command.stdin(Stdio::piped());
    if let Some(key) = key {
        command.env("THE_KEY", key);
    }
    let mut process = command.spawn().expect("the binary runs");
    let mut stdin = process.stdin.take().expect("stdin is piped");
    stdin.write_all(messages.as_bytes()).expect("the program reads its messages");
    drop(stdin);
    process.wait_with_output().expect("the program ends")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn chat_prints_answers_with_cached_tokens_and_sends_earlier_messages_again() {
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "50"], Stdio::null());
    let port = up.address().rsplit(':').next().expect("the address has a port");
    let system = "You are a system message that fills more than one block of the cache.";
    let args = [port, "--max-tokens", "20", "--system", system];
    let output = chat(&args, None, "Hello\n\nAnd a second message\n/clear\nHello\n/quit\nnot sent\n");
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{errors}");
    let summaries: Vec<&str> = printed.lines().filter(|line| line.starts_with('[') && line.contains("prompt tokens")).collect();
    assert_eq!(summaries.len(), 3, "{printed}");
    let counts = |summary: &str| -> (u64, u64) {
        let mut words = summary.trim_start_matches('[').split(' ');
        let mut number = || words.by_ref().find_map(|word| word.parse().ok()).expect("the summary has the number");
        (number(), number())
    };
    let [first, second, third] = [0, 1, 2].map(|index| counts(summaries[index]));
    assert_eq!(first.0, 0, "{printed}");
    assert!(second.1 > first.1 + 10, "the second prompt has both messages: {printed}");
    assert_eq!(third.1, first.1, "the third prompt is the first one: {printed}");
    assert!(third.0 > 0, "the system message is cached: {printed}");
    // Whether the time to the first token and the rate are printed depends on the simulated answer, which may have no text.
    assert!(summaries.iter().all(|summary| summary.contains(" tokens")), "{printed}");
    assert_eq!(metric(&up, "tandem_frontend_request_duration_seconds_count "), Some(3.0));
}

/// Runs `tandem chat` in a terminal. `script` provides it.
fn chat_in_a_terminal(up: &Up, max_tokens: u32) -> Child {
    let chat = format!("'{}' chat {} --max-tokens {max_tokens}", env!("CARGO_BIN_EXE_tandem"), up.address());
    let mut script = std::process::Command::new("script");
    script.args(["-qec", &chat, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped());
    script.spawn().expect("`script` of util-linux is installed")
}

#[test]
fn chat_in_a_terminal_drops_pasted_lines_at_ctrl_c() {
    // The first token takes half a second.
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "0.02"], Stdio::null());
    let mut process = chat_in_a_terminal(&up, 20);
    let mut stdin = process.stdin.take().expect("stdin is piped");
    stdin.write_all(b"One\nTwo\nThree\n").expect("the program reads its messages");
    let running = || metric(&up, "tandem_frontend_inflight_requests ");
    until("an answer runs", running, |requests| *requests == Some(1.0));
    stdin.write_all(b"\x03").expect("the terminal is open");
    let cancelled = || metric(&up, "tandem_frontend_cancelled_total ");
    until("the answer is cancelled", cancelled, |requests| *requests == Some(1.0));
    let finished = || metric(&up, "tandem_frontend_request_duration_seconds_count ");
    let before = finished();
    stdin.write_all(b"/quit\n").expect("the program reads its messages");
    drop(stdin);
    let printed = text(&process.wait_with_output().expect("the program ends").stdout);
    assert_eq!((finished(), cancelled()), (before, Some(1.0)), "{printed}");
}

#[test]
fn chat_in_a_terminal_answers_lines_that_arrive_together() {
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "50"], Stdio::null());
    let mut process = chat_in_a_terminal(&up, 5);
    let mut stdin = process.stdin.take().expect("stdin is piped");
    stdin.write_all(b"One\nTwo\nThree\n/quit\n").expect("the program reads its messages");
    drop(stdin);
    let printed = text(&process.wait_with_output().expect("the program ends").stdout);
    assert_eq!(printed.matches(" prompt tokens").count(), 3, "{printed}");
}

#[test]
fn chat_ends_at_a_mistyped_command_without_sending_it() {
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "50"], Stdio::null());
    let output = chat(&[up.address()], None, "/foo bar\nHello\n");
    let errors = text(&output.stderr);
    assert!(
        output.status.code() == Some(1) && errors.contains("there is no command /foo; ") && errors.lines().count() == 1,
        "{errors}"
    );
    assert_eq!((output.stdout.len(), metric(&up, "tandem_frontend_request_duration_seconds_count ").unwrap_or(0.0)), (0, 0.0));
}

#[test]
fn chat_without_a_server_says_to_start_one() {
    let unused = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port is free").to_string();
    let output = chat(&[&unused], None, "Hello\n");
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains(&unused) && errors.contains("`tandem up`"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn chat_sends_the_key_of_a_variable_and_explains_a_refusal() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let path = folder.path().join("keys.toml");
    let path = path.to_str().expect("the path is UTF-8");
    let key = tandem(&["key", "add", "alice", "--api-keys-file", path]).output().expect("the binary runs").stdout;
    let key = text(&key);
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "50", "--api-keys-file", path], Stdio::null());
    assert!(up.introduction.contains("authorization: Bearer YOUR_KEY"), "{}", up.introduction);
    assert!(up.introduction.contains("TANDEM_API_KEY=YOUR_KEY tandem chat http://"), "{}", up.introduction);
    let args = [up.address(), "--key-env", "THE_KEY", "--max-tokens", "5"];
    let explain = tandem(&["route", "explain", up.address(), "--key-env", "THE_KEY", "--prompt", "Hello"])
        .output()
        .expect("the binary runs");
    let errors = text(&explain.stderr);
    assert!(explain.status.code() == Some(1) && errors.contains("the environment variable THE_KEY"), "{errors}");
    let output = chat(&args, Some(key.trim_end()), "Hello\n");
    assert!(output.status.success() && text(&output.stdout).contains(" tokens"), "{}", text(&output.stderr));
    for key in [None, Some("wrong")] {
        let output = chat(&args, key, "Hello\n");
        let errors = text(&output.stderr);
        assert!(output.status.code() == Some(1) && errors.contains("API key") && errors.contains("THE_KEY"), "{errors}");
    }
    let output = chat(&[up.address(), "--key-env", "THE_KEY", "--model", "other"], Some(key.trim_end()), "Hello\n");
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains("'other' does not exist"), "{errors}");
}

#[test]
fn chat_over_tls_trusts_the_given_certificate_only() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("the path is UTF-8").to_owned();
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("the name is valid");
    std::fs::write(path("cert.pem"), signed.cert.pem()).expect("the folder is writable");
    std::fs::write(path("key.pem"), signed.signing_key.serialize_pem()).expect("the folder is writable");
    let (cert, key) = (path("cert.pem"), path("key.pem"));
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "50", "--tls-cert", &cert, "--tls-key", &key], Stdio::null());
    let printed = up.introduction.split("tandem chat ").nth(1).and_then(|rest| rest.lines().next()).expect("it is printed");
    let printed: Vec<&str> = printed.split(' ').collect();
    let url = printed[0];
    assert!(url.starts_with("https://localhost:"), "{url}");
    let output = chat(&[&printed[..], &["--max-tokens", "5"]].concat(), None, "Hello\n");
    assert!(output.status.success() && text(&output.stdout).contains(" tokens"), "{}", text(&output.stderr));
    let output = chat(&[url], None, "Hello\n");
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains("is not trusted") && errors.contains("--ca"), "{errors}");
    for (args, expected) in [
        (&["--tls-cert", &*cert][..], "--tls-cert needs --tls-key"),
        (&["--tls-cert", &cert, "--tls-key", &cert], "is not in PEM format"),
    ] {
        let output = tandem(&[&["up", "--engine", "sim", "--listen", "0"], args].concat()).output().expect("the binary runs");
        let errors = text(&output.stderr);
        assert!(!output.status.success() && errors.contains(expected), "{args:?}: {errors}");
    }
}
