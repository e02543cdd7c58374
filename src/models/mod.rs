//! One spec-driven decoder for the common model families. A model is weights and a spec and
//! holds nothing per sequence, so that no request can leave a trace in the next one and one
//! model serves any number of threads and caches.
//!
//! A family turns a configuration into a [`ModelSpec`] ([`spec_from_hf`], [`spec_from_gguf`]);
//! [`Decoder`] runs any spec.
#![forbid(unsafe_code)]

mod decoder;
mod experts;
mod families;
mod inventory;
mod layers;
mod linear;
mod names;
mod rope;
mod rope_spec;
mod spec;
mod weights;

pub use decoder::Decoder;
pub use families::{spec_from_gguf, spec_from_hf};
pub use linear::Linear;
pub use names::{ExpertNames, WeightNames};
pub use rope_spec::{LongRopeDivisors, RopePairs, RopeScaling, RopeSpec};
pub use spec::{
    Activation, AttentionSpec, Experts, FeedForward, LayerSpec, ModelSpec, Norm, Presence,
    QkNormOver,
};
pub use weights::{LinearWeight, WeightSource};

use candle_core::Tensor;

use crate::cache::{CacheSpec, StepPlan};
use crate::error::Result;

/// A decoder-only language model whose K/V lives in a paged cache. The model holds weights
/// only; everything per sequence is in the plan and the cache behind it.
pub trait CausalLm: Send + Sync {
    /// Runs one planned step. `tokens` is u32 `[rows]` (`plan.tokens()`); the result is f32
    /// `[plan.logit_rows().len(), vocab]`, one row per wanted logit row, in their order.
    ///
    /// # Errors
    /// Those of the ops, [`Error::StalePlan`](crate::Error::StalePlan) among them.
    fn forward(&self, tokens: &Tensor, plan: &StepPlan) -> Result<Tensor>;

    /// The cache this model needs, with K/V rows of `dtype`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an unsupported dtype.
    fn cache_spec(&self, dtype: candle_core::DType) -> Result<CacheSpec>;

    /// Tokens in the vocabulary: ids are below this.
    fn vocab_size(&self) -> usize;

    /// Longest sequence in tokens that the model was made for.
    fn context_length(&self) -> usize;
}
