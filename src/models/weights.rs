//! Where a decoder's weights come from.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{QStorage, QTensor};
use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};

/// The weight matrix of a linear layer, `[out, in]`, as the checkpoint stores it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LinearWeight {
    /// f32, f16 or bf16.
    Dense(Tensor),
    /// A GGML block format.
    Quantized(Arc<QTensor>),
}

impl LinearWeight {
    /// `[out, in]`.
    pub(super) fn dims(&self) -> &[usize] {
        match self {
            Self::Dense(weight) => weight.dims(),
            Self::Quantized(weight) => weight.shape().dims(),
        }
    }

    /// Rows `start` to `start + len` as a weight of their own. Costs a copy of the bytes of a
    /// quantised one.
    pub(super) fn rows(&self, start: usize, len: usize, device: &Device) -> Result<Self> {
        match self {
            Self::Dense(weight) => Ok(Self::Dense(weight.narrow(0, start, len)?)),
            Self::Quantized(weight) => {
                let (rows, columns) = weight.shape().dims2()?;
                let data = weight.data()?;
                // Rows of blocks lie one after the other.
                let row = data.len() / rows;
                let bytes =
                    data.get(start * row..(start + len) * row)
                        .ok_or_else(|| Error::Invariant {
                            op: "load_model",
                            what: format!("rows {start} to {} of {rows}", start + len),
                        })?;
                let bytes = Cow::Owned(bytes.to_vec());
                let storage = QStorage::from_data(bytes, device, weight.dtype())?;
                let weight = QTensor::new(storage, (len, columns))?;
                Ok(Self::Quantized(Arc::new(weight)))
            }
        }
    }
}

/// Named tensors of a checkpoint. The loaders implement it; a test can, too.
pub trait WeightSource {
    /// What errors call the checkpoint: its path.
    fn place(&self) -> String;

    /// Whether the checkpoint has a tensor of this name.
    fn contains(&self, name: &str) -> bool;

    /// The names of all tensors, in any order; none from a source that cannot tell, of which
    /// nobody then notices a tensor that a model leaves unused.
    fn names(&self) -> Vec<&str> {
        Vec::new()
    }

    /// Checks, without reading it, that a tensor can be read with the given shape. A source
    /// that has only its names to go by finds a wrong shape when it reads the tensor.
    ///
    /// # Errors
    /// As [`WeightSource::tensor`].
    fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        let _ = shape;
        if self.contains(name) {
            return Ok(());
        }
        Err(Error::Missing {
            place: self.place(),
            what: format!("tensor `{name}`"),
        })
    }

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

    /// `count` matrices `[out, inp]` that lie in one tensor `[count, out, inp]`, as one matrix
    /// `[count * out, inp]`. A source of tensors that may be quantised gives its own.
    ///
    /// # Errors
    /// As [`WeightSource::tensor`].
    fn stacked(&self, name: &str, count: usize, out: usize, inp: usize) -> Result<LinearWeight> {
        let dense = self.tensor(name, &[count, out, inp], DType::F32)?;
        Ok(LinearWeight::Dense(dense.reshape((count * out, inp))?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::GgmlDType;

    use super::*;

    #[test]
    fn rows_of_blocks_are_the_rows_of_the_matrix() -> Result<()> {
        let device = Device::Cpu;
        let dense = Tensor::rand(-1f32, 1.0, (7, 256), &device)?;
        for kind in [
            GgmlDType::Q8_0,
            GgmlDType::Q4_1,
            GgmlDType::Q4K,
            GgmlDType::Q6K,
        ] {
            let whole = QTensor::quantize(&dense, kind)?;
            let want = whole
                .dequantize(&device)?
                .narrow(0, 2, 3)?
                .to_vec2::<f32>()?;
            let weight = LinearWeight::Quantized(Arc::new(whole));
            let LinearWeight::Quantized(rows) = weight.rows(2, 3, &device)? else {
                unreachable!("a quantised weight stays one");
            };
            assert_eq!(
                rows.dequantize(&device)?.to_vec2::<f32>()?,
                want,
                "{kind:?}"
            );
            assert!(weight.rows(5, 3, &device).is_err());
        }
        Ok(())
    }
}
