//! `tandem model`: fetches models into the store, and lists, shows and removes the stored ones.

use crate::{cli::ModelCommand, text_table::text_table};
use serde_json::{Value, json};
use std::path::Path;
use tandem_model_store::{ModelStoreError, Store, StoredModel, list, named_in, remove, revision_in, source_in};

/// Runs a subcommand of `tandem model`, and returns what it prints.
///
/// # Errors
/// A model cannot be provided, is not in the store, or cannot be read or removed.
pub fn run(command: ModelCommand) -> Result<String, ModelStoreError> {
    match command {
        ModelCommand::Fetch { source, store } => {
            let store = Store::new(store)?;
            let model = store.get(&source)?;
            // The revision is stored when it is computed, so that serving processes need not compute it.
            Ok(format!("revision {}\n{}\n", store.revision(&model)?, model.path.display()))
        }
        ModelCommand::List { folder, json } => {
            let dir = folder.path()?;
            let models = list(&dir)?;
            if json {
                let models: Vec<Value> = models.iter().map(|model| facts(&dir, model)).collect();
                return Ok(format!("{:#}\n", Value::from(models)));
            }
            if models.is_empty() {
                return Ok(format!("no models are in {}; `tandem model fetch` downloads one\n", dir.display()));
            }
            let heads = ["model", "size", "path"].map(str::to_owned).to_vec();
            let rows = models.iter().map(|model| vec![model.id.clone(), size(model.bytes), model.path.display().to_string()]);
            Ok(text_table([heads].into_iter().chain(rows), 3))
        }
        ModelCommand::Show { name, folder, json } => {
            let (dir, model) = named_in(&folder, &name)?;
            let mut facts = facts(&dir, &model);
            facts["revision"] = revision_in(&dir, &model)?.into();
            if json {
                return Ok(format!("{facts:#}\n"));
            }
            let text = |fact: &str| facts[fact].as_str().unwrap_or("unknown").to_owned();
            let rows = ["model", "source", "format", "size", "revision", "path"].map(|fact| {
                let value = if fact == "size" { format!("{} ({} bytes)", size(model.bytes), model.bytes) } else { text(fact) };
                vec![fact.to_owned(), value]
            });
            Ok(text_table(rows, 2))
        }
        ModelCommand::Rm { name, folder } => {
            let (dir, model) = named_in(&folder, &name)?;
            remove(&dir, &model)?;
            Ok(format!("removed {} ({})\n", model.path.display(), size(model.bytes)))
        }
    }
}

/// Returns the facts about a model in the store at `dir`, from its path and its files.
fn facts(dir: &Path, model: &StoredModel) -> Value {
    json!({
        "model": model.id,
        "source": source_in(dir, model),
        "format": if model.path.is_dir() { "safetensors" } else { "GGUF" },
        "bytes": model.bytes,
        "path": model.path.display().to_string(),
    })
}

