//! One spec-driven decoder for the common model families. A model is weights and a spec and
//! holds nothing per sequence, so that no request can leave a trace in the next one and one
//! model serves any number of threads and caches.
//!
//! A family ([`llama`]) turns a configuration into a [`ModelSpec`]; [`Decoder`] runs any spec.
#![forbid(unsafe_code)]

mod config;
mod decoder;
mod gated;
mod layers;
mod linear;
pub mod llama;
mod names;
mod rope;
mod rowwise;
mod spec;
mod weights;

pub use decoder::Decoder;
pub use linear::Linear;
pub use names::WeightNames;
pub use spec::{
    AttentionSpec, FeedForward, LayerSpec, ModelSpec, Norm, Presence, RopePairs, RopeScaling,
    RopeSpec,
};
pub use weights::{LinearWeight, WeightSource};

use std::collections::HashMap;

use candle_core::{Tensor, quantized::gguf_file};

use crate::cache::{CacheSpec, StepPlan};
use crate::error::{Error, Result};
use config::{Gguf, Json};

/// A decoder-only language model whose K/V lives in a paged cache. The model holds weights
/// only; everything per sequence is in the plan and the cache behind it.
pub trait CausalLm: Send + Sync {
    /// Runs one planned step. `tokens` is u32 `[rows]` (`plan.tokens()`); the result is f32
    /// `[plan.logit_rows().len(), vocab]`, one row per wanted logit row, in their order.
    ///
    /// # Errors
    /// Those of the ops, [`Error::StalePlan`] among them.
    fn forward(&self, tokens: &Tensor, plan: &StepPlan) -> Result<Tensor>;

    /// The cache this model needs, with K/V rows of `dtype`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unsupported dtype.
    fn cache_spec(&self, dtype: candle_core::DType) -> Result<CacheSpec>;

    /// Tokens in the vocabulary: ids are below this.
    fn vocab_size(&self) -> usize;

    /// Longest sequence in tokens that the model was made for.
    fn context_length(&self) -> usize;
}

type HfFamily = fn(&serde_json::Value, &str) -> Result<ModelSpec>;
type GgufFamily = fn(&HashMap<String, gguf_file::Value>, &str) -> Result<ModelSpec>;

/// `model_type`, the class in `architectures`, and the family that reads the rest.
const HF_FAMILIES: &[(&str, &str, HfFamily)] =
    &[("llama", "LlamaForCausalLM", llama::spec_from_hf)];

/// `general.architecture` and the family that reads the rest.
const GGUF_FAMILIES: &[(&str, GgufFamily)] = &[("llama", llama::spec_from_gguf)];

/// The spec of a model in Hugging Face's layout from its `config.json`, by `model_type` or,
/// where that is absent, by the first of `architectures`. `place` names the file in errors.
///
/// # Errors
/// [`Error::Unsupported`] for an architecture this crate does not run, or what the family
/// answers: [`Error::Missing`] for an absent field, [`Error::InvalidArgument`] for a value of
/// the wrong kind or range, [`Error::Unsupported`] for one that would change the result.
pub fn spec_from_hf(config: &serde_json::Value, place: &str) -> Result<ModelSpec> {
    let json = Json::new(config, place);
    let named = match json.optional_text("model_type")? {
        Some(model_type) => model_type,
        None => config
            .pointer("/architectures/0")
            .and_then(serde_json::Value::as_str)
            .ok_or_else(|| json.missing("model_type"))?,
    };
    match HF_FAMILIES
        .iter()
        .find(|(model_type, class, _)| named == *model_type || named == *class)
    {
        Some((_, _, family)) => family(config, place),
        None => Err(unknown_architecture(
            named,
            HF_FAMILIES.iter().map(|(model_type, ..)| *model_type),
        )),
    }
}

/// The spec of a GGUF model from its metadata, by `general.architecture`. `place` names the
/// file in errors.
///
/// # Errors
/// As [`spec_from_hf`].
pub fn spec_from_gguf(meta: &HashMap<String, gguf_file::Value>, place: &str) -> Result<ModelSpec> {
    let named = Gguf::new(meta, place).text("general.architecture")?;
    match GGUF_FAMILIES.iter().find(|(name, _)| named == *name) {
        Some((_, family)) => family(meta, place),
        None => Err(unknown_architecture(
            named,
            GGUF_FAMILIES.iter().map(|(name, _)| *name),
        )),
    }
}

fn unknown_architecture<'a>(got: &str, supported: impl Iterator<Item = &'a str>) -> Error {
    Error::Unsupported {
        what: "architecture",
        got: got.to_string(),
        supported: supported.collect::<Vec<_>>().join(", "),
    }
}
