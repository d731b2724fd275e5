//! Passwords and tokens, which must not be printed with the settings that contain them. A secret in a file may be replaced while the process runs.

use axum::http::{HeaderValue, header::InvalidHeaderValue};
use parking_lot::Mutex;
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The maximum length of a secret in bytes. The tokens of all services are shorter. The limit prevents a wrong path, such as that of a
/// model, from filling the memory.
const LEN_MAX: u64 = 64 << 10;

/// A secret, or the file that holds it. The `Debug` output hides the secret, and the value cannot be serialised. Clones are cheap.
#[derive(Clone)]
pub struct Secret {
    file: Option<Arc<Path>>,
    last: Arc<Mutex<Last>>,
}

struct Last {
    secret: String,
    /// The reason why the file could not be read again.
    problem: Option<String>,
}

impl Secret {
    /// Returns the secret in the file at `path`, without its line ending.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is empty or too long, or is not UTF-8.
    pub fn in_file(path: PathBuf) -> io::Result<Self> {
        Ok(Self { file: Some(path.as_path().into()), ..read(&path)?.into() })
    }

    /// Returns the secret in the file that an argument of the command line names.
    ///
    /// # Errors
    /// As for [`Self::in_file`], as a message for the command line.
    pub fn of_argument(path: &str) -> Result<Self, String> {
        Self::in_file(path.into()).map_err(|error| format!("the file cannot be used: {error}"))
    }

    /// Returns the path of the file that holds the secret; `None` if the secret is in no file.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Returns the secret itself, which must not be logged. If the secret is in a file, the file is read again, so call this for each new
    /// connection. If the file cannot be read or is empty, a warning is logged and the last secret is returned.
    pub fn expose(&self) -> String {
        let mut last = self.last.lock();
        // Does not read a pipe again: a pipe, such as that of a shell's `<(command)`, can be read only once.
        if let Some(path) = self.file().filter(|path| !path.exists() || path.is_file()) {
            match read(path) {
                Ok(secret) => *last = Last { secret, problem: None },
                Err(error) => {
                    let problem = Some(error.to_string());
                    if last.problem != problem {
                        tracing::warn!(file = %path.display(), "the secret cannot be read again, so the last one stays in use: {error}");
                        last.problem = problem;
                    }
                }
            }
        }
        last.secret.clone()
    }

    /// Returns the value with which the header `Authorization` sends the secret. The secret is read as in [`Self::expose`].
    ///
    /// # Errors
    /// The secret has characters that are not allowed in a header.
    pub fn bearer(&self) -> Result<HeaderValue, InvalidHeaderValue> {
        let mut bearer = HeaderValue::try_from(format!("Bearer {}", self.expose()))?;
        bearer.set_sensitive(true);
        Ok(bearer)
    }
}

/// Returns the content of a file that holds one secret.
///
/// # Errors
/// Fails if the file cannot be read, or is too long.
pub fn read_secret_file(path: &Path) -> io::Result<Vec<u8>> {
    match fs::metadata(path)?.len() {
        ..=LEN_MAX => fs::read(path),
        len => Err(io::Error::other(format!("the file has {len} bytes, but must hold the secret and nothing else"))),
    }
}

fn read(path: &Path) -> io::Result<String> {
    let text = String::from_utf8(read_secret_file(path)?).map_err(io::Error::other)?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(io::Error::other("the file is empty; write the secret into it")),
        secret => Ok(secret.to_owned()),
    }
}

impl From<String> for Secret {
    fn from(secret: String) -> Self {
        Self { file: None, last: Arc::new(Mutex::new(Last { secret, problem: None })) }
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        // The two mutexes are not locked at the same time, because they may be the same mutex, which a thread cannot lock twice.
        let secret = self.last.lock().secret.clone();
        secret == other.last.lock().secret
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
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
            Secret::in_file(path.clone()).map(|secret| secret.expose()).map_err(|error| error.to_string())
        };
        assert_eq!(read(b"hidden\n"), Ok("hidden".to_owned()));
        assert_eq!(read(b" two words \r\n"), Ok(" two words ".to_owned()));
        for (content, reason) in [(&b"\n"[..], "empty"), (&b"\xff"[..], "utf-8"), (&[b'x'; 70_000][..], "70000 bytes")] {
            assert!(read(content).is_err_and(|error| error.contains(reason)), "{reason}");
        }
        assert!(Secret::in_file("/nonexistent".into()).is_err());
    }

    #[test]
    fn replaced_secret_file_gives_the_new_secret_and_an_unreadable_file_keeps_the_last_secret() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("secret");
        let write = |content: &[u8]| fs::write(&path, content).expect("the folder is writable");
        write(b"first");
        let secret = Secret::in_file(path.clone()).expect("the file holds a secret");
        let copy = secret.clone();
        write(b"second\n");
        assert_eq!((secret.expose(), copy.expose()), ("second".to_owned(), "second".to_owned()));
        for unusable in [&b""[..], b"\n", b"\xff"] {
            write(unusable);
            assert_eq!(secret.expose(), "second", "{unusable:?}");
        }
        fs::remove_file(&path).expect("the folder is writable");
        assert_eq!(secret.expose(), "second");
        write(b"third");
        assert_eq!(secret.expose(), "third");
        assert!(!format!("{secret:?}").contains("third"));
    }
}
