//! A file's bytes, memory-mapped or owned.

use crate::ModelError;
use std::{fs::File, path::Path};

pub(crate) enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a file. Pages are read from disk at their first access.
    pub(crate) fn map(path: &Path) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Open { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is read-only, and every byte is a valid `u8`. If a file shrank while it is mapped, the process would be killed;
        // model files are put in place by renaming a complete file and are not written afterwards.
        #[expect(unsafe_code, reason = "mapping a file is sound only while no process truncates it")]
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed)?;
        Ok(Self::Mapped(map))
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}
