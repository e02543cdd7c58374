//! Model families: short functions from a configuration to a [`ModelSpec`].
//!
//! A field of a configuration that would change what the model computes is honoured or
//! refused, never skipped. So that this holds for fields nobody here has heard of, the readers
//! of configurations remember what was read, and refuse the rest unless it is known to have no
//! effect or is null, false or empty.

mod base;
mod gguf;
mod hf;
mod json;
mod metadata;
mod rope;
mod sizes;

use std::collections::HashMap;

use candle_core::quantized::gguf_file;

use super::spec::{ModelSpec, Presence};
use crate::error::{Error, Result, cut};
use json::Json;
use metadata::Gguf;

const OP: &str = "model_config";

/// The spec of a model in Hugging Face's layout from its `config.json`, by `model_type` or,
/// where that is absent, by the first of `architectures`. `place` names the file in errors.
///
/// # Errors
/// [`Error::Unsupported`] for an architecture this crate does not run, or what the family
/// answers: [`Error::Missing`] for an absent field, [`Error::InvalidArgument`] for a value of
/// the wrong kind or range, [`Error::Unsupported`] for one that would change the result, among
/// them every field that the family does not know, unless it is null, false or empty.
pub fn spec_from_hf(config: &serde_json::Value, place: &str) -> Result<ModelSpec> {
    let json = Json::new(config, place);
    let named = match json.optional_text("model_type")? {
        Some(model_type) => model_type,
        None => config
            .pointer("/architectures/0")
            .and_then(serde_json::Value::as_str)
            .ok_or_else(|| json.missing("model_type"))?,
    };
    let known = |(model_type, class, _): &&(&str, &str, _)| named == *model_type || named == *class;
    let Some((family, _, read)) = hf::FAMILIES.iter().find(known) else {
        return Err(unknown_architecture(
            named,
            hf::FAMILIES.iter().map(|(model_type, ..)| *model_type),
        ));
    };
    if let Some(quantised) = json.object("quantization_config")? {
        let method = quantised.optional_text("quant_method")?;
        return Err(unsupported(
            "checkpoint",
            format!(
                "quantization_config {} in {place}",
                method.unwrap_or("without quant_method")
            ),
            "f32, f16 and bf16 tensors, or a GGUF file",
        ));
    }
    let spec = read(&json)?;
    json.finish()?;
    settled(spec, family, place)
}

/// The spec of a GGUF model from its metadata, by `general.architecture`. `place` names the
/// file in errors.
///
/// # Errors
/// As [`spec_from_hf`].
pub fn spec_from_gguf(meta: &HashMap<String, gguf_file::Value>, place: &str) -> Result<ModelSpec> {
    let metadata = Gguf::new(meta, place)?;
    let named = metadata.architecture();
    let Some((family, read)) = gguf::FAMILIES.iter().find(|(name, _)| named == *name) else {
        return Err(unknown_architecture(
            named,
            gguf::FAMILIES.iter().map(|(name, _)| *name),
        ));
    };
    if let Some(count) = metadata.size("split.count")?.filter(|&count| count > 1) {
        return Err(unsupported(
            "checkpoint",
            format!("{place}, one of {count} files (split.count)"),
            "a single GGUF file; `llama-gguf-split --merge` joins them",
        ));
    }
    let spec = read(&metadata)?;
    metadata.finish()?;
    settled(spec, family, place)
}

/// The last touches of every family.
fn settled(mut spec: ModelSpec, family: &'static str, place: &str) -> Result<ModelSpec> {
    spec.family = family;
    for layer in &mut spec.layers {
        // A window that no sequence fills: the layer need not be in a group of its own.
        let window = &mut layer.attention.window;
        *window = window.filter(|&window| window < spec.context_length);
    }
    match spec.check() {
        Ok(()) => Ok(spec),
        Err(Error::InvalidArgument {
            op,
            what,
            expected,
            got,
        }) => Err(Error::InvalidArgument {
            op,
            what: format!("{what} in {place}"),
            expected,
            got,
        }),
        Err(other) => Err(other),
    }
}

fn unknown_architecture<'a>(got: &str, supported: impl Iterator<Item = &'a str>) -> Error {
    let supported = supported.collect::<Vec<_>>().join(", ");
    unsupported("architecture", cut(got), &supported)
}

fn unsupported(what: &'static str, got: String, supported: &str) -> Error {
    Error::Unsupported {
        what,
        got,
        supported: supported.to_string(),
    }
}

fn wrong_type(place: &str, field: &str, expected: &str, got: impl std::fmt::Debug) -> Error {
    Error::InvalidArgument {
        op: OP,
        what: format!("{field} in {place}"),
        expected: expected.into(),
        got: cut(format_args!("{got:?}")),
    }
}

fn always_if(stored: bool) -> Presence {
    if stored {
        Presence::Always
    } else {
        Presence::Never
    }
}
