//! Tests of the binary's output, answers and exit codes.

use crate::{
    cluster::until,
    talk::{metric, post_json},
    up::{Up, tandem},
};
use std::{
    io::{BufRead, BufReader, Read},
    net::{TcpListener, TcpStream},
    process::{Command, Output, Stdio},
    time::Duration,
};

const CHAT: &str = "/v1/chat/completions";

fn ended(args: &[&str]) -> Output {
    tandem(args).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the binary writes text")
}

fn sim(args: &[&str]) -> Up {
    Up::start(&[&["--engine", "sim"], args].concat(), Stdio::piped())
}

/// Sends a request. Returns its answer as soon as the first event has arrived.
fn running(up: &Up, body: &str) -> BufReader<TcpStream> {
    let mut answer = up.send(CHAT, body).expect("the frontend listens");
    let mut head = String::new();
    while !head.contains("data:") {
        assert_ne!(answer.read_line(&mut head).expect("the answer is UTF-8"), 0, "the answer ended without an event: {head}");
    }
    answer
}

const LONG: &str = r#"{"model":"sim","stream":true,"max_tokens":60000,"logit_bias":{"257":-100},"messages":[{"role":"user","content":"a long story"}]}"#;

#[test]
fn printed_curl_request_is_answered_and_sigint_ends_the_process_cleanly() {
    let up = sim(&["--sim-speedup", "50"]);
    for part in ["sim is ready", "router", "prefill-0", "prefill-1", "decode-0", "/chat\n", "/dashboard\n", "tandem chat http://"]
    {
        assert!(up.introduction.contains(part), "{part}: {}", up.introduction);
    }
    let body =
        up.introduction.split("-d '").nth(1).and_then(|rest| rest.split("'\n").next()).expect("the output has a curl line");
    let answer = up.answer(CHAT, body);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("\"cached_tokens\":") && answer.contains("data: [DONE]"), "{answer}");
    up.signal("-INT");
    let (status, errors) = up.wait();
    assert_eq!(status.code(), Some(0), "{errors}");
}

#[test]
fn printed_request_with_three_prompts_uses_prefill_workers() {
    let up = sim(&[]);
    let line = up.introduction.lines().find(|line| line.contains("/v1/completions")).expect("the output has the request");
    let (command, body) = line.split_once(" -d ").expect("the request has a body");
    assert!(command.contains("-H 'x-tandem-details: true'"), "{line}");
    let body = Command::new("bash").args(["-c", &format!("printf %s {body}")]).output().expect("bash runs").stdout;
    let body = serde_json::from_slice(&body).unwrap_or_else(|error| panic!("{error}: {}", text(&body)));
    let (answer, _) = post_json(&up, "/v1/completions", "x-tandem-details: true\r\n", &body);
    let remote =
        ["prefill-0", "prefill-1"].iter().filter(|worker| answer.contains(&format!("\"prefill_worker\":\"{worker}\""))).count();
    assert!(answer.starts_with("HTTP/1.1 200") && remote > 0, "{answer}");
    assert!(metric(&up, "tandem_router_placements_total{worker=\"decode-0\",kind=\"decode\"}") >= Some(1.0));
}

#[test]
fn drain_finishes_running_answers() {
    let up = sim(&["--sim-speedup", "20"]);
    let body = LONG.replace("60000", "2000");
    let mut answer = running(&up, &body);
    up.signal("-TERM");
    let mut rest = String::new();
    answer.read_to_string(&mut rest).expect("the answer is UTF-8");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "the answer is incomplete");
    assert_eq!(up.wait().0.code(), Some(0));
}

/// Starts `tandem up` with the simulated engine through another program.
fn started_by(program: &[&str], args: &[&str]) -> Up {
    let mut direct = tandem(&["up", "--engine", "sim", "--listen", "127.0.0.1:0"]);
    direct.args(args);
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).arg(direct.get_program()).args(direct.get_args());
    for (name, _) in direct.get_envs() {
        command.env_remove(name);
    }
    Up::of(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

#[test]
fn closed_terminal_drains_a_process_unless_it_ignores_hangups() {
    let body = LONG.replace("60000", "2000");
    // The tests themselves may run under nohup.
    let up = started_by(&["env", "--default-signal=HUP"], &["--sim-speedup", "20"]);
    let mut answer = running(&up, &body);
    up.signal("-HUP");
    let mut rest = String::new();
    answer.read_to_string(&mut rest).expect("the answer is UTF-8");
    assert!(rest.contains("data: [DONE]"), "the answer is incomplete");
    assert_eq!(up.wait().0.code(), Some(0));

    let up = started_by(&["nohup"], &[]);
    up.signal("-HUP");
    assert!(up.get("/ready").starts_with("HTTP/1.1 200"), "nohup has made the process ignore hangups");
    up.signal("-TERM");
    assert_eq!(up.wait().0.code(), Some(0));
}

#[test]
fn frontend_serves_for_its_drain_delay_while_it_is_not_ready() {
    let up = sim(&["--drain-delay", "3600"]);
    up.signal("-TERM");
    let is_draining = |answer: &String| answer.starts_with("HTTP/1.1 503") && answer.contains("draining");
    until("the process is not ready", || up.get("/ready"), is_draining);
    let answer = up.answer(CHAT, &LONG.replace("60000", "5"));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("data: [DONE]"), "{answer}");
    up.signal("-TERM");
    assert_eq!(up.wait().0.code(), Some(1), "a second signal stops the process");

    let up = sim(&["--drain-delay", "1"]);
    up.signal("-TERM");
    assert_eq!(up.wait().0.code(), Some(0));
}

