//! GGUF files, and whole models in safetensors, in repositories on the Hugging Face hub, or on a mirror of it.
//!
//! One request to the hub resolves a revision to a commit and lists the commit's files with their hashes. All files are then downloaded
//! from that commit and compared with those hashes, so the servers that deliver the bytes need not be trusted.

use super::{
    ModelError, Source, StoreArgs,
    digests::sha256_of,
    progress::Progress,
    source::is_path,
    store::{Download, check_hash, check_size, several},
};
use hf_hub::{
    Cache, Repo, RepoType,
    api::sync::{Api, ApiBuilder, ApiError, ApiRepo},
};
use serde::Deserialize;
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};
use tandem_model::{revision::git_blob_sha1, shards_of_index};

/// A broken connection is tried again this often, from where it broke.
const RETRIES: usize = 3;

/// The revision to download when the source names none.
const MAIN: &str = "main";

/// The files that a model must have in addition to its weights; `WELCOME` names those that it may have.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];
const WELCOME: [&str; 3] = ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
const INDEX: &str = "model.safetensors.index.json";
const WHOLE: &str = "model.safetensors";

/// The model that is requested from the hub.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// The source as the user wrote it.
    pub(super) source: &'a Source,
    /// The repository's name, `ORG/NAME`.
    pub(super) repository: &'a str,
    /// A branch, a tag or a commit.
    pub(super) revision: Option<&'a str>,
    /// The repository's model when absent.
    pub(super) file: Option<&'a str>,
}

/// Downloads a GGUF file, or a whole model in safetensors, into `partial`. The files end up below a folder named after the commit.
pub(super) fn download(settings: &StoreArgs, wanted: Wanted<'_>, partial: &Path) -> Result<Download, ModelError> {
    let Wanted { source, repository, revision, file } = wanted;
    let api = api(settings, partial, source)?;
    let at = |revision: &str| api.repo(Repo::with_revision(repository.to_owned(), RepoType::Model, revision.to_owned()));
    let listing = listing(source, &at(revision.unwrap_or(MAIN)), revision)?;
    let commit = Commit { repo: at(&listing.sha), files: &listing.siblings, source };
    let file = match file {
        Some(file) => file.to_owned(),
        None => match commit.contents()? {
            Contents::Gguf(file) => file,
            Contents::Safetensors => {
                let name = repository.rsplit('/').next().unwrap_or(repository);
                let place = Path::new(&listing.sha).join(name);
                return Ok(Download { file: commit.directory(partial)?, place });
            }
        },
    };
    let place = Path::new(&listing.sha).join(&file);
    Ok(Download { file: commit.fetch(&file)?, place })
}

fn hub(source: &Source, cause: ApiError) -> ModelError {
    ModelError::Hub { source_name: source.clone(), cause: Box::new(cause) }
}

/// The hub's answer about a revision.
#[derive(Deserialize)]
struct Listing {
    /// The hash of the commit that the revision names.
    sha: String,
    siblings: Vec<Listed>,
}

/// A file of a commit.
#[derive(Deserialize)]
struct Listed {
    rfilename: String,
    size: Option<u64>,
    /// Git's SHA-1 of the file.
    #[serde(rename = "blobId")]
    blob: Option<String>,
    /// Present for files in the large-file storage, which holds all weights.
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
}

/// Resolves the revision to a commit, with the list of its files.
fn listing(source: &Source, repo: &ApiRepo, revision: Option<&str>) -> Result<Listing, ModelError> {
    let answer = repo.info_request().query("blobs", "true").call();
    let listing = answer.and_then(|mut answer| answer.body_mut().read_json::<Listing>());
    let listing = listing.map_err(|cause| hub(source, Box::new(cause).into()))?;
    let is_commit = |text: &str| text.len() == 40 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    if !is_commit(&listing.sha) || revision.is_some_and(|asked| is_commit(asked) && asked != listing.sha) {
        return Err(ModelError::WrongCommit { source_name: source.clone(), got: listing.sha });
    }
    Ok(listing)
}

/// A commit that is being fetched from.
struct Commit<'a> {
    repo: ApiRepo,
    files: &'a [Listed],
    source: &'a Source,
}

enum Contents {
    /// The only such file.
    Gguf(String),
    /// The safetensors files and the configuration of a model.
    Safetensors,
}

