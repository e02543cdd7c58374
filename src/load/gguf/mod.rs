//! GGUF files: metadata and quantised tensors.
//!
//! The layout is that of ggml's `docs/gguf.md`, versions 2 and 3, little endian.

mod header;
mod weights;

pub use weights::GgufWeights;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use candle_core::{
    Device,
    quantized::{GgmlDType, QTensor, ggml_file::qtensor_from_ggml, gguf_file::Value},
};

use super::{missing_tensor, mmap::Mapped};
use crate::error::{Error, Result, cut};

/// An open GGUF file whose header has been read and checked: every tensor it lists lies within
/// the file, is aligned, and has as many bytes as its shape and type need.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Mapped,
    metadata: HashMap<String, Value>,
    tensors: HashMap<String, TensorInfo>,
}

/// Where a tensor lies. The header parser guarantees `start + len <= file length`.
#[derive(Debug)]
struct TensorInfo {
    dtype: GgmlDType,
    /// Outermost dimension first, as candle counts (GGUF counts the other way round).
    shape: Vec<usize>,
    start: usize,
    len: usize,
}

impl GgufFile {
    /// Maps the file and reads its header; tensors are read when they are asked for. The file
    /// must not be changed while it is open.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened, [`Error::Format`] with the byte offset if it is
    /// truncated or contradicts itself, [`Error::Unsupported`] for an unknown version or
    /// tensor type.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let map = Mapped::open(&path)?;
        let (metadata, tensors) = header::parse(&map, &path)?;
        Ok(Self {
            path,
            map,
            metadata,
            tensors,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All metadata, as candle's type.
    pub fn metadata(&self) -> &HashMap<String, Value> {
        &self.metadata
    }

    /// Names of all tensors, in no order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape of a tensor, outermost dimension first.
    pub fn tensor_shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|info| info.shape.as_slice())
    }

    /// Reads a tensor as it is stored. Costs one copy of its bytes.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is none of this name.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<QTensor> {
        let info = self.info(name)?;
        self.read_tensor(name, info, info.shape.clone(), device)
    }

    /// Reads a tensor `[a, b, c]` as the matrix `[a * b, c]`.
    pub(super) fn flattened(&self, name: &str, device: &Device) -> Result<QTensor> {
        let info = self.info(name)?;
        let columns = info.shape.last().copied().unwrap_or(1);
        // The header's parser has checked the product.
        let rows = info.shape.iter().rev().skip(1).product();
        self.read_tensor(name, info, vec![rows, columns], device)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors
            .get(name)
            .ok_or_else(|| missing_tensor(name, self.place()))
    }

    fn read_tensor(
        &self,
        name: &str,
        info: &TensorInfo,
        shape: Vec<usize>,
        device: &Device,
    ) -> Result<QTensor> {
        let bytes = info
            .start
            .checked_add(info.len)
            .and_then(|end| self.map.get(info.start..end))
            .ok_or_else(|| self.bad(format!("tensor `{name}` lies past the end of the file")))?;
        Ok(qtensor_from_ggml(info.dtype, bytes, shape, device)?)
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::Missing`] without the key, [`Error::Format`] if it holds another type.
    pub fn string(&self, key: &str) -> Result<&str> {
        match self.value(key)? {
            Value::String(s) => Ok(s),
            other => Err(self.wrong_type(key, "a string", other)),
        }
    }

    /// A non-negative integer of any width that fits 32 bits.
    ///
    /// # Errors
    /// As [`GgufFile::string`].
    pub fn u32(&self, key: &str) -> Result<u32> {
        let value = self.value(key)?;
        integer(value)
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| self.wrong_type(key, "an integer from 0 to 2^32 - 1", value))
    }

    /// A floating-point number of either width.
    ///
    /// # Errors
    /// As [`GgufFile::string`].
    pub fn f32(&self, key: &str) -> Result<f32> {
        match self.value(key)? {
            Value::F32(x) => Ok(*x),
            Value::F64(x) => Ok(*x as f32),
            other => Err(self.wrong_type(key, "a floating-point number", other)),
        }
    }

    /// A boolean.
    ///
    /// # Errors
    /// As [`GgufFile::string`].
    pub fn bool(&self, key: &str) -> Result<bool> {
        match self.value(key)? {
            Value::Bool(b) => Ok(*b),
            other => Err(self.wrong_type(key, "a boolean", other)),
        }
    }

    /// An array of any element type.
    ///
    /// # Errors
    /// As [`GgufFile::string`].
    pub fn array(&self, key: &str) -> Result<&[Value]> {
        match self.value(key)? {
            Value::Array(values) => Ok(values),
            other => Err(self.wrong_type(key, "an array", other)),
        }
    }

    /// An array of strings.
    ///
    /// # Errors
    /// As [`GgufFile::string`].
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        let elements = self.array(key)?.iter().enumerate();
        elements
            .map(|(i, value)| match value {
                Value::String(s) => Ok(s.as_str()),
                other => Err(self.wrong_type(&format!("{key}[{i}]"), "a string", other)),
            })
            .collect()
    }

    /// Reads a key that may be absent: `file.optional("key", GgufFile::u32)`.
    ///
    /// # Errors
    /// Those of `read`, but for a missing key.
    pub fn optional<'a, T>(
        &'a self,
        key: &str,
        read: impl FnOnce(&'a Self, &str) -> Result<T>,
    ) -> Result<Option<T>> {
        if self.metadata.contains_key(key) {
            read(self, key).map(Some)
        } else {
            Ok(None)
        }
    }

    /// What errors call this file.
    pub(super) fn place(&self) -> String {
        self.path.display().to_string()
    }

    /// An error about the content of this file.
    pub(super) fn bad(&self, what: String) -> Error {
        Error::Format {
            path: self.path.clone(),
            what,
        }
    }

    fn value(&self, key: &str) -> Result<&Value> {
        self.metadata.get(key).ok_or_else(|| Error::Missing {
            place: self.place(),
            what: format!("metadata key `{key}`"),
        })
    }

    fn wrong_type(&self, key: &str, expected: &str, got: &Value) -> Error {
        let got = cut(format_args!("{got:?}"));
        self.bad(format!("metadata `{key}`: expected {expected}, got {got}"))
    }
}

/// An integer of any width.
pub(super) fn integer(value: &Value) -> Option<i128> {
    Some(match value {
        Value::U8(n) => i128::from(*n),
        Value::I8(n) => i128::from(*n),
        Value::U16(n) => i128::from(*n),
        Value::I16(n) => i128::from(*n),
        Value::U32(n) => i128::from(*n),
        Value::I32(n) => i128::from(*n),
        Value::U64(n) => i128::from(*n),
        Value::I64(n) => i128::from(*n),
        _ => return None,
    })
}
