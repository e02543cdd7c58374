//! Typed reads from the two kinds of configuration. A field that is absent, of the wrong type
//! or out of range is told apart, and every error names the field and the place.

use std::collections::HashMap;

use candle_core::quantized::gguf_file::Value;

use crate::error::{Error, Result};

const OP: &str = "model_config";

fn wrong_type(place: &str, field: &str, expected: &str, got: impl std::fmt::Debug) -> Error {
    Error::InvalidArgument {
        op: OP,
        what: format!("{field} in {place}"),
        expected: expected.into(),
        got: format!("{got:?}"),
    }
}

/// A `config.json` or an object inside it. `null` counts as absent.
pub(super) struct Json<'a> {
    object: &'a serde_json::Value,
    place: String,
}

impl<'a> Json<'a> {
    pub(super) fn new(object: &'a serde_json::Value, place: &str) -> Self {
        Self {
            object,
            place: place.to_string(),
        }
    }

    pub(super) fn missing(&self, field: &str) -> Error {
        Error::Missing {
            place: self.place.clone(),
            what: field.to_string(),
        }
    }

    pub(super) fn get(&self, field: &str) -> Option<&'a serde_json::Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        field: &str,
        expected: &str,
        convert: impl Fn(&'a serde_json::Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.get(field)
            .map(|value| {
                convert(value).ok_or_else(|| wrong_type(&self.place, field, expected, value))
            })
            .transpose()
    }

    pub(super) fn optional_count(&self, field: &str) -> Result<Option<usize>> {
        self.read(field, "a whole number of at least 1", |value| {
            let count = usize::try_from(value.as_u64()?).ok()?;
            (count > 0).then_some(count)
        })
    }

    pub(super) fn count(&self, field: &str) -> Result<usize> {
        self.optional_count(field)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn optional_number(&self, field: &str) -> Result<Option<f64>> {
        self.read(field, "a number", serde_json::Value::as_f64)
    }

    pub(super) fn number(&self, field: &str) -> Result<f64> {
        self.optional_number(field)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn optional_text(&self, field: &str) -> Result<Option<&'a str>> {
        self.read(field, "a string", serde_json::Value::as_str)
    }

    pub(super) fn flag(&self, field: &str) -> Result<bool> {
        let value = self.read(field, "true or false", serde_json::Value::as_bool)?;
        Ok(value.unwrap_or(false))
    }

    /// The object in `field`.
    pub(super) fn object(&self, field: &str) -> Result<Option<Self>> {
        let object = self.read(field, "an object", |value| {
            value.is_object().then_some(value)
        })?;
        Ok(object.map(|object| Self::new(object, &format!("{field} in {}", self.place))))
    }
}

/// The metadata of a GGUF file. Writers differ in the width of their numbers, so any width
/// is read.
pub(super) struct Gguf<'a> {
    meta: &'a HashMap<String, Value>,
    place: &'a str,
}

impl<'a> Gguf<'a> {
    pub(super) fn new(meta: &'a HashMap<String, Value>, place: &'a str) -> Self {
        Self { meta, place }
    }

    pub(super) fn missing(&self, field: &str) -> Error {
        Error::Missing {
            place: self.place.to_string(),
            what: field.to_string(),
        }
    }

    fn read<T>(
        &self,
        field: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.meta
            .get(field)
            .map(|value| {
                convert(value).ok_or_else(|| wrong_type(self.place, field, expected, value))
            })
            .transpose()
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

    pub(super) fn text(&self, field: &str) -> Result<&'a str> {
        self.optional_text(field)?
            .ok_or_else(|| self.missing(field))
    }

    /// Length of the array in `field`.
    pub(super) fn array_len(&self, field: &str) -> Result<Option<usize>> {
        self.read(field, "an array", |value| match value {
            Value::Array(items) => Some(items.len()),
            _ => None,
        })
    }

    /// Refuses a field that changes what the model computes, unless it holds the number with
    /// which it changes nothing.
    pub(super) fn refuse_unless(&self, field: &str, neutral: f64) -> Result<()> {
        match self.meta.get(field) {
            Some(value) if number(value) != Some(neutral) => Err(Error::Unsupported {
                what: "model field",
                got: format!("{field} = {value:?} in {}", self.place),
                supported: format!("{neutral}, or no such field"),
            }),
            _ => Ok(()),
        }
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
