//! Checkpoints, tokenizers and chat templates.
//!
//! Everything that reads a file lives here, so that no other layer ever indexes with a number
//! that came out of one: whatever leaves this folder has been checked against the file it was
//! in, and an error names the file, the tensor or field, and what was expected there.
#![deny(clippy::indexing_slicing)]

pub mod chat;
pub mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
mod json;
mod mmap;
mod pretrained;
mod progress;
pub mod safetensors;
mod sentencepiece;
mod splitting;
mod text_stream;
pub mod tokenizer;

pub use pretrained::{LoadOptions, Pretrained, from_pretrained};
pub use progress::{LoadProgress, Observer};
pub use text_stream::TextStream;

use std::ops::Range;

use candle_core::DType;

use crate::error::{Error, Result};

/// Refuses a compute dtype that no checkpoint can be converted to.
fn check_dtype(dtype: DType) -> Result<DType> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(dtype),
        got => Err(Error::InvalidArgument {
            op: "load",
            what: "dtype".into(),
            expected: "f32, f16 or bf16".into(),
            got: format!("{got:?}"),
        }),
    }
}

/// Refuses a tensor whose shape is not the one the model asked for.
fn check_shape(name: &str, place: &str, expected: &[usize], got: &[usize]) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(Error::Shape {
        op: "load",
        tensor: format!("{name} in {place}"),
        expected: format!("{expected:?}"),
        got: got.to_vec(),
    })
}

/// Which two tensors of a file share bytes, if any do: a small file could name the same bytes
/// over and over and be a large model. Tensors without bytes share none.
fn overlap<'a>(tensors: impl Iterator<Item = (&'a str, Range<usize>)>) -> Option<String> {
    let mut places: Vec<_> = tensors.filter(|(_, bytes)| !bytes.is_empty()).collect();
    places.sort_unstable_by_key(|(name, bytes)| (bytes.start, *name));
    let mut pairs = places.iter().zip(places.iter().skip(1));
    let ((a, at), (b, also)) = pairs.find(|((_, a), (_, b))| b.start < a.end)?;
    Some(format!(
        "tensors `{a}` at bytes {} to {} and `{b}` at bytes {} to {} overlap",
        at.start, at.end, also.start, also.end
    ))
}

/// What a tensor that is not in the checkpoint is called in an error.
fn missing_tensor(name: &str, place: String) -> Error {
    Error::Missing {
        place,
        what: format!("tensor `{name}`"),
    }
}