#[test]
fn empty_environment_variable_is_treated_as_unset() {
    let printed = |value: Option<&str>| {
        let mut command = tandem(&["frontend", "--engine", "sim", "--print-config"]);
        let variables = ["TANDEM_MAX_WAIT", "TANDEM_ROUTER_WAIT", "TANDEM_CONFIG", "TANDEM_API_KEYS_FILE", "HF_TOKEN_FILE"];
        for name in value.map(|_| variables).into_iter().flatten() {
            command.env(name, value.unwrap_or_default());
        }
        let output = command.output().expect("the binary runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert_eq!(printed(None).0, Some(0));
    assert_eq!(printed(Some("")), printed(None));
    assert_eq!(printed(Some("x")).0, Some(2), "a wrong value is an error");
}

#[test]
fn wrong_environment_variables_are_named() {
    for (args, named) in [(&["up"][..], "TANDEM_PREFILL_WORKERS"), (&["up", "--prefill-workers", "x"], "--prefill-workers <N>")] {
        let output = tandem(args).env("TANDEM_PREFILL_WORKERS", "x").output().expect("the binary runs");
        let error = text(&output.stderr);
        assert!(error.contains(&format!("invalid value 'x' for '{named}': write a whole number")), "{error}");
    }
    let mut command = tandem(&["up", "--engine", "sim", "--listen", "127.0.0.1:0"]);
    let up = Up::of(command.env("TANDEM_ENGIN", "sim").env("TANDEM_API_KEY", "k"));
    up.signal("-TERM");
    let (_, log) = up.wait();
    assert!(log.contains("TANDEM_ENGIN") && !log.contains("TANDEM_API_KEY"), "{log}");
    for (variable, is_named) in [("TANDEM_CLUSTER_KEYFILE", true), ("TANDEM_CLUSTER_KEY_FILE", false)] {
        let output = tandem(&["completions", "bash"]).env(variable, "x").output().expect("the binary runs");
        assert!(output.status.success() && text(&output.stderr).contains(variable) == is_named, "{}", text(&output.stderr));
    }
}

#[test]
fn second_signal_ends_the_grace_period() {
    for (grace, second) in [("1", false), ("60", true)] {
        let up = sim(&["--grace-period", grace]);
        let _answer = running(&up, LONG);
        let started = tokio::time::Instant::now();
        up.signal("-INT");
        if second {
            // A process that refuses new requests has received the first signal.
            let refused = || {
                let mut answer = String::new();
                let read = up.send(CHAT, LONG).and_then(|mut stream| stream.read_line(&mut answer));
                read.is_err() || answer.is_empty() || answer.contains("503")
            };
            while !refused() {
                std::thread::yield_now();
            }
            up.signal("-INT");
        }
        let (status, errors) = up.wait();
        assert!(started.elapsed() < Duration::from_secs(20));
        assert_eq!(status.code(), Some(i32::from(second)), "{errors}");
        if second {
            assert_eq!(errors.lines().filter(|line| line.starts_with("tandem: ")).count(), 1, "{errors}");
        }
    }
}

#[test]
fn ready_reports_readiness_by_its_exit_code() {
    let check = |address: &str| {
        let output = ended(&["ready", address]);
        (output.status.code(), text(&output.stderr))
    };
    let up = sim(&[]);
    assert_eq!(check(up.address()), (Some(0), String::new()));
    let router = Up::spawn(
        &["router", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--workers", "127.0.0.1:1"],
        Stdio::piped(),
    );
    let (code, errors) = check(router.address());
    assert!(code == Some(1) && errors.contains("no decode worker has joined"), "{errors}");
    let unused = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port is free").to_string();
    let (code, errors) = check(&unused);
    assert!(code == Some(1) && errors.contains("--admin-listen"), "{errors}");
}

#[test]
fn port_in_use_is_reported_in_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = taken.local_addr().expect("the listener is bound").to_string();
    let output = ended(&["up", "--engine", "sim", "--log", "error", "--listen", &address]);
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(errors.contains(&format!("cannot listen on {address}")) && errors.contains("--listen"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn failed_start_prints_one_line_and_sets_the_exit_code() {
    let no_gpu =
        if std::path::Path::new("/dev/nvidiactl").exists() { "there is no GPU number" } else { "needs an NVIDIA driver" };
    for (args, code, expected) in [
        (&["up", "--engine", "cuda", "--device", "4294967295"][..], 1, no_gpu),
        (&["up", "--engine", "sim", "--model", "x.gguf"], 1, "there is no model"),
        (&["up", "--prefill", "remote", "--prefill-workers", "0"], 1, "--prefill-workers"),
        (&["up", "--model", "/nonexistent.gguf"], 1, "there is no model at /nonexistent.gguf"),
        (&["up", "--log", "tandem=loud"], 1, "log filter"),
        (&["up", "--log", "tandem_router,warning"], 1, "log filter (--log) is not valid: warning is not off, error, warn, info"),
        (&["up", "--log", "json"], 1, "set --log-format json"),
        (&["up", "--engine", "sim", "--tp", "2"], 1, "--tp needs --engine cuda"),
        (&["up", "--engine", "cuda", "--tp", "9"], 2, "9 is not in 1..=8"),
        (&["up", "--engine", "tpu"], 2, "possible values: cpu"),
        (&["up", "--config", "/nonexistent.toml"], 2, "/nonexistent.toml"),
        (&["down"], 2, "unrecognized subcommand"),
        (&["model", "fetch", "hf:x"], 2, "hf:ORG/NAME"),
        (&["model", "fetch", "/nonexistent.gguf"], 1, "there is no model"),
    ] {
        let args: Vec<&str> = if args[0] == "up" { [args, &["--listen", "127.0.0.1:0"]].concat() } else { args.to_vec() };
        let output = ended(&args);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.contains(expected), "{args:?}: {errors}");
        if code == 1 {
            assert_eq!(errors.lines().filter(|line| line.starts_with("tandem: ")).count(), 1, "{args:?}: {errors}");
        }
    }
}

#[test]
fn print_config_prints_effective_settings() {
    let output =
        tandem(&["up", "--engine", "sim", "--print-config"]).env("TANDEM_BLOCK_SIZE", "32").output().expect("the binary runs");
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0));
    assert!(printed.contains("block-size = 32") && printed.contains("engine = \"sim\""), "{printed}");
    let dir = tempfile::tempdir().expect("the system can create a temporary folder");
    let file = dir.path().join("tandem.toml");
    std::fs::write(&file, &printed).expect("the folder is writable");
    let from_file = ["up", "--config", file.to_str().expect("the path is UTF-8"), "--print-config"];
    let again = ended(&from_file);
    assert_eq!(text(&again.stdout), printed);
    let overridden = tandem(&from_file).env("TANDEM_BLOCK_SIZE", "64").output().expect("the binary runs");
    assert!(
        text(&overridden.stdout).contains("block-size = 64"),
        "the environment overrides the file: {}",
        text(&overridden.stdout)
    );
}

#[test]
fn model_fetch_prints_the_path_last() {
    let dir = tempfile::tempdir().expect("the system can create a temporary folder");
    let file = dir.path().join("Tiny.Q4_0.gguf");
    std::fs::write(&file, b"GGUF").expect("the folder is writable");
    let models = dir.path().to_str().expect("the path is UTF-8");
    let output = ended(&["model", "fetch", file.to_str().expect("the path is UTF-8"), "--models-dir", models]);
    assert_eq!(text(&output.stdout).lines().last(), file.to_str());
    // The expected hash is the output of `printf GGUF | sha256sum`.
    let revision = "revision b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd";
    assert_eq!(text(&output.stdout).lines().next(), Some(revision));
    let listed = text(&ended(&["model", "list", "--models-dir", models]).stdout);
    assert_eq!(listed.lines().last(), Some(&*format!("Tiny   0.0 MB  {}", file.display())));
    assert!(ended(&["model", "rm", "Tiny", "--models-dir", models]).status.success());
    assert!(!file.exists());
    let again = ended(&["model", "rm", "Tiny", "--models-dir", models]);
    assert!(again.status.code() == Some(1) && text(&again.stderr).contains("has no model Tiny"), "{again:?}");
}

#[test]
fn audit_writes_its_result_with_and_without_findings() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("the folder is writable");
        path.to_str().expect("the path is UTF-8").to_owned()
    };
    let (nothing, result) = (file("nothing", ""), folder.path().join("result"));
    let client = file("client", r#"{"request_id":"r","usage":{"prompt_tokens":52,"cached_tokens":48}}"#);
    let audit = |client: &str, result: &str| {
        ended(&["audit", "check", "--client", client, "--ledger", &nothing, "--metrics", &nothing, "--result", result])
    };
    let path = result.to_str().expect("the path is UTF-8");
    for (client, code) in [(&client, 1), (&nothing, 0)] {
        let output = audit(client, path);
        let found = text(&output.stdout).lines().count() as u64 - 1;
        let written = tandem_frontend::AuditResult::read(&result).expect("the result was written");
        assert_eq!((output.status.code(), written.findings, written.answers), (Some(code), found, code as u64), "{output:?}");
        assert!(written.checked_unix_s > 1_700_000_000);
    }
    let output = audit(&nothing, "/nowhere/result");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("--result /nowhere/result cannot be written"), "{output:?}");
}
