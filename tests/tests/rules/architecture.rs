//! Checks the dependencies between crates and rules for source files.

use cargo_metadata::{Dependency, DependencyKind};
use tandem_tests::workspace::{files, root, text};

/// The allowed dependencies of each crate, by folder. `tandem` and `tests` are not listed: they may use all crates except each other.
const ALLOWED: [(&str, &[&str]); 20] = [
    ("kv", &[]),
    ("client", &[]),
    ("load", &["client"]),
    ("model", &[]),
    ("model-store", &["process", "model"]),
    ("grammar", &["kv"]),
    ("proto", &["kv"]),
    ("process", &["proto", "kv"]),
    ("engine", &["grammar", "kv"]),
    ("devices", &["engine", "grammar", "kv", "model"]),
    ("transfer", &["process", "proto", "kv"]),
    ("router", &["process", "proto", "kv"]),
    ("simulator", &["kv", "load", "router"]),
    ("text", &["grammar", "kv", "model"]),
    ("api", &["text", "proto", "grammar", "kv"]),
    ("frontend", &["client", "process", "api", "text", "proto", "grammar", "kv", "model"]),
    ("worker", &["process", "proto", "grammar", "kv", "engine"]),
    ("adapter", &["client", "worker", "process", "grammar", "kv", "engine"]),
    ("prefill-worker", &["worker", "process", "proto", "kv", "engine", "transfer"]),
    ("decode-worker", &["worker", "process", "proto", "grammar", "kv", "engine", "transfer"]),
];

/// The dependencies that only tests have: the helpers in `tests`, the simulated device, and the names of its model. Tests may also use
/// anyhow.
const FOR_TESTS: [(&str, &str); 3] =
    [("tandem", "tandem-tests"), ("tandem-engine", "tandem-model"), ("tandem-prefill-worker", "tandem-devices")];

const LINES_MAX: usize = 500;

/// The maximum length of a line of Markdown, in characters.
const MARKDOWN_CHARS_MAX: usize = 140;

fn dependencies() -> Vec<(String, Vec<String>)> {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo reads the workspace");
    let crates = metadata.packages.iter().map(|package| {
        let is_for_tests = |name: &str| name == "anyhow" || FOR_TESTS.contains(&(package.name.as_str(), name));
        let counts = |dependency: &&Dependency| dependency.kind != DependencyKind::Development || !is_for_tests(&dependency.name);
        let names = package.dependencies.iter().filter(counts).map(|dependency| dependency.name.clone()).collect();
        (package.name.to_string(), names)
    });
    crates.collect()
}

fn folder(package: &str) -> &str {
    package.strip_prefix("tandem-").unwrap_or(package)
}

/// Returns a message for each dependency that is not allowed.
fn forbidden_dependencies(crates: &[(String, Vec<String>)]) -> Vec<String> {
    let ours = |name: &str| crates.iter().any(|(package, _)| package == name);
    let mut wrong = Vec::new();
    for (package, uses) in crates {
        let from = folder(package);
        let allowed = ALLOWED.iter().find(|(folder, _)| *folder == from);
        if allowed.is_none() && !matches!(from, "tandem" | "tests") {
            wrong.push(format!("{from} is not listed: add it to ALLOWED and to ARCHITECTURE.md"));
        }
        for to in uses.iter().filter(|name| ours(name)).map(|name| folder(name)) {
            let is_allowed = match allowed {
                Some((_, targets)) => targets.contains(&to),
                None => from == "tests" || to != "tests",
            };
            if !is_allowed {
                wrong.push(format!("{from} must not use {to}"));
            }
        }
        if uses.iter().any(|name| name == "anyhow") && !matches!(from, "tandem" | "tests") {
            wrong.push(format!("{from} uses anyhow: libraries have error enums"));
        }
    }
    wrong
}

/// Returns a message for each rule that a file breaks; `name` is its path in the workspace.
fn broken_rules(name: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let lines = text.lines().count();
    if lines > LINES_MAX {
        found.push(format!("{name} has {lines} lines: split it by topic"));
    }
    let library = name.contains("/src/") && !name.starts_with("crates/tandem/") && !name.starts_with("tests/");
    for (number, line) in text.lines().enumerate() {
        let code = line.trim_start();
        if code.starts_with("//") {
            if code.contains("TODO") && !code.contains("when") {
                found.push(format!("{name}:{}: a TODO names the condition that makes it worth doing (`when …`)", number + 1));
            }
            continue;
        }
        if code.starts_with("#[path") && code.contains("_tests.rs") {
            found.push(format!("{name}:{}: unit tests are `mod tests`, inline or in `MODULE/tests.rs`", number + 1));
        }
        if library && code.contains("%status,") {
            found.push(format!(
                "{name}:{}: a status is written with status_text; its own text has Rust's debug output",
                number + 1
            ));
        }
        let banned = ["println!(", "dbg!("].iter().find(|word| code.contains(*word));
        if let Some(word) = banned.filter(|_| library) {
            found.push(format!("{name}:{}: {word}…) is for the binary; use tracing", number + 1));
        }
    }
    found
}

