//! Caches the SHA-256 of model files on disk, so that a process does not read gigabytes at each start to compute a model's revision.
//!
//! A cached hash is valid while the file's size, inode, mtime and ctime stay the same. No program can set the ctime back, so a file that
//! was changed in place is read again.

use super::ModelStoreError;
#[cfg(feature = "downloads")]
use super::progress;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use tandem_model::revision::sha256;

/// Reading a file of at least this size, in bytes, takes about a second or more, so its progress is shown.
#[cfg(feature = "downloads")]
const SHOW_PROGRESS_FROM: u64 = 1 << 30;

/// The cached hashes. There is one small file for each model file whose hash was computed for this store.
pub(super) struct Digests {
    dir: PathBuf,
}

/// The path and the attributes of a file when its hash was computed.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct Stamp {
    path: String,
    bytes: u64,
    inode: u64,
    /// Time of the last modification, in seconds and nanoseconds since 1970.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Digests {
    pub(super) fn new(store: &Path) -> Self {
        Self { dir: store.join(".sha256") }
    }

    /// Returns the file's SHA-256 in 64 hex digits, and computes it if it is not cached.
    pub(super) fn of(&self, file: &Path) -> Result<String, ModelStoreError> {
        let failed = || ModelStoreError::io(file);
        let path = file.canonicalize().map_err(failed())?;
        let before = Stamp::of(&path).map_err(failed())?;
        let entry = self.dir.join(sha256(path.as_os_str().as_encoded_bytes()).map_err(failed())?);
        let cached = fs::read(&entry).ok().and_then(|json| serde_json::from_slice::<(Stamp, String)>(&json).ok());
        if let Some((_, sha256)) = cached.filter(|(stamp, _)| *stamp == before) {
            return Ok(sha256);
        }
        let sha256 = sha256_of(&path).map_err(failed())?;
        if Stamp::of(&path).map_err(failed())? == before {
            // A read-only store must not keep this process from serving.
            if let Err(error) = self.remember(&entry, &(before, &sha256)) {
                tracing::debug!(%error, dir = %self.dir.display(), "the model's hash cannot be cached; the next start computes it again");
            }
        }
        Ok(sha256)
    }

    fn remember(&self, entry: &Path, known: &(Stamp, &String)) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
        file.write_all(&serde_json::to_vec(known)?)?;
        // The file is replaced atomically. Two processes that hash the same model file write the same content.
        file.persist(entry)?;
        Ok(())
    }
}

impl Stamp {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(Self {
            path: path.to_string_lossy().into_owned(),
            bytes: metadata.len(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

pub(super) fn sha256_of(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    #[cfg(feature = "downloads")]
    if let Some(bytes) = Some(file.metadata()?.len()).filter(|bytes| *bytes >= SHOW_PROGRESS_FROM) {
        let progress =
            progress::start(format!("reads {} for its SHA-256", path.file_name().unwrap_or_default().display()), Some(bytes));
        return sha256(progress.read(file));
    }
    sha256(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn hash_is_cached_until_the_file_changes() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let file = folder.path().join("a.gguf");
        fs::write(&file, "one").expect("the folder is writable");
        let digests = Digests::new(&folder.path().join("store"));
        let original = digests.of(&file).expect("the file is readable");
        assert_eq!(original, sha256(&b"one"[..]).expect("reading from memory does not fail"));

        let entry = fs::read_dir(&digests.dir)
            .expect("the folder of digests exists")
            .next()
            .expect("the folder has one entry")
            .expect("the folder entry is readable")
            .path();
        let changed = fs::read_to_string(&entry).expect("the file is UTF-8").replace(&original, "remembered");
        fs::write(&entry, changed).expect("the folder is writable");
        assert_eq!(digests.of(&file).expect("the file is readable"), "remembered");

        // The size and the mtime stay the same. Only the ctime changes.
        let modified =
            fs::metadata(&file).expect("the file exists").modified().expect("the file system records modification times");
        std::thread::sleep(Duration::from_millis(20)); // the file system's clock ticks every 10 ms at most
        fs::write(&file, "two").expect("the folder is writable");
        File::options().write(true).open(&file).and_then(|file| file.set_modified(modified)).expect("the file's time can be set");
        assert_eq!(
            digests.of(&file).expect("the file is readable"),
            sha256(&b"two"[..]).expect("reading from memory does not fail")
        );

        fs::write(&entry, "{").expect("the folder is writable");
        assert_eq!(
            digests.of(&file).expect("the file is readable"),
            sha256(&b"two"[..]).expect("reading from memory does not fail")
        );
        assert!(modified < SystemTime::now());
    }

    #[test]
    fn hash_is_returned_even_if_it_cannot_be_stored() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let file = folder.path().join("a.gguf");
        fs::write(&file, "one").expect("the folder is writable");
        // A file has the path of the store's directory, so no hash can be stored.
        let digests = Digests { dir: file.clone() };
        assert_eq!(
            digests.of(&file).expect("the file is readable"),
            sha256(&b"one"[..]).expect("reading from memory does not fail")
        );
    }
}
