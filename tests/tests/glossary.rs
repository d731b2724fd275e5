//! Checks the words of the code base against docs/glossary.md: the words in backticks in its last table must not occur in the folders below.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Folders and files whose words are checked. A folder is added when it is clean; no file of a listed folder is left out.
const CHECKED: &[&str] = &[
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "README.md",
    "SECURITY.md",
    "bench",
    "ci/test.sh",
    "ci/vllm",
    "ci/vllm.sh",
    "deploy",
    "docs",
    "frontend",
    "model",
    "node/src",
    "engine",
    "kv",
    "proto",
    "router",
    "worker",
];

/// Lines that may contain a banned word, by a part of their text, each with its reason.
const ALLOWED: &[&str] = &[
    // The prompt of an example.
    "Explain it so that a child understands, and then tell me who invented it",
];

/// File names that end so are checked.
const ENDINGS: &[&str] = &[".rs", ".proto", ".md", ".toml", ".yml", ".json", ".sh", ".py", ".js", ".html", ".cu", ".cfg"];

const GLOSSARY: &str = "docs/glossary.md";
const HEADING: &str = "## Words that are not used";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace").to_owned()
}

/// The lower-case words of a text, with an empty word for each other character than a space or an underscore. Names are split at underscores and
/// humps: `circuitOpen`, `circuit_open` and `CircuitOpen` have two words.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut previous = ' ';
    for letter in text.chars() {
        if letter.is_alphabetic() {
            if !previous.is_alphabetic() || (letter.is_uppercase() && previous.is_lowercase()) {
                words.push(String::new());
            }
            words.last_mut().expect("a word has begun").extend(letter.to_lowercase());
        } else if !matches!(letter, ' ' | '_') {
            words.push(String::new());
        }
        previous = letter;
    }
    words
}

/// The banned words and sequences of words: those in backticks in the first column of the glossary's last table.
fn banned(glossary: &str) -> Vec<Vec<String>> {
    let (_, table) = glossary.split_once(HEADING).expect("the glossary has the table");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let quoted = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    quoted.map(words).collect()
}

/// A sentence for each banned term in a text; `name` is its path in the workspace.
fn misused(name: &str, text: &str, banned: &[Vec<String>]) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if ALLOWED.iter().any(|allowed| line.contains(allowed)) {
            continue;
        }
        let words = words(line);
        for term in banned.iter().filter(|term| words.windows(term.len()).any(|window| window == term.as_slice())) {
            found.push(format!("{name}:{}: {:?} is not a word of docs/glossary.md: {}", number + 1, term.join(" "), line.trim()));
        }
    }
    found
}

/// The files at or under a path that are checked.
fn files(path: &Path, into: &mut Vec<PathBuf>) {
    if path.is_dir() {
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.') || name == "target");
        for entry in fs::read_dir(path).expect("the workspace is readable").flatten().filter(|_| !hidden) {
            files(&entry.path(), into);
        }
    } else if ENDINGS.iter().any(|ending| path.to_string_lossy().ends_with(ending)) {
        into.push(path.to_owned());
    }
}

#[test]
fn banned_words_do_not_occur() {
    let root = root();
    let glossary = fs::read_to_string(root.join(GLOSSARY)).expect("the glossary is there");
    let banned = banned(&glossary);
    assert!(banned.len() > 20, "the table was not read: {banned:?}");
    let mut found = Vec::new();
    for part in CHECKED {
        let mut paths = Vec::new();
        files(&root.join(part), &mut paths);
        assert!(!paths.is_empty(), "{part} has no files");
        for path in paths {
            let name = path.strip_prefix(&root).expect("it was found there").to_string_lossy().replace('\\', "/");
            let text = fs::read_to_string(&path).expect("checked files are UTF-8");
            let checked = if name == GLOSSARY { text.split(HEADING).next().unwrap_or_default() } else { &text };
            found.extend(misused(&name, checked, &banned));
        }
    }
    assert!(found.is_empty(), "{} lines:\n{}", found.len(), found.join("\n"));
}

#[test]
fn banned_words_are_found_in_names_and_text() {
    let banned = banned(&format!("{HEADING}\n| Not this | This |\n|---|---|\n| `left alone`, `nobody`, link | this |\n"));
    assert_eq!(banned.len(), 2, "words without backticks are not checked: {banned:?}");
    for (text, expected) in [
        ("let left_alone = 1;", 1),
        ("struct LeftAlone;", 1),
        ("the worker is left alone", 1),
        ("// Nobody waits, as it is left alone", 2),
        ("it has left, alone", 0),
        ("let (left, alone) = pair;", 0),
        ("link", 0),
    ] {
        assert_eq!(misused("a.rs", text, &banned).len(), expected, "{text}");
    }
}