#[test]
fn crates_depend_only_on_allowed_crates() {
    let crates = dependencies();
    assert!(crates.len() > ALLOWED.len(), "the workspace was not read");
    assert_eq!(forbidden_dependencies(&crates), [] as [String; 0]);
}

/// The list of allowed dependencies must not contain a dependency that does not exist.
#[test]
fn allowed_dependencies_exist() {
    let crates = dependencies();
    for (from, targets) in ALLOWED {
        let found = crates.iter().find(|(package, _)| folder(package) == from);
        let (_, uses) = found.unwrap_or_else(|| panic!("{from} is in ALLOWED, but is not a crate"));
        for to in targets {
            assert!(uses.iter().any(|used| folder(used) == *to), "{from} may use {to}, but does not: remove it from ALLOWED");
        }
    }
}

#[test]
fn forbidden_dependency_is_detected() {
    let mut crates = dependencies();
    let mut add = |from: &str, to: &str| {
        let (_, uses) = crates.iter_mut().find(|(package, _)| package == from).expect("the package is a workspace crate");
        uses.push(to.to_owned());
    };
    add("tandem-router", "tandem-engine");
    add("tandem-kv", "anyhow");
    add("tandem", "tandem-tests");
    crates.push(("tandem-utils".to_owned(), vec!["tandem-kv".to_owned()]));
    let mut wrong = forbidden_dependencies(&crates);
    wrong.sort();
    let starts = ["kv uses anyhow", "router must not use engine", "tandem must not use tests", "utils is not listed"];
    for (wrong, start) in wrong.iter().zip(starts) {
        assert!(wrong.starts_with(start), "{wrong}");
    }
    // There may be one more message than entries in `starts`, because `utils` must not use `kv` either.
    assert!(wrong.len() >= starts.len());
}

#[test]
fn files_are_short_and_do_not_print() {
    let root = root();
    let mut files = files(&root);
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    assert!(files.len() > 50, "the workspace was not read");
    let mut found = Vec::new();
    for file in files {
        let name = file.strip_prefix(&root).expect("the file is below the root").to_string_lossy().replace('\\', "/");
        found.extend(broken_rules(&name, &text(&file)));
    }
    assert_eq!(found, [] as [String; 0]);
}

#[test]
fn violations_of_file_rules_are_detected() {
    let long = "x\n".repeat(LINES_MAX + 1);
    for (name, text, expected) in [
        ("crates/kv/src/a.rs", "fn a() { println!(\"x\") }", 1),
        ("crates/tandem/src/a.rs", "fn a() { println!(\"x\") }", 0),
        ("crates/kv/benches/a.rs", "fn a() { println!(\"x\") }", 0),
        ("crates/kv/src/a.rs", "/// Not `println!(`.", 0),
        ("crates/kv/src/a.rs", "tracing::debug!(%status, \"x\");", 1),
        ("crates/kv/src/a.rs", "// TODO faster", 1),
        ("crates/kv/src/a.rs", "#[path = \"a_tests.rs\"]\nmod tests;", 1),
        ("crates/kv/src/a.rs", "// TODO faster when there are 512 workers", 0),
        ("crates/kv/src/a.rs", long.as_str(), 1),
    ] {
        assert_eq!(broken_rules(name, text).len(), expected, "{name}: {}", &text[..20.min(text.len())]);
    }
}

#[test]
fn lines_of_documents_are_short() {
    let mut found = Vec::new();
    for file in files(&root()).into_iter().filter(|file| file.extension().is_some_and(|ending| ending == "md")) {
        let long = |(_, line): &(usize, &str)| line.chars().count() > MARKDOWN_CHARS_MAX;
        let text = text(&file);
        found.extend(text.lines().enumerate().filter(long).map(|(number, _)| format!("{}:{}", file.display(), number + 1)));
    }
    assert!(found.is_empty(), "lines of more than {MARKDOWN_CHARS_MAX} characters:\n{}", found.join("\n"));
}
