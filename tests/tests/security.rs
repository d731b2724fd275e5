//! docs/security.md names only tests that exist.

use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Returns all Rust sources below `folder`, without build outputs.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

#[test]
fn tests_named_on_the_security_page_exist() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/security.md"))?;
    // Names of tests are the only code on the page with two underscores or more.
    let is_test = |code: &&str| {
        code.matches('_').count() >= 2 && code.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    let is_metric = |code: &&str| code.starts_with("tandem_");
    let named: BTreeSet<&str> = page.split('`').filter(is_test).filter(|code| !is_metric(code)).collect();
    ensure!(named.len() >= 20, "only {named:?} were found on the page");
    let mut files = Vec::new();
    sources(&root, &mut files)?;
    let mut code = String::new();
    for file in &files {
        code.push_str(&fs::read_to_string(file).with_context(|| file.display().to_string())?);
    }
    let missing: Vec<_> = named.into_iter().filter(|name| !code.contains(&format!("fn {name}("))).collect();
    ensure!(missing.is_empty(), "docs/security.md names tests that do not exist: {missing:?}");
    Ok(())
}
