//! Linear layers over dense and GGML-quantised weights.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use rayon::prelude::*;

use super::weights::LinearWeight;
use crate::error::{Error, Result};

const OP: &str = "linear";

/// `x @ weightᵀ + bias`.
///
/// It computes the same function at any number of rows: a row alone equals the same row of a
/// batch within the rounding of f32 sums. Dense products run in the dtype of the weight, with
/// one exception: candle has no bf16 product on a CPU, so there bf16 weights are widened to
/// f32 once, at load, at twice the memory. Quantised products round the activations per block
/// as candle's [`QMatMul`] does, from f32.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

#[derive(Debug, Clone)]
enum Weight {
    /// `[out, in]`.
    Dense(Tensor),
    Quantized(QMatMul),
}

impl Linear {
    /// A layer with `weight` `[out, in]` and `bias` `[out]`, dense tensors in any float dtype
    /// and on any device; they are brought to `dtype` and `device`.
    ///
    /// # Errors
    /// [`Error::Device`] for a quantised weight on another device; what candle answers.
    pub fn new(
        weight: LinearWeight,
        bias: Option<Tensor>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let product = product_dtype(dtype, device);
        let (weight, bias_dtype) = match settle(weight, product, device)? {
            LinearWeight::Dense(weight) => (Weight::Dense(weight), product),
            // Not `QMatMul::from_arc`, which an environment variable can turn into another
            // function.
            LinearWeight::Quantized(weight) => {
                (Weight::Quantized(QMatMul::QTensor(weight)), DType::F32)
            }
        };
        let bias = bias
            .map(|bias| bias.to_device(device)?.to_dtype(bias_dtype))
            .transpose()?;
        Ok(Self { weight, bias })
    }

    /// x `[rows, in]` to `[rows, out]`, of x's dtype.
    ///
    /// # Errors
    /// What candle answers, for a wrong shape or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.weight {
            Weight::Dense(weight) => dense(&x.to_dtype(weight.dtype())?, weight)?,
            Weight::Quantized(weight) => weight.forward(&x.to_dtype(DType::F32)?.contiguous()?)?,
        };
        let y = match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        Ok(y.to_dtype(x.dtype())?)
    }
}

/// Rows up to which a CPU takes the product from the other side.
const FEW_ROWS: usize = 64;

/// `x @ weightᵀ` of x `[rows, in]` and weight `[out, in]`.
///
/// On a CPU a few rows are computed as `(weight @ xᵀ)ᵀ`: the `gemm` crate then reads the
/// weight where it lies and does not repack it, which is 2 to 4 times as fast from 2 rows up.
fn dense(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    let rows = x.dim(0)?;
    if rows > FEW_ROWS || !x.device().is_cpu() || x.dtype() != DType::F32 {
        return x.matmul(&weight.t()?);
    }
    if rows == 1 {
        return one_row(x, weight);
    }
    weight.matmul(&x.t()?)?.t()?.contiguous()
}

/// Weights of a piece at least, or waking a thread costs more than it saves.
const PIECE: usize = 1 << 17;
/// Pieces per thread at most: a thread that is held up then leaves some to the others.
const PIECES_PER_THREAD: usize = 2;

/// [`dense`] of a single row. The product is a pass over the weight, which `gemm` makes on one
/// thread; here each piece of the weight's rows is such a pass.
fn one_row(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    let (out, _) = weight.dims2()?;
    let most = rayon::current_num_threads() * PIECES_PER_THREAD;
    let pieces = (weight.elem_count() / PIECE).clamp(1, most);
    let step = out.div_ceil(pieces);
    let product = |start: usize| {
        let rows = step.min(out - start);
        x.matmul(&weight.narrow(0, start, rows)?.t()?)
    };
    if pieces == 1 {
        return product(0);
    }
    let starts: Vec<usize> = (0..out).step_by(step).collect();
    let products = starts
        .into_par_iter()
        .map(product)
        .collect::<candle_core::Result<Vec<_>>>()?;
    Tensor::cat(&products, 1)
}

/// The dtype in which dense products of a model in `dtype` run.
fn product_dtype(dtype: DType, device: &Device) -> DType {
    match dtype {
        DType::BF16 if device.is_cpu() => DType::F32,
        other => other,
    }
}

/// Brings a weight to its final form: dense tensors to `dtype` and `device`, and what
/// candle's quantised product does not take to dense ones.
pub(super) fn settle(weight: LinearWeight, dtype: DType, device: &Device) -> Result<LinearWeight> {
    Ok(match weight {
        LinearWeight::Dense(weight) => {
            LinearWeight::Dense(weight.to_device(device)?.to_dtype(dtype)?)
        }
        LinearWeight::Quantized(weight) if !has_quantized_product(&weight)? => {
            LinearWeight::Dense(weight.dequantize(device)?.to_dtype(dtype)?)
        }
        LinearWeight::Quantized(weight) if weight.device().location() != device.location() => {
            return Err(Error::Device {
                op: OP,
                tensor: "weight",
                expected: device.location(),
                got: weight.device().location(),
            });
        }
        quantized @ LinearWeight::Quantized(_) => quantized,
    })
}

