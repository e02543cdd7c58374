//! JSON files with errors that name the file.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// A text file. The errors name the path.
pub(super) fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| Error::Io {
        path: path.into(),
        source,
    })
}

/// A JSON file as `T`.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_str(&read_text(path)?).map_err(|e| Error::Format {
        path: path.into(),
        what: e.to_string(),
    })
}

/// A JSON file as `T`, `None` if there is no such file.
pub(super) fn read_if_there<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match read(path) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}
