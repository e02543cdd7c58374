//! One step.
use candle_core::Tensor;

/// A reserved step.
#[derive(Debug)]
pub struct StepPlan {
    tokens: Tensor,
    positions: Vec<u32>,
    logit_rows: Vec<u32>,
}

impl StepPlan {
    /// Token ids of all rows, u32 `[rows]`, on the cache's device.
    pub fn tokens(&self) -> &Tensor {
        &self.tokens
    }

    /// Rope position of each row.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Rows whose logits the feeds want, ascending.
    pub fn logit_rows(&self) -> &[u32] {
        &self.logit_rows
    }
}
