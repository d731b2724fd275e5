//! Downloads GGUF files, and whole models in safetensors, from repositories on the Hugging Face hub or on another server with its API.
//!
//! One request to the hub resolves a revision to a commit and lists the commit's files with their hashes. All files are then downloaded from that
//! commit and compared with those hashes, so the servers that deliver the bytes need not be trusted.

use super::{
    Contents, Download, ModelError, Source, StoreArgs,
    digests::sha256_of,
    progress::{self, HubProgress},
    source::is_path,
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

/// The number of times that an interrupted download is resumed at the byte where it stopped.
const RETRIES: usize = 3;

/// The revision that is downloaded if the source names none.
const MAIN: &str = "main";

/// The files that a safetensors model must have in addition to its weights, and the files that it may have.
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
const OPTIONAL: [&str; 3] = ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
const INDEX: &str = "model.safetensors.index.json";
const WHOLE: &str = "model.safetensors";

/// Downloads one file of the repository `ORG/NAME` into `partial`, or the repository's model if no file is named. The result's `place` is
/// in a folder that is named after the commit. For [`Contents::Tokenizer`], weights are not downloaded.
pub(super) fn download(
    settings: &StoreArgs,
    source: &Source,
    (repository, revision): (&str, Option<&str>),
    file: Option<&str>,
    contents: Contents,
    partial: &Path,
) -> Result<Download, ModelError> {
    let api = api(settings, partial, source)?;
    let at = |revision: &str| api.repo(Repo::with_revision(repository.to_owned(), RepoType::Model, revision.to_owned()));
    let listing = listing(source, &at(revision.unwrap_or(MAIN)), revision)?;
    let commit = Commit { repo: at(&listing.sha), files: &listing.siblings, source };
    let gguf = match file {
        Some(file) => Some(file.to_owned()),
        None if contents == Contents::Tokenizer && REQUIRED.into_iter().all(|name| commit.has(name)) => None,
        None => commit.only_gguf()?,
    };
    let name = gguf.as_deref().or(repository.rsplit('/').next()).unwrap_or(repository);
    let file = if gguf.is_some() { commit.fetch(name)? } else { commit.directory(contents, partial)? };
    Ok(Download { file, place: Path::new(&listing.sha).join(name) })
}

fn failed(source: &Source, error: ApiError) -> ModelError {
    ModelError::Hub { model: source.clone(), source: Box::new(error) }
}

/// The hub's answer about a revision.
#[derive(Deserialize)]
struct Listing {
    /// The hash of the commit that the revision names.
    sha: String,
    siblings: Vec<Listed>,
}

/// A file of a commit, as the hub lists it.
#[derive(Deserialize)]
struct Listed {
    rfilename: String,
    size: Option<u64>,
    /// Git's SHA-1 of the file; `None` if the hub does not list it.
    #[serde(rename = "blobId")]
    blob: Option<String>,
    /// The entry of a file in the large-file storage, which holds all weights; `None` for other files.
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
}

/// Resolves the revision to a commit, and returns the commit's hash with the list of its files.
fn listing(source: &Source, repo: &ApiRepo, revision: Option<&str>) -> Result<Listing, ModelError> {
    let answer = repo.info_request().query("blobs", "true").call();
    let listing = answer.and_then(|mut answer| answer.body_mut().read_json::<Listing>());
    let listing = listing.map_err(|error| failed(source, Box::new(error).into()))?;
    let is_commit = |text: &str| text.len() == 40 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    if !is_commit(&listing.sha) || revision.is_some_and(|requested| is_commit(requested) && requested != listing.sha) {
        return Err(ModelError::WrongCommit { model: source.clone(), got: listing.sha });
    }
    Ok(listing)
}

struct Commit<'a> {
    repo: ApiRepo,
    files: &'a [Listed],
    source: &'a Source,
}

