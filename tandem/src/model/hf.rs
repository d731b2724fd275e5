//! GGUF files in repositories on the Hugging Face hub, or on a mirror of it.

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

/// A broken connection is tried again this often, from where it broke.
const RETRIES: usize = 3;

/// Downloads the file into `partial`, whole.
pub(super) fn download(
    settings: &StoreSettings,
    source: &Source,
    repository: &str,
    file: Option<&str>,
    partial: &Path,
) -> Result<Download, ModelError> {
    let hub = |cause: ApiError| ModelError::Hub { source_name: source.clone(), cause: Box::new(cause) };
    let api = api(settings, partial).map_err(hub)?;
    let repo = api.model(repository.to_owned());
    let file = match file {
        Some(file) => file.to_owned(),
        None => only_gguf(&repo, source)?,
    };
    let expected = api.metadata(&repo.url(&file)).map_err(hub)?.size() as u64;
    let progress = Progress::start(&format!("fetching hf:{repository}/{file}"), Some(expected));
    let pointer = repo.download_with_progress(&file, &progress).map_err(hub)?;
    // The client keeps a link to a file named by its hash, and does not compare sizes.
    let blob = pointer.canonicalize().map_err(ModelError::io(&pointer))?;
    let got = fs::metadata(&blob).map_err(ModelError::io(&blob))?.len();
    check_size(Path::new(&file), expected, got)?;
    File::open(&blob).and_then(|blob| blob.sync_all()).map_err(ModelError::io(&blob))?;
    Ok(Download { file: blob, place: PathBuf::from(file) })
}

fn api(settings: &StoreSettings, partial: &Path) -> Result<Api, ApiError> {
    ApiBuilder::from_cache(Cache::new(partial.join("hub")))
        .with_endpoint(settings.hf_endpoint.trim_end_matches('/').to_owned())
        .with_token(settings.hf_token.as_ref().map(|token| token.expose().to_owned()).filter(|token| !token.is_empty()))
        .with_retries(RETRIES)
        .build()
}

fn only_gguf(repo: &ApiRepo, source: &Source) -> Result<String, ModelError> {
    let info = repo.info().map_err(|cause| ModelError::Hub { source_name: source.clone(), cause: Box::new(cause) })?;
    let names = info.siblings.into_iter().map(|sibling| sibling.rfilename);
    let mut models: Vec<String> = names.filter(|name| name.ends_with(".gguf")).collect();
    match models.len() {
        0 => Err(ModelError::NoGguf(source.to_string())),
        1 => Ok(models.remove(0)),
        _ => Err(several(source.to_string(), models)),
    }
}
