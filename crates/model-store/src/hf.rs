//! Downloads GGUF files, and whole models in safetensors, from repositories on the Hugging Face hub or on another server with its API.
//!
//! One request to the hub resolves a revision to a commit and lists the commit's files with their sizes and hashes. All files are then downloaded
//! from that commit, into names that this module chooses, and compared with those sizes and hashes before they are used. So the servers that
//! deliver the bytes need not be trusted: of their answers, only the status and the bytes are read.

use super::{
    Download, ModelContents, ModelSource, ModelStoreError, StoreArgs,
    digests::sha256_of,
    progress::{self, TaskProgress},
    source::is_path,
};
use serde::Deserialize;
use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
    time::Duration,
};
use tandem_model::{revision::git_blob_sha1, shards_of_index};
use ureq::{Agent, Body, config::RedirectAuthHeaders, http::Response};

/// The number of times that an interrupted download is resumed at the byte where it stopped.
const RETRIES: usize = 3;
/// The pause before a download whose connection failed is resumed.
const PAUSE: Duration = Duration::from_secs(1);
/// Time limit for a connection. A server on another continent answers within a second.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest time without a byte from a server.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// The longest list of a commit's files, in bytes. The list of a repository with 10,000 files has 3 MB.
const LISTING_MAX: u64 = 16 << 20;

/// The revision that is downloaded if the source names none.
const MAIN: &str = "main";

/// The files that a safetensors model must have in addition to its weights, and the files that it may have.
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
const OPTIONAL: [&str; 3] = ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
const INDEX: &str = "model.safetensors.index.json";
const WHOLE: &str = "model.safetensors";

/// Downloads one file of the repository `ORG/NAME` into `partial`, or the repository's model if no file is named. The result's `place` is
/// in a folder that is named after the commit. For [`ModelContents::Tokenizer`], weights are not downloaded.
pub(super) fn download(
    settings: &StoreArgs,
    source: &ModelSource,
    (repository, revision): (&str, Option<&str>),
    file: Option<&str>,
    contents: ModelContents,
    partial: &Path,
) -> Result<Download, ModelStoreError> {
    let hub = Hub::new(settings, source)?;
    let listing = hub.listing(repository, revision)?;
    let commit = Commit { hub: &hub, folder: format!("{repository}/resolve/{}", listing.sha), files: &listing.siblings };
    let gguf = match file {
        Some(file) => Some(file.to_owned()),
        None if contents == ModelContents::Tokenizer && REQUIRED.into_iter().all(|name| commit.has(name)) => None,
        None => commit.only_gguf()?,
    };
    let name = gguf.as_deref().or(repository.rsplit('/').next()).unwrap_or(repository);
    let file = partial.join("model");
    if gguf.is_some() {
        commit.fetch(name, &file)?;
    } else {
        commit.directory(contents, &file)?;
    }
    Ok(Download { file, place: Path::new(&listing.sha).join(name) })
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

/// A client of the hub, for one source.
struct Hub<'a> {
    agent: Agent,
    endpoint: &'a str,
    token: Option<String>,
    source: &'a ModelSource,
}

impl<'a> Hub<'a> {
    /// Refuses to send a token over an unencrypted connection. The token is sent to the endpoint's host only, also when it redirects.
    fn new(settings: &'a StoreArgs, source: &'a ModelSource) -> Result<Self, ModelStoreError> {
        let endpoint = settings.hf_endpoint.trim_end_matches('/');
        let token = settings.token().map(|token| token.expose()).filter(|token| !token.is_empty());
        if token.is_some() && !endpoint.starts_with("https://") {
            return Err(ModelStoreError::TokenInClear(endpoint.to_owned()));
        }
        // A compressed answer could not be resumed.
        let config = Agent::config_builder().accept_encoding("identity").redirect_auth_headers(RedirectAuthHeaders::SameHost);
        let config = config.timeout_connect(Some(CONNECT_TIMEOUT)).timeout_per_read(Some(SILENCE_MAX));
        Ok(Self { agent: config.build().into(), endpoint, token, source })
    }

    fn failed(&self, error: ureq::Error) -> ModelStoreError {
        ModelStoreError::Hub { model: self.source.clone(), source: Box::new(error) }
    }

    /// Requests a path of the hub, from this byte on. Fails unless the status is one of success.
    fn get(&self, path: &str, from: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(format!("{}/{path}", self.endpoint));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("range", format!("bytes={from}-"));
        }
        request.call()
    }

    /// Resolves the revision to a commit, and returns the commit's hash with the list of its files.
    fn listing(&self, repository: &str, revision: Option<&str>) -> Result<Listing, ModelStoreError> {
        let path = format!("api/models/{repository}/revision/{}?blobs=true", revision.unwrap_or(MAIN));
        let answer = self.get(&path, 0).and_then(|answer| answer.into_body().into_with_config().limit(LISTING_MAX).read_to_vec());
        let answer = answer.map_err(|error| self.failed(error))?;
        let unreadable = |error: serde_json::Error| self.failed(ureq::Error::Io(error.into()));
        let listing: Listing = serde_json::from_slice(&answer).map_err(unreadable)?;
        // The commit names a folder of the store.
        let is_commit = |text: &str| text.len() == 40 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        if !is_commit(&listing.sha) || revision.is_some_and(|requested| is_commit(requested) && requested != listing.sha) {
            return Err(ModelStoreError::WrongCommit { model: self.source.clone(), got: listing.sha.chars().take(40).collect() });
        }
        Ok(listing)
    }
}

