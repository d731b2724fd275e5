//! Reads secrets from files. Flags are not safe for secrets, because they are visible in the list of processes. Environment variables are
//! visible in `docker inspect` and to child processes.

use std::{fs, io, path::Path};
use tandem_node::Secret;

/// The maximum length of a secret in bytes. The tokens of all services are shorter. The limit prevents a wrong path, such as that of a
/// model, from filling the memory.
const LEN_MAX: u64 = 64 << 10;

/// Returns the content of a file that holds one secret. Fails if the file is too long.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    match fs::metadata(path)?.len() {
        ..=LEN_MAX => fs::read(path),
        len => Err(io::Error::other(format!("the file has {len} bytes, but must hold the secret and nothing else"))),
    }
}

/// Returns the secret in the file at `path`, without its line ending.
pub(crate) fn secret_file(path: &str) -> Result<Secret, String> {
    let text = read(path.as_ref()).and_then(|content| String::from_utf8(content).map_err(io::Error::other));
    match text.map_err(|error| format!("the file cannot be read: {error}"))?.trim_end_matches(['\r', '\n']) {
        "" => Err("the file is empty; write the secret into it".to_owned()),
        secret => Ok(secret.to_owned().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_is_read_from_its_file_without_the_final_newline() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("secret");
        let read = |content: &[u8]| {
            fs::write(&path, content).expect("the folder is writable");
            secret_file(path.to_str().expect("the path is UTF-8")).map(|secret| secret.expose().to_owned())
        };
        assert_eq!(read(b"hidden\n"), Ok("hidden".to_owned()));
        assert_eq!(read(b" two words \r\n"), Ok(" two words ".to_owned()));
        for (content, reason) in [(&b"\n"[..], "empty"), (&b"\xff"[..], "cannot be read"), (&[b'x'; 70_000][..], "70000 bytes")] {
            assert!(read(content).is_err_and(|error| error.contains(reason)), "{reason}");
        }
        assert!(secret_file("/nonexistent").is_err());
    }
}
