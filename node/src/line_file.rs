//! A file to which lines of JSON are appended, such as a ledger.
//!
//! No caller waits for the disk: a bounded queue passes the lines to a thread of the file. Lines that do not fit, or cannot be written, are
//! lost and counted. Each line is written immediately, so a process that is killed has written what it had appended before.

use ::metrics::Counter;
use serde::Serialize;
use std::{
    fs::{File, TryLockError},
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::Path,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
};

/// The most lines that may be queued for the disk. This many lines are a few megabytes, and a busy cluster writes them in some seconds.
pub const LINES_MAX: usize = 16_384;

/// The permissions of a new file: its owner may read and write it.
const OWNER_ONLY: u32 = 0o600;

/// A file to which lines are appended. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LineFile(Arc<Writer>);

#[derive(Debug)]
struct Writer {
    /// The queue to the writing thread; `None` only while the file is being dropped.
    lines: Option<SyncSender<Queued>>,
    thread: Option<JoinHandle<()>>,
}

struct Queued {
    text: String,
    lost: Counter,
}

impl LineFile {
    /// Opens a file, and appends to it. `name` says in logs what the file is, such as `ledger`. A new file can be read only by its owner,
    /// because it records the requests of each client. An existing file keeps its permissions; a warning is logged if other users may access
    /// it. If the last line is incomplete because the process that wrote it was killed, a line break is added first.
    ///
    /// # Errors
    /// The file cannot be opened, or another process has it open in this way.
    pub fn open(path: &Path, name: &'static str) -> io::Result<Self> {
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
        Self::write_to(file, name)
    }

    /// Appends to `to`, from a thread of its own. `name` is that of [`LineFile::open`].
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn write_to(to: impl Write + Send + 'static, name: &'static str) -> io::Result<Self> {
        let (lines, queued) = sync_channel(LINES_MAX);
        let thread = std::thread::Builder::new().name(format!("tandem-{name}")).spawn(move || write(&queued, to, name))?;
        Ok(Self(Arc::new(Writer { lines: Some(lines), thread: Some(thread) })))
    }

    /// Appends the value as one line of JSON. `lost` counts the line if it is lost.
    pub fn append(&self, line: &impl Serialize, lost: &Counter) {
        let Some(lines) = &self.0.lines else { return };
        let mut text = serde_json::to_string(line).expect("a line can be serialized");
        text.push('\n');
        if lines.try_send(Queued { text, lost: lost.clone() }).is_err() {
            lost.increment(1);
        }
    }
}

/// Dropping the last handle waits until the queued lines are written to the file.
impl Drop for Writer {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread that writes a file of lines panicked; its last lines are lost");
        }
    }
}

/// Writes lines until all senders are dropped. Flushes all queued lines before it waits for more.
fn write(queued: &Receiver<Queued>, to: impl Write, name: &'static str) {
    let mut to = BufWriter::new(to);
    let mut reported = false;
    while let Ok(first) = queued.recv() {
        let batch: Vec<Queued> = std::iter::once(first).chain(queued.try_iter().take(LINES_MAX)).collect();
        let written = batch.iter().try_for_each(|line| to.write_all(line.text.as_bytes())).and_then(|()| to.flush());
        if let Err(error) = written {
            batch.iter().for_each(|line| line.lost.increment(1));
            if !std::mem::replace(&mut reported, true) {
                tracing::error!(%error, "cannot write the {name}; its lines are lost until writing succeeds");
            }
        } else {
            reported = false;
        }
    }
}
