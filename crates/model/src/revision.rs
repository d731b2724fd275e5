//! A model's revision: the SHA-256 of all bytes of its files.
//!
//! Workers share KV only if their revisions are equal, so models that differ in a single weight must have different revisions. The revision
//! of a GGUF file is the output of `sha256sum FILE`. The revision of a directory is the output of `sha256sum FILES | sha256sum` within it,
//! where FILES are the model's files in the order of their names.

use crate::{HfDirectory, ModelError};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use std::{
    io::{self, Read},
    path::Path,
};

/// The number of bytes read at a time: enough for full speed, and small compared to any model.
const CHUNK_BYTES: usize = 1 << 20;

/// Returns the revision of the model at `path` as 64 lowercase hex digits. `sha256` must return a file's SHA-256 in the same form.
///
/// # Errors
/// Fails if the files cannot be listed, or if `sha256` fails.
pub fn revision<E: From<ModelError>>(path: &Path, mut sha256: impl FnMut(&Path) -> Result<String, E>) -> Result<String, E> {
    if !path.is_dir() {
        return sha256(path);
    }
    let mut list = Context::new(&SHA256);
    for file in HfDirectory::files(path)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        list.update(format!("{}  {name}\n", sha256(&file)?).as_bytes());
    }
    Ok(hex(list))
}

/// Returns the SHA-256 of a stream as 64 lowercase hex digits.
///
/// # Errors
/// Fails if `from` cannot be read to its end.
pub fn sha256(from: impl Read) -> io::Result<String> {
    hash(Context::new(&SHA256), from)
}

/// Returns the hash that git gives to a file of `len` bytes: a SHA-1 as 40 lowercase hex digits. The Hugging Face hub publishes only this
/// hash for files that are not in its large-file storage.
///
/// # Errors
/// Fails if `from` cannot be read to its end.
pub fn git_blob_sha1(len: u64, from: impl Read) -> io::Result<String> {
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    context.update(format!("blob {len}\0").as_bytes());
    hash(context, from)
}

fn hash(mut context: Context, mut from: impl Read) -> io::Result<String> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match from.read(&mut chunk) {
            Ok(0) => return Ok(hex(context)),
            Ok(count) => context.update(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn hex(context: Context) -> String {
    context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, process::Command};

    fn sha256_of(path: &Path) -> Result<String, ModelError> {
        let open = |source| ModelError::Open { path: path.to_owned(), source };
        sha256(fs::File::open(path).map_err(open)?).map_err(open)
    }

    fn shell(folder: &Path, command: &str) -> String {
        let output = Command::new("sh").args(["-c", command]).current_dir(folder).output().expect("the system has a shell");
        String::from_utf8_lossy(&output.stdout).split(' ').next().unwrap_or_default().to_owned()
    }

    #[test]
    fn revision_covers_every_byte_of_a_file() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("a.gguf");
        let mut bytes: Vec<u8> = (0..CHUNK_BYTES * 2 + 77).map(|i| (i * i % 251) as u8).collect();
        fs::write(&path, &bytes).expect("the folder is writable");
        let original = revision(&path, sha256_of).expect("the file is readable");
        assert_eq!(original, shell(folder.path(), "sha256sum a.gguf"));
        for at in [0, 100_000, CHUNK_BYTES, bytes.len() - 1] {
            bytes[at] ^= 1;
            fs::write(&path, &bytes).expect("the folder is writable");
            assert_ne!(revision(&path, sha256_of).expect("the file is readable"), original, "byte {at}");
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn directory_revision_covers_weights_configuration_and_text() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let names = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
        for name in names {
            fs::write(folder.path().join(name), name).expect("the folder is writable");
        }
        fs::write(folder.path().join("README.md"), "not read").expect("the folder is writable");
        let original = revision(folder.path(), sha256_of).expect("the model directory is complete");
        assert_eq!(original, shell(folder.path(), &format!("sha256sum {} | sha256sum", names.join(" "))));
        for name in names {
            fs::write(folder.path().join(name), "other").expect("the folder is writable");
            assert_ne!(revision(folder.path(), sha256_of).expect("the model directory is complete"), original, "{name}");
            fs::write(folder.path().join(name), name).expect("the folder is writable");
        }
        fs::write(folder.path().join("README.md"), "other").expect("the folder is writable");
        assert_eq!(revision(folder.path(), sha256_of).expect("the model directory is complete"), original);
    }

    #[test]
    fn git_blob_hash_equals_that_of_git() {
        // The expected hash is the output of `printf hello | git hash-object --stdin`.
        assert_eq!(
            git_blob_sha1(5, &b"hello"[..]).expect("reading from memory does not fail"),
            "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"
        );
    }
}
