//! The text of prompts and answers is in no log line, at any level, of any part or library.

use crate::up::Up;
use std::{fs::File, path::Path};

/// In no word list, and no word of any log line.
const CANARY: &str = "Xylquophant";
/// Token ids of a prompt that is given as such.
const IDS: [u32; 6] = [201, 202, 203, 251, 252, 253];

/// `tandem up`, with everything that any part has to say in the file.
fn talkative(args: &[&str], log: &Path) -> Up {
    Up::start(&[&["--log", "trace"], args].concat(), File::create(log).expect("a temporary file"))
}

/// The answers' texts, as they stand in JSON.
fn texts(answer: &str) -> Vec<String> {
    let parts = ["\"content\":\"", "\"text\":\""].map(|key| answer.split(key).skip(1).collect::<Vec<_>>()).concat();
    parts.into_iter().filter_map(|part| part.split('"').next()).map(str::to_owned).collect()
}

fn no_line_tells(up: Up, model: &str, log: &Path) {
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
        // The text of refused requests is not logged either.
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
    assert!(log.contains("TRACE") && log.contains("DEBUG") && log.lines().count() > 1_000, "the log is at its most talkative");
    let ids = |separator: &str| IDS.map(|id| id.to_string()).join(separator);
    let bytes = CANARY.bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(", ");
    let mut forbidden = vec![CANARY.to_owned(), ids(", "), ids(","), bytes];
    // Of the answers: whole streams joined, any stretch that is too long to be there by chance.
    let answered: String = answers[..4].iter().flat_map(|answer| texts(answer)).collect();
    let letters: Vec<char> = answered.chars().filter(char::is_ascii).collect();
    forbidden
        .extend(letters.windows(16).map(|stretch| stretch.iter().collect::<String>()).filter(|stretch| !stretch.contains('\\')));
    assert!(forbidden.len() > 40, "there were answers: {answered}");
    for word in forbidden {
        let found = log.lines().find(|line| line.contains(&word));
        assert!(found.is_none(), "{word:?} is logged in: {}", found.unwrap_or_default());
    }
}

#[test]
fn logs_hold_no_text_on_the_simulator() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let log = dir.path().join("log");
    for prefill in ["remote", "local"] {
        no_line_tells(talkative(&["--engine", "sim", "--prefill", prefill], &log), "sim", &log);
    }
}

#[test]
fn logs_hold_no_text_on_the_real_model() {
    let Ok(model) = std::env::var("TANDEM_MODEL") else {
        #[expect(clippy::print_stderr, reason = "a skipped test must be visible")]
        {
            eprintln!("SKIPPED: needs the default model; set TANDEM_MODEL to what `tandem model fetch` prints");
        }
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let log = dir.path().join("log");
    let up = talkative(&["--model", &model, "--served-model-name", "m", "--prefill", "remote"], &log);
    no_line_tells(up, "m", &log);
}
