//! A file of lines that is renamed when it is full. A bounded number of old files is kept.

use super::opened;
use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// The number of old files that are kept: `FILE.1` (the latest) to `FILE.7`.
const OLD_FILES: u32 = 7;

pub(super) struct Rotated {
    path: PathBuf,
    name: &'static str,
    file: File,
    /// The number of bytes written to the file, counted from 0 again after a failed attempt to rotate it.
    written: u64,
    file_max: u64,
    ends_line: bool,
}

impl Rotated {
    /// Opens the file as [`opened`] does. All files together have at most `bytes_max` bytes, unless a line is longer than an eighth of that.
    pub(super) fn open(path: &Path, name: &'static str, bytes_max: u64) -> io::Result<Self> {
        let file = opened(path, name)?;
        let (path, written) = (path.canonicalize()?, file.metadata()?.len());
        Ok(Self { path, name, file, written, file_max: bytes_max / u64::from(OLD_FILES + 1), ends_line: true })
    }

    fn old(&self, number: u32) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        if number > 0 {
            path.push(format!(".{number}"));
        }
        path.into()
    }

    fn rotate(&mut self) -> io::Result<()> {
        for number in (0..OLD_FILES).rev() {
            match fs::rename(self.old(number), self.old(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        self.file = opened(&self.path, self.name)?;
        Ok(())
    }
}

impl Write for Rotated {
    /// Writes as many complete lines as fit into the file. If none fits, the file is rotated first.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = |written| usize::try_from(self.file_max.saturating_sub(written)).unwrap_or(usize::MAX).min(bytes.len());
        let last_line = |room: usize| bytes[..room].iter().rposition(|byte| *byte == b'\n').map(|end| end + 1);
        let mut fits = if room(self.written) == bytes.len() { Some(bytes.len()) } else { last_line(room(self.written)) };
        if fits.is_none() && self.ends_line && self.written > 0 {
            fits = last_line(room(0));
            // If the rotation fails, it is tried again only after another `file_max` bytes, because each attempt renames the old files.
            self.written = 0;
            if let Err(error) = self.rotate() {
                tracing::error!(%error, "the {} cannot be renamed, so it grows; make its folder writable", self.name);
            }
        }
        // The rest of a partly written line, and a line that is longer than a file, are written whole, even if the file becomes too long.
        let first_line = || bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| end + 1);
        let written = self.file.write(&bytes[..fits.unwrap_or_else(first_line)])?;
        self.written += written as u64;
        self.ends_line = bytes[..written].last().map_or(self.ends_line, |byte| *byte == b'\n');
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::super::LineFile;
    use super::*;
    use metrics::Counter;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn full_file_is_renamed_and_the_oldest_is_deleted() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("audit.jsonl");
        let file_max = 100;
        for lines in [0..500, 500..1000] {
            let file = LineFile::open_rotated(&path, "audit log", 8 * file_max).expect("the folder is writable");
            lines.for_each(|line| file.append(&format!("{line:04}"), &Counter::noop()));
        }
        let mut kept = Vec::new();
        for number in (0..=OLD_FILES).rev() {
            let path = if number == 0 { path.clone() } else { folder.path().join(format!("audit.jsonl.{number}")) };
            let about = fs::metadata(&path).expect("the file is kept");
            assert!(about.len() <= file_max && about.permissions().mode() & 0o777 == 0o600, "{}", path.display());
            kept.extend(fs::read_to_string(&path).expect("the file is kept").lines().map(str::to_owned));
        }
        assert_eq!(fs::read_dir(folder.path()).expect("the folder can be read").count(), 8);
        let expected: Vec<_> = (1000 - kept.len()..1000).map(|line| format!("\"{line:04}\"")).collect();
        assert_eq!(kept, expected, "the last lines are kept, whole and in order");
        assert!(kept.len() > 90, "{}", kept.len());
    }

    #[test]
    fn file_that_cannot_be_renamed_grows_and_loses_no_line() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("audit.jsonl");
        fs::create_dir_all(folder.path().join("audit.jsonl.7/folder")).expect("the folder is writable");
        fs::write(folder.path().join("audit.jsonl.6"), "").expect("the folder is writable");
        let mut file = Rotated::open(&path, "audit log", 80).expect("the folder is writable");
        for line in 0..10 {
            file.write_all(format!("{line:07}\n").as_bytes()).expect("the disk has space");
        }
        assert_eq!(fs::read_to_string(&path).expect("the file exists").lines().count(), 10);
    }
}