struct Commit<'a> {
    hub: &'a Hub<'a>,
    /// The path of the commit's files on the hub.
    folder: String,
    files: &'a [Listed],
}

impl Commit<'_> {
    fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file.rfilename == name)
    }

    /// Returns the repository's only `.gguf` file; `None` if it has no such file but safetensors and their configuration.
    fn only_gguf(&self) -> Result<Option<String>, ModelStoreError> {
        // Names that lead out of the folder (`../`) are skipped.
        let names = self.files.iter().map(|file| &file.rfilename).filter(|name| name.ends_with(".gguf") && is_path(name));
        let mut models: Vec<String> = names.cloned().collect();
        match models.len() {
            0 if REQUIRED.into_iter().all(|name| self.has(name)) && (self.has(WHOLE) || self.has(INDEX)) => Ok(None),
            0 => Err(ModelStoreError::NoModel(self.hub.source.to_string())),
            1 => Ok(models.pop()),
            _ => Err(ModelStoreError::several(self.hub.source.to_string(), models)),
        }
    }

    /// Downloads one file into `to`, a file that does not exist yet, and checks its size and hash.
    fn fetch(&self, name: &str, to: &Path) -> Result<(), ModelStoreError> {
        let missing = || ModelStoreError::NoSuchFile { model: self.hub.source.clone(), name: name.to_owned() };
        let listed = self.files.iter().find(|file| file.rfilename == name && is_path(name)).ok_or_else(missing)?;
        let unchecked = || ModelStoreError::NoHash { model: self.hub.source.clone(), name: name.to_owned() };
        let size = listed.size.filter(|_| listed.lfs.is_some() || listed.blob.is_some()).ok_or_else(unchecked)?;
        let progress = progress::start(format!("downloads {name} ({} MB)", size.div_ceil(1_000_000)), Some(size));
        let mut file = File::create_new(to).map_err(ModelStoreError::io(to))?;
        for retries_left in (0..=RETRIES).rev() {
            match self.append(name, size, (&mut file, to), &progress)? {
                None if progress.position() >= size => break,
                Some(error) if retries_left == 0 => return Err(self.hub.failed(error)),
                Some(_) => std::thread::sleep(PAUSE),
                // The connection was closed early, but without an error.
                None => {}
            }
        }
        self.verify(listed, to)?;
        file.sync_all().map_err(ModelStoreError::io(to))
    }

    /// Downloads the rest of the file at `path`, but no more than `size` bytes in total. Returns the error that interrupted the download; `None`
    /// if the server has ended its answer. The position of `progress` is the file's length.
    fn append(
        &self,
        name: &str,
        size: u64,
        (file, path): (&mut File, &Path),
        progress: &TaskProgress,
    ) -> Result<Option<ureq::Error>, ModelStoreError> {
        let answer = match self.hub.get(&format!("{}/{name}", self.folder), progress.position()) {
            Ok(answer) => answer,
            Err(error @ ureq::Error::StatusCode(_)) => return Err(self.hub.failed(error)),
            Err(error) => return Ok(Some(error)),
        };
        if answer.status() != 206 {
            // The server has ignored the requested range, so the answer begins with the first byte.
            file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).map_err(ModelStoreError::io(path))?;
            progress.set_position(0);
        }
        let mut body = answer.into_body().into_reader();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let len = match body.read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(len) => len,
                Err(error) => return Ok(Some(error.into())),
            };
            if len as u64 > size - progress.position() {
                return Err(ModelStoreError::TooLong { name: name.to_owned(), expected: size });
            }
            file.write_all(&buffer[..len]).map_err(ModelStoreError::io(path))?;
            progress.add(len as u64);
        }
    }

    fn verify(&self, listed: &Listed, path: &Path) -> Result<(), ModelStoreError> {
        let failed = || ModelStoreError::io(path);
        let len = fs::metadata(path).map_err(failed())?.len();
        let name = &listed.rfilename;
        if let Some(expected) = listed.size {
            Download::check_size(name, expected, len)?;
        }
        match (&listed.lfs, &listed.blob) {
            (Some(lfs), _) => Download::check_hash(name, &lfs.sha256, sha256_of(path).map_err(failed())?),
            (None, Some(sha1)) => {
                let got = File::open(path).and_then(|file| git_blob_sha1(len, file)).map_err(failed())?;
                Download::check_hash(name, sha1, got)
            }
            (None, None) => Err(ModelStoreError::NoHash { model: self.hub.source.clone(), name: name.clone() }),
        }
    }

    /// Downloads a model in safetensors into `directory`, which does not exist yet.
    fn directory(&self, contents: ModelContents, directory: &Path) -> Result<(), ModelStoreError> {
        fs::create_dir(directory).map_err(ModelStoreError::io(directory))?;
        let fetch = |name: &str| self.fetch(name, &directory.join(name));
        for name in REQUIRED.into_iter().chain(OPTIONAL.into_iter().filter(|name| self.has(name))) {
            fetch(name)?;
        }
        if contents == ModelContents::Tokenizer {
            // Fetches no weights, because only the tokenizer is wanted.
        } else if self.has(INDEX) {
            fetch(INDEX)?;
            let index = directory.join(INDEX);
            let bytes = fs::read(&index).map_err(ModelStoreError::io(&index))?;
            let unreadable = |error| ModelStoreError::Index { model: self.hub.source.clone(), source: Box::new(error) };
            for name in &shards_of_index(&bytes).map_err(unreadable)? {
                fetch(name)?;
            }
        } else {
            fetch(WHOLE)?;
        }
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(ModelStoreError::io(directory))
    }
}
