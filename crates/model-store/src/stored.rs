//! The stored models: where each came from, and how one is removed.

use super::{
    ModelStoreError, StoreFolder, StoredModel,
    store::{list, lock, only_named},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns the store's folder, and the stored model with this name or path.
///
/// # Errors
/// No stored model or several different ones have the name, or the folder cannot be read.
pub fn named_in(folder: &StoreFolder, name: &Path) -> Result<(PathBuf, StoredModel), ModelStoreError> {
    let dir = folder.path()?;
    let mut models = list(&dir)?;
    let named = name.canonicalize().ok();
    models.retain(|model| Path::new(&model.id) == name || named.is_some() && model.path.canonicalize().ok() == named);
    match only_named(&dir, models)? {
        Some(model) => Ok((dir, model)),
        None => Err(ModelStoreError::NotStored { name: name.to_owned(), store: dir }),
    }
}

/// Returns the source of a model from its path in the store at `dir`; `None` if it was not downloaded into the store.
pub fn source_in(dir: &Path, model: &StoredModel) -> Option<String> {
    let path = model.path.strip_prefix(dir).unwrap_or(&model.path);
    let parts: Vec<String> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    match &parts[..] {
        [kind, requirement, ..] if kind == "pypi" => Some(format!("pypi:{}", requirement.replace('#', "#sha256="))),
        [kind, organisation, name, commit, ..] if kind == "hf" => {
            let name = name.split('@').next().unwrap_or_default();
            Some(format!("hf:{organisation}/{name}@{commit}"))
        }
        _ => None,
    }
}

/// Removes a model from the store at `dir`, and the folders that are empty then. The folder of a downloaded model keeps its lock file.
///
/// # Errors
/// The model is a link to a place outside the store, or its files cannot be removed.
pub fn remove(dir: &Path, model: &StoredModel) -> Result<(), ModelStoreError> {
    let io = |path: &Path| ModelStoreError::io(path.to_owned());
    let store = dir.canonicalize().map_err(io(dir))?;
    let path = model.path.canonicalize().map_err(io(&model.path))?;
    if !path.starts_with(&store) || path == store {
        return Err(ModelStoreError::Outside { path: model.path.clone(), store: dir.to_owned() });
    }
    // A download into the model's folder holds this lock.
    let within = || path.ancestors().skip(1).take_while(|folder| **folder != store);
    let _lock = within().find(|folder| folder.join(".lock").exists()).map(lock).transpose()?;
    if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }.map_err(io(&path))?;
    // A folder that is not empty stays.
    within().all(|folder| fs::remove_dir(folder).is_ok());
    Ok(())
}
