//! A file to which lines of JSON are appended, such as a ledger.
//!
//! No caller waits for the disk: a bounded queue passes the lines to a thread of the file. Lines that do not fit, or cannot be written, are
//! lost and counted; a line that was counted is never written later. Each line is written immediately, so a process that is killed has written
//! what it had appended before.

mod rotated;

use ::metrics::Counter;
use rotated::Rotated;
use serde::Serialize;
use std::{
    fs::{File, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    iter,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::Path,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
};

/// The maximum number of lines that may be queued for the disk. This many lines are a few megabytes, and a busy cluster writes them in some seconds.
pub const LINES_MAX: usize = 16_384;

/// The maximum number of lines that are written at once, to save system calls.
const BATCH_MAX: usize = 64;

/// The permissions of a new file: only its owner may read and write it.
const OWNER_ONLY: u32 = 0o600;

/// A file to which lines are appended. It is cheap to clone.
#[derive(Clone, Debug)]
pub struct LineFile(Arc<FileWriter>);

#[derive(Debug)]
struct FileWriter {
    /// The queue to the writing thread; `None` only while the file is being dropped.
    lines: Option<SyncSender<QueuedLine>>,
    thread: Option<JoinHandle<()>>,
}

struct QueuedLine {
    text: Vec<u8>,
    lost: Counter,
}

impl LineFile {
    /// Opens a file, and appends to it. `name` is the name of the file in logs, such as `ledger`. A new file can be read only by its owner,
    /// because it records the requests of each client. An existing file keeps its permissions; a warning is logged if other users may access
    /// it. If the last line is incomplete because the process that wrote it was killed, a line break is added first.
    ///
    /// # Errors
    /// Fails if the file cannot be opened, or if another process has opened it for appending.
    pub fn open(path: &Path, name: &'static str) -> io::Result<Self> {
        Self::write_to(opened(path, name)?, name)
    }

    /// Opens a file as [`LineFile::open`] does. When the file is full, it is renamed to `FILE.1`, `FILE.1` to `FILE.2` and so on, and
    /// `FILE.7` is deleted. The eight files together have at most `bytes_max` bytes, unless an earlier process has left longer files. Only a
    /// regular file is rotated.
    ///
    /// # Errors
    /// Fails for the same reasons as [`LineFile::open`].
    pub fn open_rotated(path: &Path, name: &'static str, bytes_max: u64) -> io::Result<Self> {
        if path.exists() && !path.metadata()?.is_file() {
            return Self::open(path, name);
        }
        Self::write_to(Rotated::open(path, name, bytes_max)?, name)
    }

    /// Starts a thread that appends the lines to `to`. `name` is used as in [`LineFile::open`].
    ///
    /// # Errors
    /// Fails if the system cannot start a thread.
    pub fn write_to(to: impl Write + Send + 'static, name: &'static str) -> io::Result<Self> {
        let (lines, queued) = sync_channel(LINES_MAX);
        let thread = std::thread::Builder::new().name(format!("tandem-{name}")).spawn(move || write(&queued, to, name))?;
        Ok(Self(Arc::new(FileWriter { lines: Some(lines), thread: Some(thread) })))
    }

    /// Appends the value as one line of JSON. `lost` counts the line if it is lost.
    pub fn append(&self, line: &impl Serialize, lost: &Counter) {
        let Some(lines) = &self.0.lines else { return };
        let mut text = serde_json::to_vec(line).expect("a line can be serialized");
        text.push(b'\n');
        if lines.try_send(QueuedLine { text, lost: lost.clone() }).is_err() {
            lost.increment(1);
        }
    }
}

/// Dropping the last handle waits until the queued lines are written to the file.
impl Drop for FileWriter {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread that writes a file of lines panicked; its last lines are lost");
        }
    }
}

