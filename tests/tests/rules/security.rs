//! Checks that docs/security.md names only tests that exist.

use std::collections::BTreeSet;
use tandem_tests::workspace::{files, root, text};

#[test]
fn tests_named_on_the_security_page_exist() {
    let root = root();
    let page = text(&root.join("docs/security.md"));
    // Names of tests are the only code in the document with at least two underscores.
    let is_test = |code: &&str| {
        code.matches('_').count() >= 2 && code.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    let is_metric = |code: &&str| code.starts_with("tandem_");
    let named: BTreeSet<&str> = page.split('`').filter(is_test).filter(|code| !is_metric(code)).collect();
    assert!(named.len() >= 20, "only {named:?} were found on the page");
    let is_rust = |file: &std::path::PathBuf| file.extension().is_some_and(|extension| extension == "rs");
    let code: String = files(&root).into_iter().filter(is_rust).map(|file| text(&file)).collect();
    let missing: Vec<_> = named.into_iter().filter(|name| !code.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "docs/security.md names tests that do not exist: {missing:?}");
}
