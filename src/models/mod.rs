//! One spec-driven decoder for the common model families.
#![forbid(unsafe_code)]

mod weights;

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