impl Commit<'_> {
    fn has(&self, wanted: &str) -> bool {
        self.files.iter().any(|file| file.rfilename == wanted)
    }

    fn contents(&self) -> Result<Contents, ModelError> {
        // Names that lead out of the folder (`../`) are skipped.
        let names = self.files.iter().map(|file| &file.rfilename).filter(|name| name.ends_with(".gguf") && is_path(name));
        let mut models: Vec<String> = names.cloned().collect();
        match models.len() {
            0 if NEEDED.into_iter().all(|name| self.has(name)) && (self.has(WHOLE) || self.has(INDEX)) => {
                Ok(Contents::Safetensors)
            }
            0 => Err(ModelError::NoModel(self.source.to_string())),
            1 => Ok(Contents::Gguf(models.remove(0))),
            _ => Err(several(self.source.to_string(), models)),
        }
    }

    /// Downloads one file completely, checks its size and hash, and returns the path that the client library gave it.
    fn fetch(&self, name: &str) -> Result<PathBuf, ModelError> {
        let missing = || ModelError::NoSuchFile { source_name: self.source.clone(), name: name.to_owned() };
        let listed = self.files.iter().find(|file| file.rfilename == name).ok_or_else(missing)?;
        let progress = Progress::start(&format!("fetching {name} of {}", self.source), listed.size);
        let pointer = self.repo.download_with_progress(name, &progress).map_err(|cause| hub(self.source, cause))?;
        // The client library stores a link to the file, and checks neither its size nor its hash.
        let blob = pointer.canonicalize().map_err(ModelError::io(&pointer))?;
        self.verify(listed, &blob)?;
        File::open(&blob).and_then(|blob| blob.sync_all()).map_err(ModelError::io(&blob))?;
        Ok(blob)
    }

    /// Whether the file has the commit's size and hash.
    fn verify(&self, listed: &Listed, blob: &Path) -> Result<(), ModelError> {
        let failed = || ModelError::io(blob);
        let len = fs::metadata(blob).map_err(failed())?.len();
        if let Some(expected) = listed.size {
            check_size(Path::new(&listed.rfilename), expected, len)?;
        }
        match (&listed.lfs, &listed.blob) {
            (Some(lfs), _) => check_hash(&listed.rfilename, &lfs.sha256, sha256_of(blob).map_err(failed())?),
            (None, Some(name)) => {
                let got = File::open(blob).and_then(|file| git_blob_sha1(len, file)).map_err(failed())?;
                check_hash(&listed.rfilename, name, got)
            }
            (None, None) => Err(ModelError::NoHash { source_name: self.source.clone(), name: listed.rfilename.clone() }),
        }
    }

    /// A model's files side by side in a directory.
    fn directory(&self, partial: &Path) -> Result<PathBuf, ModelError> {
        let directory = partial.join("model");
        fs::create_dir_all(&directory).map_err(ModelError::io(&directory))?;
        let fetch = |name: &str| {
            let place = directory.join(name);
            fs::rename(self.fetch(name)?, &place).map_err(ModelError::io(&place)).map(|()| place)
        };
        for name in NEEDED.into_iter().chain(WELCOME.into_iter().filter(|name| self.has(name))) {
            fetch(name)?;
        }
        if self.has(INDEX) {
            let index = fetch(INDEX)?;
            let bytes = fs::read(&index).map_err(ModelError::io(&index))?;
            let shards = shards_of_index(&bytes)
                .map_err(|cause| ModelError::Index { source_name: self.source.clone(), cause: Box::new(cause) })?;
            for name in &shards {
                fetch(name)?;
            }
        } else {
            fetch(WHOLE)?;
        }
        File::open(&directory).and_then(|directory| directory.sync_all()).map_err(ModelError::io(&directory))?;
        Ok(directory)
    }
}

/// The client for the hub; refuses to send a token over an unencrypted connection.
fn api(settings: &StoreArgs, partial: &Path, source: &Source) -> Result<Api, ModelError> {
    let endpoint = settings.hf_endpoint.trim_end_matches('/');
    let token = settings.token().map(|token| token.expose().to_owned()).filter(|token| !token.is_empty());
    if token.is_some() && !endpoint.starts_with("https://") {
        return Err(ModelError::TokenInClear(endpoint.to_owned()));
    }
    ApiBuilder::from_cache(Cache::new(partial.join("hub")))
        .with_endpoint(endpoint.to_owned())
        .with_token(token)
        .with_retries(RETRIES)
        .build()
        .map_err(|cause| hub(source, cause))
}
