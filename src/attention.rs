//! The drop-in attention layer.
use candle_core::Tensor;

use crate::cache::StepPlan;
use crate::error::{Error, Result};

/// Appends K/V to the cache and attends to it, in one call.
#[derive(Debug, Clone)]
pub struct PagedAttention {
    scale: f32,
}

impl PagedAttention {
    /// Causal attention with scores `scale · q·k`.
    pub fn new(scale: f32) -> Self {
        Self { scale }
    }

    /// Writes k and v `[rows, kv_heads, dim]` into the cache of `layer` and attends with
    /// q `[rows, heads, dim]`; returns `[rows, heads, dim]`.
    ///
    /// # Errors
    /// those of the ops.
    pub fn forward(
        &self,
        layer: usize,
        q: &Tensor,
        _k: &Tensor,
        _v: &Tensor,
        _plan: &StepPlan,
    ) -> Result<Tensor> {
        Err(Error::Invariant {
            op: "paged_attention",
            what: format!("stub {layer} {} {q:?}", self.scale),
        })
    }
}