/// Plain floats in GGML blocks have none, and three of the block formats only for an even
/// number of blocks in a row: with debug assertions candle panics on others.
fn has_quantized_product(weight: &QTensor) -> Result<bool> {
    let (_, columns) = weight.shape().dims2()?;
    Ok(match weight.dtype() {
        GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16 => false,
        kind @ (GgmlDType::Q4_1 | GgmlDType::Q5_0 | GgmlDType::Q5_1) => {
            columns.is_multiple_of(2 * kind.block_size())
        }
        _ => true,
    })
}

/// One matrix of [`Projections`] before it is fused.
pub(super) struct Part {
    pub(super) weight: LinearWeight,
    pub(super) bias: Option<Tensor>,
    pub(super) out: usize,
}

/// `N` linear layers of one input. Neighbours of one weight type are stored as one matrix:
/// fewer, larger products keep the threads busier and quantise the activations once.
#[derive(Debug, Clone)]
pub(super) struct Projections<const N: usize> {
    /// Each product and the widths of the outputs that lie side by side in it.
    products: Vec<(Linear, Vec<usize>)>,
}

impl<const N: usize> Projections<N> {
    pub(super) fn new(parts: [Part; N], dtype: DType, device: &Device) -> Result<Self> {
        let product = product_dtype(dtype, device);
        let mut settled = Vec::with_capacity(N);
        for part in parts {
            let weight = settle(part.weight, product, device)?;
            settled.push(Part { weight, ..part });
        }
        let products = settled
            .chunk_by(|a, b| {
                ggml_dtype(&a.weight) == ggml_dtype(&b.weight)
                    && a.bias.is_some() == b.bias.is_some()
            })
            .map(|run| {
                let weight = stack(run, device)?;
                let biases: Vec<&Tensor> = run.iter().flat_map(|part| &part.bias).collect();
                let bias = match *biases {
                    [] => None,
                    _ => Some(Tensor::cat(&biases, 0)?),
                };
                let widths = run.iter().map(|part| part.out).collect();
                Ok((Linear::new(weight, bias, dtype, device)?, widths))
            })
            .collect::<Result<_>>()?;
        Ok(Self { products })
    }

    /// x `[rows, in]` to the `N` outputs `[rows, out]`, of x's dtype; outputs of one product
    /// are views of it, their rows further apart than they are wide.
    pub(super) fn forward(&self, x: &Tensor) -> Result<[Tensor; N]> {
        let mut outputs = Vec::with_capacity(N);
        for (product, widths) in &self.products {
            let y = product.forward(x)?;
            let mut start = 0;
            for &width in widths {
                outputs.push(y.narrow(1, start, width)?);
                start += width;
            }
        }
        outputs
            .try_into()
            .map_err(|outputs: Vec<Tensor>| Error::Invariant {
                op: OP,
                what: format!("{} outputs of {N} projections", outputs.len()),
            })
    }
}

/// The block format, `None` for a dense weight.
fn ggml_dtype(weight: &LinearWeight) -> Option<GgmlDType> {
    match weight {
        LinearWeight::Dense(_) => None,
        LinearWeight::Quantized(weight) => Some(weight.dtype()),
    }
}

/// One weight above the other: `[sum of out, in]`. All are of one kind.
fn stack(parts: &[Part], device: &Device) -> Result<LinearWeight> {
    if let [single] = parts {
        return Ok(single.weight.clone());
    }
    let mut dense = Vec::new();
    let mut quantized: Vec<&Arc<QTensor>> = Vec::new();
    for part in parts {
        match &part.weight {
            LinearWeight::Dense(weight) => dense.push(weight),
            LinearWeight::Quantized(weight) => quantized.push(weight),
        }
    }
    let Some(first) = quantized.first() else {
        return Ok(LinearWeight::Dense(Tensor::cat(&dense, 0)?));
    };
    // Rows of blocks lie one after the other, so stacking matrices is appending their bytes.
    let (_, columns) = first.shape().dims2()?;
    let mut rows = 0;
    let mut bytes = Vec::new();
    for weight in &quantized {
        rows += weight.shape().dims2()?.0;
        bytes.extend_from_slice(&weight.data()?);
    }
    let storage = QStorage::from_data(Cow::Owned(bytes), device, first.dtype())?;
    let stacked = QTensor::new(storage, (rows, columns))?;
    Ok(LinearWeight::Quantized(Arc::new(stacked)))
}

/// The token embedding, dense or quantised.
#[derive(Debug, Clone)]
pub(super) struct Embedding {
    weight: LinearWeight,
    dtype: DType,
}

impl Embedding {
    /// An embedding with rows of `weight` `[vocab, hidden]`, looked up as `dtype`.
    pub(super) fn new(weight: LinearWeight, dtype: DType, device: &Device) -> Result<Self> {
        Ok(Self {
            weight: settle(weight, dtype, device)?,
            dtype,
        })
    }

    /// ids u32 `[rows]` to `[rows, hidden]`. Quantised rows are dequantised as they are read.
    pub(super) fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let rows = match &self.weight {
            LinearWeight::Dense(weight) => weight.index_select(ids, 0)?,
            LinearWeight::Quantized(weight) => weight.embedding(ids)?,
        };
        Ok(rows.to_dtype(self.dtype)?)
    }

    /// The head of a model that has none of its own. It shares the memory of the embedding,
    /// unless the product needs another dtype.
    pub(super) fn tied_head(&self, device: &Device) -> Result<Linear> {
        Linear::new(self.weight.clone(), None, self.dtype, device)
    }
}
