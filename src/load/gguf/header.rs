//! The header of a GGUF file, read with every length checked before it is used.

use std::{collections::HashMap, path::Path};

use candle_core::quantized::{GgmlDType, gguf_file::Value};

use super::super::overlap;
use super::{TensorInfo, integer};
use crate::error::{Error, Result};

/// Metadata values in a whole file, array elements included. The largest vocabularies need
/// under two million; a value takes up to 32 bytes of memory per byte of file, so this bounds
/// what a header can make us allocate.
const MAX_VALUES: u64 = 1 << 23;
/// ggml's GGML_MAX_DIMS.
const MAX_DIMS: u32 = 4;
const MAX_ARRAY_DEPTH: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;

type Header = (HashMap<String, Value>, HashMap<String, TensorInfo>);

/// Reads metadata and tensor table of the file with these bytes.
pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Header> {
    let mut reader = Reader {
        bytes,
        at: 0,
        path,
        values_left: MAX_VALUES,
    };
    if reader.take(4)? != b"GGUF" {
        return Err(reader.bad("not a GGUF file: it does not begin with `GGUF`"));
    }
    let version = reader.u32()?;
    if !matches!(version, 2 | 3) {
        return Err(Error::Unsupported {
            what: "GGUF version",
            got: format!("{version} in {}", path.display()),
            supported: "2, 3, little endian".into(),
        });
    }
    let tensor_count = reader.u64()?;
    let value_count = reader.u64()?;
    let mut metadata = HashMap::new();
    for _ in 0..value_count {
        let key = reader.string()?;
        let kind = reader.u32()?;
        let value = reader.value(kind, 0)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(reader.bad(&format!("metadata key `{key}` appears twice")));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        // At least 8, or a tensor's blocks could not be read in place.
        Some(value) => integer(value)
            .and_then(|n| u64::try_from(n).ok())
            .filter(|n| n.is_power_of_two() && (8..=1 << 20).contains(n))
            .ok_or_else(|| {
                reader.bad("general.alignment: expected a power of two from 8 to 2^20")
            })?,
    };
    let mut listed = HashMap::new();
    for _ in 0..tensor_count {
        let name = reader.string()?;
        let entry = reader.tensor_entry(&name)?;
        if listed.insert(name.clone(), entry).is_some() {
            return Err(reader.bad(&format!("tensor `{name}` appears twice")));
        }
    }
    let data_start = (reader.at as u64).next_multiple_of(alignment);
    let tensors: HashMap<String, TensorInfo> = listed
        .into_iter()
        .map(|(name, entry)| {
            let info = reader.place(&name, entry, data_start, alignment)?;
            Ok((name, info))
        })
        .collect::<Result<_>>()?;
    // No sum can overflow: the tensors lie within the file.
    let places = tensors
        .iter()
        .map(|(name, info)| (name.as_str(), info.start..info.start + info.len));
    if let Some(overlap) = overlap(places) {
        return Err(reader.bad(&overlap));
    }
    Ok((metadata, tensors))
}

/// A tensor as the header lists it.
struct Entry {
    dtype: GgmlDType,
    shape: Vec<usize>,
    offset: u64,
    bytes: u64,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    path: &'a Path,
    values_left: u64,
}

impl<'a> Reader<'a> {
    fn bad(&self, what: &str) -> Error {
        Error::Format {
            path: self.path.into(),
            what: format!("{what} (header, near byte {})", self.at),
        }
    }

