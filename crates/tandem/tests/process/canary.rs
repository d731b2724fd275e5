//! Tests that no log line at any level, of any component or library, contains text of prompts or answers.

use crate::{
    cluster::{Plan, address, ready},
    up::Up,
};
use std::fs::File;

/// A word that occurs in no log line by chance.
const CANARY: &str = "Xylquophant";
/// The token ids that a request sends as its prompt.
const IDS: [u32; 6] = [201, 202, 203, 251, 252, 253];

fn texts(answer: &str) -> Vec<String> {
    let parts = ["\"content\":\"", "\"text\":\""].map(|key| answer.split(key).skip(1).collect::<Vec<_>>()).concat();
    parts.into_iter().filter_map(|part| part.split('"').next()).map(str::to_owned).collect()
}

/// Sends requests, answered and refused ones. Returns the texts that may not be logged.
fn send_requests(up: &Up, model: &str) -> Vec<String> {
    let long = format!("{CANARY} ").repeat(60);
    let requests = [
        (
            "/v1/chat/completions",
            format!(r#"{{"model":"{model}","max_tokens":30,"messages":[{{"role":"user","content":"{long}"}}]}}"#),
        ),
        (
            "/v1/chat/completions",
            format!(
                r#"{{"model":"{model}","max_tokens":30,"stream":true,"stop":["{CANARY}"],"messages":[{{"role":"system","content":"{CANARY}"}},{{"role":"user","content":"hello"}}]}}"#
            ),
        ),
        (
            "/v1/completions",
            format!(r#"{{"model":"{model}","max_tokens":30,"prompt":["{long}","{CANARY}"],"echo":true,"logprobs":2}}"#),
        ),
        ("/v1/completions", format!(r#"{{"model":"{model}","max_tokens":3,"prompt":{IDS:?},"cache_salt":"{CANARY}"}}"#)),
        // The text of a refused request must not be logged either.
        ("/v1/completions", format!(r#"{{"model":"{model}","prompt":"{CANARY}","temperature":"{CANARY}"}}"#)),
        ("/v1/completions", format!(r#"{{"model":"{model}","prompt":"{CANARY}","#)),
        ("/v1/chat/completions", format!(r#"{{"model":"{model}","messages":[{{"role":"{CANARY}","content":"{CANARY}"}}]}}"#)),
    ];
    let answers: Vec<String> = requests.iter().map(|(path, body)| up.answer(path, body)).collect();
    for answer in &answers[..4] {
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    for answer in &answers[4..] {
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    let ids = |separator: &str| IDS.map(|id| id.to_string()).join(separator);
    let bytes = CANARY.bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(", ");
    let mut forbidden = vec![CANARY.to_owned(), ids(", "), ids(","), bytes];
    // No sequence of 16 characters of the answers' texts may be logged. Such a sequence is too long to be in the log by chance.
    let answered: String = answers[..4].iter().flat_map(|answer| texts(answer)).collect();
    let letters: Vec<char> = answered.chars().filter(char::is_ascii).collect();
    forbidden.extend(
        letters.windows(16).map(|sequence| sequence.iter().collect::<String>()).filter(|sequence| !sequence.contains('\\')),
    );
    assert!(forbidden.len() > 40, "the answers have text: {answered}");
    forbidden
}

fn check_log(log: &str, forbidden: &[String]) {
    assert!(log.contains("TRACE") && log.contains("DEBUG"), "the log has all levels, in {} lines", log.lines().count());
    for word in forbidden {
        let found = log.lines().find(|line| line.contains(word));
        assert!(found.is_none(), "{word:?} is logged in: {}", found.unwrap_or_default());
    }
}

/// Checks the log of `tandem up`, whose parts call each other directly.
fn check_log_of_up(args: &[&str], model: &str) {
    let dir = tempfile::tempdir().expect("the system can create a temporary folder");
    let log = dir.path().join("log");
    let up = Up::start(&[&["--log", "trace"], args].concat(), File::create(&log).expect("the folder is writable"));
    let forbidden = send_requests(&up, model);
    up.signal("-INT");
    assert!(up.wait().0.success());
    check_log(&std::fs::read_to_string(log).expect("the log is text"), &forbidden);
}

#[test]
fn logs_contain_no_prompt_or_answer_text_on_the_simulator() {
    for prefill in ["remote", "local"] {
        check_log_of_up(&["--engine", "sim", "--prefill", prefill], "sim");
    }
}

#[test]
fn logs_of_separate_processes_contain_no_prompt_or_answer_text() {
    let (plan, workers, args) = (Plan::new(), [address(), address()], ["--log", "trace"]);
    plan.list(&workers);
    let _others =
        [plan.router(&args), plan.worker("prefill", "p", workers[0], &args), plan.worker("decode", "d", workers[1], &args)];
    let frontend = plan.frontend(&args);
    ready(&frontend);
    let forbidden = send_requests(&frontend, "sim");
    for name in ["frontend", "router", "p", "d"] {
        check_log(&plan.log(name), &forbidden);
    }
}

#[test]
fn logs_contain_no_prompt_or_answer_text_on_the_real_model() {
    let Ok(model) = std::env::var("TANDEM_MODEL") else {
        #[expect(clippy::print_stderr, reason = "a skipped test must be visible")]
        {
            eprintln!("SKIPPED: needs the default model; set TANDEM_MODEL to what `tandem model fetch` prints");
        }
        return;
    };
    check_log_of_up(&["--model", &model, "--served-model-name", "m", "--prefill", "remote"], "m");
}