impl Commit<'_> {
    fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file.rfilename == name)
    }

    /// Returns the repository's only `.gguf` file; `None` if it has no such file but safetensors and their configuration.
    fn only_gguf(&self) -> Result<Option<String>, ModelError> {
        // Names that lead out of the folder (`../`) are skipped.
        let names = self.files.iter().map(|file| &file.rfilename).filter(|name| name.ends_with(".gguf") && is_path(name));
        let mut models: Vec<String> = names.cloned().collect();
        match models.len() {
            0 if REQUIRED.into_iter().all(|name| self.has(name)) && (self.has(WHOLE) || self.has(INDEX)) => Ok(None),
            0 => Err(ModelError::NoModel(self.source.to_string())),
            1 => Ok(models.pop()),
            _ => Err(ModelError::several(self.source.to_string(), models)),
        }
    }

    /// Downloads one file completely, checks its size and hash, and returns the path that the client library gave it.
    fn fetch(&self, name: &str) -> Result<PathBuf, ModelError> {
        let missing = || ModelError::NoSuchFile { model: self.source.clone(), name: name.to_owned() };
        let listed = self.files.iter().find(|file| file.rfilename == name).ok_or_else(missing)?;
        let progress = progress::start(&format!("fetching {name} of {}", self.source), listed.size);
        let pointer = self.repo.download_with_progress(name, HubProgress(&progress));
        let pointer = pointer.map_err(|error| failed(self.source, error))?;
        // `pointer` is a symbolic link to the downloaded file. The client library checks neither the file's size nor its hash.
        let blob = pointer.canonicalize().map_err(ModelError::io(&pointer))?;
        self.verify(listed, &blob)?;
        File::open(&blob).and_then(|blob| blob.sync_all()).map_err(ModelError::io(&blob))?;
        Ok(blob)
    }

    fn verify(&self, listed: &Listed, blob: &Path) -> Result<(), ModelError> {
        let failed = || ModelError::io(blob);
        let len = fs::metadata(blob).map_err(failed())?.len();
        let name = &listed.rfilename;
        if let Some(expected) = listed.size {
            Download::check_size(name, expected, len)?;
        }
        match (&listed.lfs, &listed.blob) {
            (Some(lfs), _) => Download::check_hash(name, &lfs.sha256, sha256_of(blob).map_err(failed())?),
            (None, Some(sha1)) => {
                let got = File::open(blob).and_then(|file| git_blob_sha1(len, file)).map_err(failed())?;
                Download::check_hash(name, sha1, got)
            }
            (None, None) => Err(ModelError::NoHash { model: self.source.clone(), name: name.clone() }),
        }
    }

    fn directory(&self, contents: Contents, partial: &Path) -> Result<PathBuf, ModelError> {
        let directory = partial.join("model");
        fs::create_dir_all(&directory).map_err(ModelError::io(&directory))?;
        let fetch = |name: &str| {
            let place = directory.join(name);
            fs::rename(self.fetch(name)?, &place).map_err(ModelError::io(&place)).map(|()| place)
        };
        for name in REQUIRED.into_iter().chain(OPTIONAL.into_iter().filter(|name| self.has(name))) {
            fetch(name)?;
        }
        if contents == Contents::Tokenizer {
            // A tokenizer needs no weights.
        } else if self.has(INDEX) {
            let index = fetch(INDEX)?;
            let bytes = fs::read(&index).map_err(ModelError::io(&index))?;
            let unreadable = |error| ModelError::Index { model: self.source.clone(), source: Box::new(error) };
            for name in &shards_of_index(&bytes).map_err(unreadable)? {
                fetch(name)?;
            }
        } else {
            fetch(WHOLE)?;
        }
        File::open(&directory).and_then(|directory| directory.sync_all()).map_err(ModelError::io(&directory))?;
        Ok(directory)
    }
}

/// Returns the client for the hub. Refuses to send a token over an unencrypted connection.
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
        .map_err(|error| failed(source, error))
}
