//! Tests that no log line at any level, of any component or library, contains text of prompts or answers.

use crate::up::Up;
use std::{fs::File, path::Path};

/// A word that occurs in no log line by chance.
const CANARY: &str = "Xylquophant";
/// The token ids that a request sends as its prompt.
const IDS: [u32; 6] = [201, 202, 203, 251, 252, 253];

fn start_with_trace_log(args: &[&str], log: &Path) -> Up {
    Up::start(&[&["--log", "trace"], args].concat(), File::create(log).expect("the folder is writable"))
}

fn texts(answer: &str) -> Vec<String> {
    let parts = ["\"content\":\"", "\"text\":\""].map(|key| answer.split(key).skip(1).collect::<Vec<_>>()).concat();
    parts.into_iter().filter_map(|part| part.split('"').next()).map(str::to_owned).collect()
}

fn check_that_log_has_no_text(up: Up, model: &str, log: &Path) {
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
    up.signal("-INT");
    assert!(up.wait().0.success());
    let log = std::fs::read_to_string(log).expect("the log is text");
    assert!(log.contains("TRACE") && log.contains("DEBUG") && log.lines().count() > 100, "the log has all levels");
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
    for word in forbidden {
        let found = log.lines().find(|line| line.contains(&word));
        assert!(found.is_none(), "{word:?} is logged in: {}", found.unwrap_or_default());
    }
}

#[test]
fn logs_contain_no_prompt_or_answer_text_on_the_simulator() {
    let dir = tempfile::tempdir().expect("the system can create a temporary folder");
    let log = dir.path().join("log");
    for prefill in ["remote", "local"] {
        check_that_log_has_no_text(start_with_trace_log(&["--engine", "sim", "--prefill", prefill], &log), "sim", &log);
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
    let dir = tempfile::tempdir().expect("the system can create a temporary folder");
    let log = dir.path().join("log");
    let up = start_with_trace_log(&["--model", &model, "--served-model-name", "m", "--prefill", "remote"], &log);
    check_that_log_has_no_text(up, "m", &log);
}
