//! Checks the words of the code base: the words in backticks in the last table of docs/glossary.md must not occur in the folders below, and
//! comments must not be fragments.

use tandem_tests::workspace::{files, root, text};

const CHECKED: &[&str] = &[
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "README.md",
    "SECURITY.md",
    "bench",
    "ci",
    "crates",
    "decode-worker",
    "deploy",
    "docs",
    "frontend",
    "prefill-worker",
    "proto",
    "router",
    "tests",
];

/// Files that contain texts of other authors, as data for tests.
const DATA: &[&str] = &[
    "ci/goldens/conversations.json",
    "ci/goldens/cuts.json",
    "ci/goldens/snippets.py",
    "ci/goldens/templates.json",
    "ci/goldens/texts.py",
    "ci/goldens/tokenizer.json",
    "ci/goldens/tokenizers.json",
];

/// Parts of lines in which banned words are allowed.
const ALLOWED: &[&str] = &[
    // This line is part of a prompt in an example.
    "Explain it so that a child understands, and then tell me who invented it",
];

/// The endings of the names of files that are checked.
const ENDINGS: &[&str] = &[".rs", ".proto", ".md", ".toml", ".yml", ".json", ".sh", ".py", ".js", ".html", ".cu", ".cfg"];

const GLOSSARY: &str = "docs/glossary.md";
const HEADING: &str = "## Words that are not used";

/// Returns the words of a text in lower case. Each character other than letters, spaces and underscores adds an empty word, which separates
/// sequences of words. Names are split: `circuitOpen`, `circuit_open` and `CircuitOpen` have two words.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut previous = ' ';
    for letter in text.chars() {
        if letter.is_alphabetic() {
            if !previous.is_alphabetic() || (letter.is_uppercase() && previous.is_lowercase()) {
                words.push(String::new());
            }
            words.last_mut().expect("the list has a word").extend(letter.to_lowercase());
        } else if !matches!(letter, ' ' | '_') {
            words.push(String::new());
        }
        previous = letter;
    }
    words
}

/// Returns the banned words and sequences of words: those in backticks in the first column of the glossary's last table.
fn banned(glossary: &str) -> Vec<Vec<String>> {
    let (_, table) = glossary.split_once(HEADING).expect("the glossary has the table");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let quoted = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    quoted.map(words).collect()
}

/// Returns a message for each banned term in a text; `name` is its path in the workspace.
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

/// Returns the text of a line comment without its slashes; `None` if the line is not a comment.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim())
}

/// Returns whether the text of a comment of one line is a fragment: a single word, or an owner without a noun, such as `The attempt's.` or
/// `Of all workers.`
fn is_fragment(text: &str) -> bool {
    let Some(text) = text.strip_suffix('.').filter(|text| text.starts_with(char::is_alphabetic)) else { return false };
    let words = text.split(' ').count();
    words == 1 || (words <= 3 && text.ends_with("'s")) || (text.starts_with("Of ") && !text.contains(','))
}

/// Returns a message for each comment in Rust code that is a fragment; `name` is its path in the workspace.
fn fragments(name: &str, text: &str) -> Vec<String> {
    let comments: Vec<Option<&str>> = [None].into_iter().chain(text.lines().map(comment)).chain([None]).collect();
    let single = comments.windows(3).enumerate().filter_map(|(number, around)| match around {
        [None, Some(text), None] if is_fragment(text) => {
            Some(format!("{name}:{}: the comment is not a sentence: {text}", number + 1))
        }
        _ => None,
    });
    single.collect()
}

#[test]
fn comments_are_sentences_without_banned_words() {
    let root = root();
    let glossary = text(&root.join(GLOSSARY));
    let banned = banned(&glossary);
    assert!(banned.len() > 20, "the table was not read: {banned:?}");
    let mut found = Vec::new();
    for part in CHECKED {
        let mut paths = files(&root.join(part));
        paths.retain(|path| ENDINGS.iter().any(|ending| path.to_string_lossy().ends_with(ending)));
        assert!(!paths.is_empty(), "{part} has no files");
        for path in paths {
            let name = path.strip_prefix(&root).expect("the file is under the root").to_string_lossy().replace('\\', "/");
            if DATA.contains(&name.as_str()) {
                continue;
            }
            let text = text(&path);
            if name.ends_with(".rs") {
                found.extend(fragments(&name, &text));
            }
            let checked = if name == GLOSSARY { text.split(HEADING).next().unwrap_or_default() } else { &text };
            found.extend(misused(&name, checked, &banned));
        }
    }
    assert!(found.is_empty(), "{} lines:\n{}", found.len(), found.join("\n"));
}

#[test]
fn banned_words_are_detected_in_names_and_text() {
    let banned = banned(&format!("{HEADING}\n| Not this | This |\n|---|---|\n| `blue moon`, `whale`, link | this |\n"));
    assert_eq!(banned.len(), 2, "words without backticks are not checked: {banned:?}");
    for (text, expected) in [
        ("let blue_moon = 1;", 1),
        ("struct BlueMoon;", 1),
        ("the blue moon", 1),
        ("// Whale under a blue moon", 2),
        ("a blue, moon", 0),
        ("let (blue, moon) = pair;", 0),
        ("link", 0),
    ] {
        assert_eq!(misused("a.rs", text, &banned).len(), expected, "{text}");
    }
}

#[test]
fn comments_that_are_fragments_are_detected() {
    for (text, expected) in [
        ("/// Why.", 1),
        ("let a = 1;\n    // Milliseconds.\nlet b = 2;", 1),
        ("/// The attempt's.\na: u32,", 1),
        ("/// Of all workers.\na: u32,", 1),
        ("/// Of two workers, the first is chosen.", 0),
        ("/// In milliseconds.", 0),
        ("/// The default value is the worker's.", 0),
        ("//! A long sentence that ends on its second\n//! line.", 0),
        ("/// `POST`.", 0),
        ("let address = \"http://example.\";", 0),
    ] {
        assert_eq!(fragments("a.rs", text).len(), expected, "{text}");
    }
}
