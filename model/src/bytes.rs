//! A file's bytes, mapped or in memory.

use crate::ModelError;
use std::{fs::File, path::Path};

pub(crate) enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    /// Weights are read from the disk when they are first touched.
    pub(crate) fn map(path: &Path) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Open { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is read-only, and what it is read as (bytes) has no invalid values. A file that shrinks while it
        // is mapped would end the process; model files are put in place by renaming a complete file and never written again.
        #[expect(unsafe_code)]
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
