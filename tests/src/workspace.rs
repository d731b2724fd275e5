//! The files of this workspace, for tests that check source code and documents.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns the root folder of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate is in the workspace").to_owned()
}

/// Returns the folders of all crates: those with a manifest in the root folder or in `crates`.
pub fn crates() -> Vec<PathBuf> {
    let folders =
        [root(), root().join("crates")].into_iter().flat_map(|parent| fs::read_dir(parent).expect("the workspace is readable"));
    folders.flatten().map(|entry| entry.path()).filter(|path| path.join("Cargo.toml").exists()).collect()
}

/// Returns the text of a source file.
pub fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{} is not readable as UTF-8: {error}", path.display()))
}

/// Returns all files at or below a path, except those in hidden folders and in folders of build outputs.
pub fn files(path: &Path) -> Vec<PathBuf> {
    let is_source =
        |path: &PathBuf| path.file_name().is_some_and(|name| name != "target" && !name.to_string_lossy().starts_with('.'));
    let (mut files, mut paths) = (Vec::new(), vec![path.to_owned()]);
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).expect("the workspace is readable").flatten();
            paths.extend(entries.map(|entry| entry.path()).filter(is_source));
        } else {
            files.push(path);
        }
    }
    files
}