/// Formats a number of bytes for people.
fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    if bytes >= 1e9 { format!("{:.1} GB", bytes / 1e9) } else { format!("{:.1} MB", bytes / 1e6) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tandem_model_store::StoreFolder;

    fn store(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().expect("a file is in a folder")).expect("the folder is writable");
            fs::write(path, b"GGUF").expect("the folder is writable");
        }
        folder
    }

    fn of(store: &tempfile::TempDir) -> StoreFolder {
        StoreFolder { models_dir: Some(store.path().to_owned()) }
    }

    fn rm(store: &tempfile::TempDir, name: &str) -> Result<String, String> {
        run(ModelCommand::Rm { name: name.into(), folder: of(store) }).map_err(|error| error.to_string())
    }

    #[test]
    fn list_and_show_say_where_models_come_from() {
        let store = store(&["pypi/a==1#0f/Small-1B-Q4_K_M.gguf", "hf/org/Big@main/c0ffee/Big.gguf", "own.gguf"]);
        let text = |json| run(ModelCommand::List { folder: of(&store), json }).expect("the store is readable");
        let lines: Vec<String> =
            text(false).lines().map(|line| line.split_whitespace().take(3).collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines, ["model size path", "Big 0.0 MB", "own 0.0 MB", "Small-1B 0.0 MB"]);
        let listed: Value = serde_json::from_str(&text(true)).expect("it is JSON");
        let sources: Vec<_> = listed.as_array().into_iter().flatten().map(|model| model["source"].as_str()).collect();
        assert_eq!(sources, [Some("hf:org/Big@c0ffee"), None, Some("pypi:a==1#sha256=0f")]);

        let show = |json| run(ModelCommand::Show { name: "Small-1B".into(), folder: of(&store), json }).expect("it is stored");
        let shown: Value = serde_json::from_str(&show(true)).expect("it is JSON");
        assert_eq!((&shown["bytes"], &shown["format"]), (&json!(4), &json!("GGUF")));
        // This is the output of `printf GGUF | sha256sum`.
        assert_eq!(shown["revision"], "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd");
        assert!(show(false).contains("source    pypi:a==1") && show(false).contains("4 bytes"), "{}", show(false));
        let empty = tempfile::tempdir().expect("the system can create a temporary folder");
        let nothing = run(ModelCommand::List { folder: of(&empty), json: false }).expect("the store is empty");
        assert!(nothing.contains("tandem model fetch"), "{nothing}");
    }

    #[test]
    fn copies_of_one_model_are_found_by_its_name() {
        let store = store(&["pypi/a/A.gguf", "pypi/a==1#0f/A.gguf"]);
        let shown = run(ModelCommand::Show { name: "A".into(), folder: of(&store), json: true }).expect("both are the same");
        assert!(shown.contains("pypi/a==1#0f/A.gguf"), "{shown}");
        fs::write(store.path().join("pypi/a/A.gguf"), b"GGUF1").expect("the folder is writable");
        fs::write(store.path().join("pypi/a==1#0f/A.gguf"), b"GGUF2").expect("the folder is writable");
        run(ModelCommand::Show { name: "A".into(), folder: of(&store), json: true }).expect_err("the contents differ");
    }

    #[test]
    fn removed_model_leaves_no_folder_and_other_models_stay() {
        let store = store(&["pypi/a/A.gguf", "hf/org/b/c1/B.gguf", "hf/org/b/c2/B.gguf"]);
        fs::write(store.path().join("hf/org/b/c2/B.gguf"), b"GGUF2").expect("the folder is writable");
        let error = rm(&store, "B").expect_err("two models have this name");
        assert!(error.contains("c1/B.gguf") && error.contains("c2/B.gguf"), "{error}");
        let path = store.path().join("hf/org/b/c1/B.gguf");
        let removed = rm(&store, path.to_str().expect("the path is UTF-8")).expect("the path names one of them");
        assert!(removed.starts_with("removed ") && removed.contains("c1/B.gguf"), "{removed}");
        assert!(!store.path().join("hf/org/b/c1").exists() && store.path().join("hf/org/b/c2/B.gguf").exists());
        rm(&store, "A").expect("it is stored");
        assert!(!store.path().join("pypi").exists() && store.path().exists());
    }

    #[test]
    fn only_models_in_the_store_are_removed() {
        let (store, other) = (store(&["a/A.gguf"]), store(&["Other.gguf"]));
        let outside = other.path().join("Other.gguf");
        let outside_name = outside.to_str().expect("the path is UTF-8").to_owned();
        for name in ["Other", &outside_name, "../A", "", ".", "/"] {
            assert!(rm(&store, name).is_err_and(|error| error.contains("tandem model list")), "{name}");
        }
        std::os::unix::fs::symlink(other.path(), store.path().join("link")).expect("the folder is writable");
        std::os::unix::fs::symlink(&outside, store.path().join("Linked.gguf")).expect("the folder is writable");
        for name in ["Other", "Linked"] {
            let error = rm(&store, name).expect_err("the model is outside the store");
            assert!(error.contains("outside the store") || error.contains("several models"), "{error}");
        }
        assert!(outside.exists() && store.path().join("a/A.gguf").exists());
    }
}
