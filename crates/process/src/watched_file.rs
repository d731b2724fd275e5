//! A text file that is polled while the process runs, so that a change takes effect without a restart.
//!
//! A poll may read a half-written file, so a change is reported only when two consecutive polls read the same text.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

/// The time between two polls. A change is reported within two polls, and a poll costs almost nothing.
pub const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A file that is polled.
#[derive(Debug)]
pub struct WatchedFile {
    path: PathBuf,
    bytes_max: u64,
    /// The text or the error at the last poll.
    polled: Result<String, String>,
    /// The text or the error that was returned last.
    reported: Result<String, String>,
}

impl WatchedFile {
    /// Reads the file for the first time, and returns its text. A file larger than `bytes_max` bytes is an error.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn open(path: PathBuf, bytes_max: u64) -> io::Result<(String, Self)> {
        let text = read(&path, bytes_max)?;
        let (polled, reported) = (Ok(text.clone()), Ok(text.clone()));
        Ok((text, Self { path, bytes_max, polled, reported }))
    }

    /// Resolves when the file's text has changed, and returns it. Cancel-safe.
    ///
    /// # Errors
    /// Fails if the file cannot be read. An error is returned again only after the file could be read, or after another error.
    pub async fn changed(&mut self) -> io::Result<String> {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let (path, bytes_max) = (self.path.clone(), self.bytes_max);
            let read = tokio::task::spawn_blocking(move || read(&path, bytes_max).map_err(|error| error.to_string()));
            let polled = read.await.expect("the reading task does not panic");
            let is_stable = polled == self.polled;
            self.polled.clone_from(&polled);
            if is_stable && polled != self.reported {
                self.reported.clone_from(&polled);
                return polled.map_err(io::Error::other);
            }
        }
    }
}

fn read(path: &Path, bytes_max: u64) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(bytes_max + 1).read_to_string(&mut text)?;
    if text.len() as u64 > bytes_max {
        return Err(io::Error::other(format!("the file is larger than {} MiB", bytes_max >> 20)));
    }
    Ok(text)
}
