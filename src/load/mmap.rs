//! Memory-mapped files: the only unsafe code of the loaders.
#![allow(unsafe_code)]

use std::{fs::File, ops::Deref, path::Path};

use crate::error::{Error, Result};

/// A file's bytes, read-only, paged in by the operating system as they are touched.
#[derive(Debug)]
pub(super) struct Mapped(memmap2::Mmap);

impl Mapped {
    /// Maps a whole file. Costs no reading.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io {
            path: path.into(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() || metadata.len() == 0 {
            return Err(Error::Format {
                path: path.into(),
                what: "not a file, or an empty one".into(),
            });
        }
        // SAFETY: `Mmap::map` is unsafe because another process may change or cut the file
        // while it is mapped. The user guarantees that nobody does while a model loads
        // (`GgufFile::open` and `SafetensorsWeights::open` say so). This type guarantees the
        // rest: the map is read-only, its slice is only lent for as long as the map lives,
        // and no pointer into it is kept once a tensor is loaded.
        unsafe { memmap2::Mmap::map(&file) }.map(Self).map_err(io)
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