/// Opens a file of lines, and locks it. See [`LineFile::open`].
fn opened(path: &Path, name: &'static str) -> io::Result<File> {
    let mut file = File::options().read(true).append(true).create(true).mode(OWNER_ONLY).open(path)?;
    let mode = file.metadata()?.permissions().mode() & 0o777;
    if mode & !OWNER_ONLY != 0 {
        tracing::warn!(
            file = %path.display(),
            mode = %format_args!("{mode:03o}"),
            "other users may read or write the {name}, which has the accounts, sizes and times of requests; run chmod 600 on it"
        );
    }
    // Some file systems have no locks. There a second process that writes the same file is not detected.
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        return Err(io::Error::other("another process writes this file; each process needs a file of its own"));
    }
    let mut last = [b'\n'];
    if file.seek(SeekFrom::End(-1)).is_ok() {
        file.read_exact(&mut last)?;
    }
    if last != [b'\n'] {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

/// Writes lines until all senders are dropped. If only a part of a line can be written, the rest follows as soon as writing succeeds.
fn write(queued: &Receiver<QueuedLine>, mut to: impl Write, name: &'static str) {
    let mut reported = false;
    let mut cut: Option<QueuedLine> = None;
    while let Ok(first) = queued.recv() {
        let rest_is_first = cut.is_some();
        let batch: Vec<QueuedLine> =
            cut.take().into_iter().chain(iter::once(first)).chain(queued.try_iter().take(BATCH_MAX)).collect();
        let bytes = batch.iter().map(|line| line.text.as_slice()).collect::<Vec<_>>().concat();
        let (mut written, result) = write_most(&mut to, &bytes);
        for (i, mut line) in batch.into_iter().enumerate() {
            let done = written.min(line.text.len());
            written -= done;
            if done == line.text.len() {
                continue;
            }
            if done > 0 || (i == 0 && rest_is_first) {
                line.text.drain(..done);
                cut = Some(line);
            } else {
                line.lost.increment(1);
            }
        }
        match result {
            Ok(()) => reported = false,
            Err(error) if !std::mem::replace(&mut reported, true) => {
                tracing::error!(%error, "cannot write the {name}; its lines are lost until writing succeeds");
            }
            Err(_) => {}
        }
    }
    if let Some(line) = cut
        && to.write_all(&line.text).is_err()
    {
        line.lost.increment(1);
    }
}

/// Writes until all bytes are written or writing fails. Returns how many bytes are written.
fn write_most(to: &mut impl Write, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while written < bytes.len() {
        match to.write(&bytes[written..]) {
            Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
            Ok(more) => written += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Err(error)),
        }
    }
    (written, to.flush())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Metrics;
    use parking_lot::Mutex;

    /// A fake disk with the given space, whose writes wait while a test holds its lock.
    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<(Vec<u8>, usize)>>);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let (text, space) = &mut *self.0.lock();
            let fits = bytes.len().min(*space);
            if fits == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            text.extend(&bytes[..fits]);
            *space -= fits;
            Ok(fits)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lost(metrics: &Metrics) -> u64 {
        let text = metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix("lost_total "));
        line.and_then(|value| value.parse().ok()).expect("the counter is registered")
    }

    #[test]
    fn each_line_is_written_completely_or_counted_as_lost() {
        let (batches, metrics) = (40, Metrics::default());
        let counter = metrics.counter("lost_total", "Lost lines.", &[]);
        let disk = Disk::default();
        let (lines, queued) = sync_channel(LINES_MAX);
        let thread = std::thread::spawn({
            let disk = disk.clone();
            move || write(&queued, disk, "file")
        });
        for batch in 0..batches {
            // Each time, the disk's space ends within a line: a short one, or one that is longer than a buffer.
            disk.0.lock().1 += 17;
            for length in [7, 9_000] {
                let text = format!("\"{batch:02}{}\"\n", "é".repeat(length / 2)).into_bytes();
                lines.send(QueuedLine { text, lost: counter.clone() }).expect("the thread runs");
            }
        }
        disk.0.lock().1 = usize::MAX;
        drop(lines);
        thread.join().expect("the thread does not panic");
        let text = String::from_utf8(disk.0.lock().0.clone()).expect("no character is cut");
        let whole = text.lines().filter(|line| serde_json::from_str::<String>(line).is_ok()).count();
        assert_eq!(whole, text.lines().count(), "a line is written in part");
        assert_eq!(whole as u64 + lost(&metrics), 2 * batches);
    }

    #[test]
    fn partly_written_line_is_counted_as_one_lost_line() {
        let metrics = Metrics::default();
        let (lines, queued) = sync_channel(LINES_MAX);
        let disk = Disk(Arc::new(Mutex::new((Vec::new(), 6))));
        for text in ["one\n", "two\n", "three\n"] {
            let lost = metrics.counter("lost_total", "Lost lines.", &[]);
            lines.send(QueuedLine { text: text.into(), lost }).expect("the queue has space");
        }
        drop(lines);
        write(&queued, disk.clone(), "file");
        assert_eq!((disk.0.lock().0.as_slice(), lost(&metrics)), (&b"one\ntw"[..], 2));
    }
}
