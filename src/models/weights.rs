//! Where a decoder's weights come from.

use std::sync::Arc;

use candle_core::{DType, Tensor, quantized::QTensor};

use crate::error::Result;

/// The weight matrix of a linear layer, `[out, in]`, as the checkpoint stores it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LinearWeight {
    /// f32, f16 or bf16.
    Dense(Tensor),
    /// A GGML block format.
    Quantized(Arc<QTensor>),
}

/// Named tensors of a checkpoint. The loaders implement it; a test can, too.
pub trait WeightSource {
    /// What errors call the checkpoint: its path.
    fn place(&self) -> String;

    /// Whether the checkpoint has a tensor of this name.
    fn contains(&self, name: &str) -> bool;

    /// A tensor of the given shape, dequantised if need be, as `dtype` on the device of the
    /// source.
    ///
    /// # Errors
    /// [`Error::Missing`](crate::Error::Missing), [`Error::Shape`](crate::Error::Shape), or
    /// what reading the file answers.
    fn tensor(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor>;

    /// A weight matrix `[out, inp]`: quantised if it is stored so and the source was not told
    /// to dequantise, else dense in the compute dtype of the source.
    ///
    /// # Errors
    /// As [`WeightSource::tensor`].
    fn linear(&self, name: &str, out: usize, inp: usize) -> Result<LinearWeight>;
}
