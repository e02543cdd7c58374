//! Typed reads from the metadata of a GGUF file.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

use candle_core::quantized::gguf_file::Value;

use super::wrong_type;
use crate::error::{Error, Result, cut};

/// The metadata of a GGUF file. Writers differ in the width of their numbers, so any width
/// is read. Fields are named without the architecture, but for those of [`SHARED`].
pub(super) struct Gguf<'a> {
    meta: &'a HashMap<String, Value>,
    place: &'a str,
    architecture: &'a str,
    seen: RefCell<BTreeSet<String>>,
}

/// Beginnings of fields that all architectures have in common.
const SHARED: &[&str] = &["general.", "split.", "tokenizer."];

/// Fields of an architecture that do not change the logits.
const GGUF_WITHOUT_EFFECT: &[&str] = &[
    "rope.scaling.finetuned",
    // Of use to the scalings that read it.
    "rope.scaling.original_context_length",
    // Where they have an effect, the tokens are counted or the tensors measured.
    "tensor_data_layout",
    "vocab_size",
];

/// Fields of an architecture that change nothing with one value.
const GGUF_NEUTRAL: &[(&str, f64)] =
    &[("attention.causal", 1.0), ("rope.scaling.attn_factor", 1.0)];

impl<'a> Gguf<'a> {
    /// # Errors
    /// [`Error::Missing`] or [`Error::InvalidArgument`] about `general.architecture`.
    pub(super) fn new(meta: &'a HashMap<String, Value>, place: &'a str) -> Result<Self> {
        let mut gguf = Self {
            meta,
            place,
            architecture: "",
            seen: RefCell::default(),
        };
        gguf.architecture = gguf
            .optional_text("general.architecture")?
            .ok_or_else(|| gguf.missing("general.architecture"))?;
        Ok(gguf)
    }

    pub(super) fn place(&self) -> &str {
        self.place
    }

    pub(super) fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// The whole name of a field.
    fn whole(&self, field: &str) -> String {
        if SHARED.iter().any(|start| field.starts_with(start)) {
            return field.to_string();
        }
        format!("{}.{field}", self.architecture)
    }

    pub(super) fn missing(&self, field: &str) -> Error {
        Error::Missing {
            place: self.place.to_string(),
            what: self.whole(field),
        }
    }

    /// Refuses every field of the architecture that nothing has read and that may change the
    /// result: all but those known to have no effect, and those that are 0, false or empty.
    pub(super) fn finish(&self) -> Result<()> {
        let prefix = self.whole("");
        let seen = self.seen.borrow();
        let mut fields: Vec<_> = self.meta.iter().collect();
        fields.sort_by_key(|(name, _)| *name);
        for (name, value) in fields {
            let Some(field) = name.strip_prefix(&prefix) else {
                continue;
            };
            let idle = match value {
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                other => number(other) == Some(0.0),
            };
            let neutral = GGUF_NEUTRAL.iter().find(|(name, _)| *name == field);
            let fits = match neutral {
                Some((_, neutral)) => number(value) == Some(*neutral),
                None => idle || GGUF_WITHOUT_EFFECT.contains(&field),
            };
            if !(fits || seen.contains(name)) {
                return Err(Error::Unsupported {
                    what: "model field",
                    got: format!(
                        "{} = {} in {}",
                        cut(name),
                        cut(format_args!("{value:?}")),
                        self.place
                    ),
                    supported: "the fields of this family".into(),
                });
            }
        }
        Ok(())
    }

    fn read<T>(
        &self,
        field: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let name = self.whole(field);
        let value = self.meta.get(&name);
        let read = value.map(|value| {
            convert(value).ok_or_else(|| wrong_type(self.place, &name, expected, value))
        });
        self.seen.borrow_mut().insert(name);
        read.transpose()
    }

    pub(super) fn optional_count(&self, field: &str) -> Result<Option<usize>> {
        self.read(field, "a whole number of at least 1", |value| {
            let count = usize::try_from(whole(value)?).ok()?;
            (count > 0).then_some(count)
        })
    }

    pub(super) fn count(&self, field: &str) -> Result<usize> {
        self.optional_count(field)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn optional_number(&self, field: &str) -> Result<Option<f64>> {
        self.read(field, "a number", number)
    }

    pub(super) fn number(&self, field: &str) -> Result<f64> {
        self.optional_number(field)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn optional_text(&self, field: &str) -> Result<Option<&'a str>> {
        self.read(field, "a string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(super) fn flag(&self, field: &str) -> Result<bool> {
        let value = self.read(field, "true or false", |value| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        })?;
        Ok(value.unwrap_or(false))
    }

    /// A whole number; 0, by which llama.cpp means "not set", counts as absent.
    pub(super) fn size(&self, field: &str) -> Result<Option<usize>> {
        let size = self.read(field, "a whole number", |value| {
            usize::try_from(whole(value)?).ok()
        })?;
        Ok(size.filter(|&size| size > 0))
    }

    /// A number above 0; 0 counts as absent.
    pub(super) fn factor(&self, field: &str) -> Result<Option<f64>> {
        Ok(self.optional_number(field)?.filter(|&x| x != 0.0))
    }

    /// Length of the array in `field`.
    pub(super) fn array_len(&self, field: &str) -> Result<Option<usize>> {
        self.read(field, "an array", |value| match value {
            Value::Array(items) => Some(items.len()),
            _ => None,
        })
    }
}

fn whole(value: &Value) -> Option<i128> {
    Some(match *value {
        Value::U8(v) => v.into(),
        Value::I8(v) => v.into(),
        Value::U16(v) => v.into(),
        Value::I16(v) => v.into(),
        Value::U32(v) => v.into(),
        Value::I32(v) => v.into(),
        Value::U64(v) => v.into(),
        Value::I64(v) => v.into(),
        _ => return None,
    })
}

fn number(value: &Value) -> Option<f64> {
    match *value {
        Value::F32(v) => Some(v.into()),
        Value::F64(v) => Some(v),
        Value::Bool(v) => Some(v.into()),
        ref other => whole(other).map(|v| v as f64),
    }
}