    fn take(&mut self, n: u64) -> Result<&'a [u8]> {
        let taken = usize::try_from(n)
            .ok()
            .and_then(|n| self.at.checked_add(n))
            .and_then(|end| Some((end, self.bytes.get(self.at..end)?)));
        let Some((end, taken)) = taken else {
            return Err(self.bad(&format!(
                "truncated or corrupt: {n} bytes expected, the file ends at byte {}",
                self.bytes.len()
            )));
        };
        self.at = end;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut number = [0; N];
        number.copy_from_slice(self.take(N as u64)?);
        Ok(number)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.number()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.number()?))
    }

    fn string(&mut self) -> Result<String> {
        let len = self.u64()?;
        // Files in the field hold a few strings that are not UTF-8; they are names and notes,
        // so they are kept readable. A vocabulary is checked for duplicates where it is used.
        Ok(String::from_utf8_lossy(self.take(len)?).into_owned())
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<Value> {
        self.values_left = self
            .values_left
            .checked_sub(1)
            .ok_or_else(|| self.bad(&format!("more than {MAX_VALUES} metadata values")))?;
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.number()?)),
            1 => Value::I8(i8::from_le_bytes(self.number()?)),
            2 => Value::U16(u16::from_le_bytes(self.number()?)),
            3 => Value::I16(i16::from_le_bytes(self.number()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.number()?)),
            6 => Value::F32(f32::from_le_bytes(self.number()?)),
            7 => match self.number()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.bad(&format!("a boolean is 0 or 1, not {other}"))),
            },
            8 => Value::String(self.string()?),
            9 if depth < MAX_ARRAY_DEPTH => {
                let kind = self.u32()?;
                // Grown by pushing: the length is only a claim until the elements are there.
                let mut values = Vec::new();
                for _ in 0..self.u64()? {
                    values.push(self.value(kind, depth + 1)?);
                }
                Value::Array(values)
            }
            9 => {
                return Err(self.bad(&format!(
                    "arrays nested deeper than {MAX_ARRAY_DEPTH} levels"
                )));
            }
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.number()?)),
            12 => Value::F64(f64::from_le_bytes(self.number()?)),
            other => return Err(self.bad(&format!("unknown metadata type {other}"))),
        })
    }

    fn tensor_entry(&mut self, name: &str) -> Result<Entry> {
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            return Err(self.bad(&format!(
                "tensor `{name}`: {dims} dimensions, at most {MAX_DIMS} are possible"
            )));
        }
        let mut shape = Vec::new();
        let mut elements = Some(1u64);
        for _ in 0..dims {
            let dim = self.u64()?;
            elements = elements.and_then(|n| n.checked_mul(dim));
            shape.push(usize::try_from(dim).unwrap_or(usize::MAX));
        }
        let dtype = dtype(self.u32()?).map_err(|got| Error::Unsupported {
            what: "tensor type",
            got: format!(
                "{got}{} of `{name}` in {}",
                unread_name(got).map_or(String::new(), |name| format!(" ({name})")),
                self.path.display()
            ),
            supported: "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K".into(),
        })?;
        let offset = self.u64()?;
        // The first dimension is the innermost: a row is a whole number of blocks.
        let row = shape.first().copied().unwrap_or(1);
        let block = dtype.block_size();
        let bytes = elements
            .filter(|&n| n > 0 && row % block == 0)
            .and_then(|n| (n / block as u64).checked_mul(dtype.type_size() as u64));
        shape.reverse();
        let Some(bytes) = bytes else {
            return Err(self.bad(&format!(
                "tensor `{name}`: impossible shape {shape:?} for blocks of {block} ({dtype:?})"
            )));
        };
        Ok(Entry {
            dtype,
            shape,
            offset,
            bytes,
        })
    }

    /// Turns an offset into the tensor data into a checked place in the file.
    fn place(
        &self,
        name: &str,
        entry: Entry,
        data_start: u64,
        alignment: u64,
    ) -> Result<TensorInfo> {
        let start = data_start.checked_add(entry.offset);
        let end = start.and_then(|start| start.checked_add(entry.bytes));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(self.bad(&format!("tensor `{name}`: its offset overflows")));
        };
        if !entry.offset.is_multiple_of(alignment) {
            return Err(self.bad(&format!(
                "tensor `{name}`: offset {} is not a multiple of the alignment {alignment}",
                entry.offset
            )));
        }
        if end > self.bytes.len() as u64 {
            return Err(self.bad(&format!(
                "truncated or corrupt: tensor `{name}` ends at byte {end}, the file at {}",
                self.bytes.len()
            )));
        }
        // No cast can cut: both are at most the length of a slice.
        Ok(TensorInfo {
            dtype: entry.dtype,
            shape: entry.shape,
            start: start as usize,
            len: entry.bytes as usize,
        })
    }
}

/// ggml's number of a tensor type. Q8_1 and Q8_K exist only inside matrix products, not in
/// files.
fn dtype(number: u32) -> std::result::Result<GgmlDType, u32> {
    Ok(match number {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        other => return Err(other),
    })
}

/// What ggml calls a tensor type that [`dtype`] does not know.
fn unread_name(number: u32) -> Option<&'static str> {
    Some(match number {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return None,
    })
}
