//! A GGUF file as a source of weights.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};

use super::GgufFile;
use crate::{
    error::Result,
    load::{check_dtype, check_shape, missing_tensor},
    models::{LinearWeight, WeightSource},
};

/// The tensors of a GGUF file under their GGUF names.
#[derive(Debug)]
pub struct GgufWeights {
    file: GgufFile,
    device: Device,
    dtype: Option<DType>,
}

impl GgufWeights {
    /// Weights on `device`. Without a `dtype` quantised matrices stay quantised and the others
    /// become f32; with one all are dequantised to it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a dtype other than f32,
    /// f16, bf16.
    pub fn new(file: GgufFile, dtype: Option<DType>, device: &Device) -> Result<Self> {
        Ok(Self {
            file,
            device: device.clone(),
            dtype: dtype.map(check_dtype).transpose()?,
        })
    }

    /// The file.
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    /// A matrix as it is stored, or dense: without blocks, or where a dtype is asked for.
    fn settle(&self, stored: QTensor) -> Result<LinearWeight> {
        let quantised = !matches!(
            stored.dtype(),
            GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16
        );
        if quantised && self.dtype.is_none() {
            return Ok(LinearWeight::Quantized(Arc::new(stored)));
        }
        let dense = stored.dequantize(&self.device)?;
        Ok(LinearWeight::Dense(
            dense.to_dtype(self.dtype.unwrap_or(DType::F32))?,
        ))
    }
}

impl WeightSource for GgufWeights {
    fn place(&self) -> String {
        self.file.place()
    }

    fn contains(&self, name: &str) -> bool {
        self.file.tensor_shape(name).is_some()
    }

    fn names(&self) -> Vec<&str> {
        self.file.tensor_names().collect()
    }

    fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        match self.file.tensor_shape(name) {
            Some(got) => check_shape(name, &self.place(), shape, got),
            None => Err(missing_tensor(name, self.place())),
        }
    }

    fn tensor(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.check(name, shape)?;
        let stored = self.file.tensor(name, &self.device)?;
        Ok(stored.dequantize(&self.device)?.to_dtype(dtype)?)
    }

    fn linear(&self, name: &str, out: usize, inp: usize) -> Result<LinearWeight> {
        self.check(name, &[out, inp])?;
        self.settle(self.file.tensor(name, &self.device)?)
    }

    fn stacked(&self, name: &str, count: usize, out: usize, inp: usize) -> Result<LinearWeight> {
        self.check(name, &[count, out, inp])?;
        self.settle(self.file.flattened(name, &self.device)?)
    }
}
