//! Reads secrets from files: flags are visible in the list of processes; variables in `docker inspect` and to child processes.

use std::fs;
use tandem_node::Secret;

/// The longest secret, in bytes: a token of any service is shorter, and a wrong path must not fill the memory.
const LEN_MAX: u64 = 64 << 10;

/// Reads the secret in the file at `path`, without its line ending.
pub(crate) fn secret_file(path: &str) -> Result<Secret, String> {
    let len = fs::metadata(path).map_err(|error| format!("it cannot be read: {error}"))?.len();
    if len > LEN_MAX {
        return Err(format!("it has {len} bytes; the file must hold the secret and nothing else"));
    }
    let text = fs::read_to_string(path).map_err(|error| format!("it cannot be read: {error}"))?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err("it is empty; write the secret into it".to_owned()),
        secret => Ok(secret.to_owned().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_with_one_secret_is_read_without_its_line_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        let read = |content: &[u8]| {
            fs::write(&path, content).expect("ours");
            secret_file(path.to_str().expect("text")).map(|secret| secret.expose().to_owned())
        };
        assert_eq!(read(b"hidden\n"), Ok("hidden".to_owned()));
        assert_eq!(read(b" two words \r\n"), Ok(" two words ".to_owned()));
        for (content, reason) in [(&b"\n"[..], "empty"), (&b"\xff"[..], "cannot be read"), (&[b'x'; 70_000][..], "70000 bytes")] {
            assert!(read(content).is_err_and(|error| error.contains(reason)), "{reason}");
        }
        assert!(secret_file("/nonexistent").is_err());
    }
}
