//! Linear layers over dense and GGML-quantised weights.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Tensor};

use super::weights::LinearWeight;
use crate::error::{Error, Result};
use crate::ops::PackedLinear;

const OP: &str = "linear";

/// `x @ weightᵀ + bias`.
///
/// It computes the same function at any number of rows: a row alone equals the same row of a
/// batch within the rounding of f32 sums, and to the bit where the kernels of this crate run
/// (f32, f16, bf16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K and Q6_K on a CPU). There dense weights are
/// kept in their dtype and multiplied in f32, whatever it is; on other devices dense products
/// run in the dtype of the weight. Quantised products round the activations to 8 bits per block,
/// as ggml and candle's [`QMatMul`] do, from f32.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

#[derive(Debug, Clone)]
enum Weight {
    Packed(PackedLinear),
    /// `[out, in]`.
    Dense(Tensor),
    Quantized(QMatMul),
}

impl Weight {
    /// One matrix of settled ones of one kind, one above the other.
    fn new(parts: &[&LinearWeight], device: &Device) -> Result<Self> {
        if let Some(packed) = pack(parts, device)? {
            return Ok(Self::Packed(packed));
        }
        Ok(match stack(parts, device)? {
            LinearWeight::Dense(weight) => Self::Dense(weight),
            // Not `QMatMul::from_arc`, which an environment variable can turn into another
            // function.
            LinearWeight::Quantized(weight) => Self::Quantized(QMatMul::QTensor(weight)),
        })
    }
}

impl Linear {
    /// A layer with `weight` `[out, in]` and `bias` `[out]`, dense tensors in any float dtype
    /// and on any device; they are brought to `dtype` and `device`. On a CPU the weight is
    /// copied into the order of the kernels.
    ///
    /// # Errors
    /// [`Error::Device`] for a quantised weight on another device; [`Error::Shape`] for a
    /// weight that is no matrix, or a bias that is no row of its outputs; what candle answers.
    pub fn new(
        weight: LinearWeight,
        bias: Option<Tensor>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let weight = settle(weight, dtype, device)?;
        let out = weight.dims().first().copied();
        let out = out.as_slice();
        if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != out) {
            return Err(Error::Shape {
                op: OP,
                tensor: "bias".into(),
                expected: format!("{out:?}"),
                got: bias.dims().to_vec(),
            });
        }
        Self::of(Weight::new(&[&weight], device)?, bias, device)
    }

    fn of(weight: Weight, bias: Option<Tensor>, device: &Device) -> Result<Self> {
        let dtype = match &weight {
            Weight::Dense(weight) => weight.dtype(),
            Weight::Packed(_) | Weight::Quantized(_) => DType::F32,
        };
        let bias = bias
            .map(|bias| bias.to_device(device)?.to_dtype(dtype))
            .transpose()?;
        Ok(Self { weight, bias })
    }

    /// x `[rows, in]` to `[rows, out]`, of x's dtype.
    ///
    /// # Errors
    /// [`Error::Shape`] or what candle answers, for a wrong shape or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.weight {
            Weight::Packed(weight) => weight.forward(&x.to_dtype(DType::F32)?)?,
            Weight::Dense(weight) => x.to_dtype(weight.dtype())?.matmul(&weight.t()?)?,
            Weight::Quantized(weight) => weight.forward(&x.to_dtype(DType::F32)?.contiguous()?)?,
        };
        let y = match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        Ok(y.to_dtype(x.dtype())?)
    }
}

/// Settled weights of one kind in the layout of the CPU's kernels, `None` if there is no kernel
/// for them.
fn pack(parts: &[&LinearWeight], device: &Device) -> Result<Option<PackedLinear>> {
    if !device.is_cpu() {
        return Ok(None);
    }
    let (dense, quantized) = by_kind(parts);
    if quantized.is_empty() {
        return PackedLinear::from_dense(&dense).map(Some);
    }
    if dense.is_empty()
        && quantized
            .iter()
            .all(|part| PackedLinear::takes(part.dtype()))
    {
        let parts: Vec<&QTensor> = quantized.iter().map(|part| &***part).collect();
        return PackedLinear::from_quantized(&parts).map(Some);
    }
    Ok(None)
}

fn by_kind<'a>(parts: &[&'a LinearWeight]) -> (Vec<&'a Tensor>, Vec<&'a Arc<QTensor>>) {
    let mut dense = Vec::new();
    let mut quantized = Vec::new();
    for part in parts {
        match part {
            LinearWeight::Dense(weight) => dense.push(weight),
            LinearWeight::Quantized(weight) => quantized.push(weight),
        }
    }
    (dense, quantized)
}

/// Brings a weight to its final form: dense tensors to `dtype` and `device`, and what
/// candle's quantised product does not take to dense ones.
pub(super) fn settle(weight: LinearWeight, dtype: DType, device: &Device) -> Result<LinearWeight> {
    match *weight.dims() {
        [_, inp] if inp > 0 => {}
        ref got => {
            return Err(Error::Shape {
                op: OP,
                tensor: "weight".into(),
                expected: "[out, in]".into(),
                got: got.to_vec(),
            });
        }
    }
    Ok(match weight {
        LinearWeight::Dense(weight) => {
            LinearWeight::Dense(weight.to_device(device)?.to_dtype(dtype)?)
        }
        LinearWeight::Quantized(weight) if !has_quantized_product(&weight, device)? => {
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

/// Plain floats in GGML blocks have none. candle has one for three of the block formats only
/// for an even number of blocks in a row: with debug assertions it panics on others.
fn has_quantized_product(weight: &QTensor, device: &Device) -> Result<bool> {
    let (_, columns) = weight.shape().dims2()?;
    Ok(match weight.dtype() {
        GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16 => false,
        kind if device.is_cpu() && PackedLinear::takes(kind) => true,
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
        let mut settled = Vec::with_capacity(N);
        for part in parts {
            let weight = settle(part.weight, dtype, device)?;
            settled.push(Part { weight, ..part });
        }
        let products = settled
            .chunk_by(|a, b| {
                ggml_dtype(&a.weight) == ggml_dtype(&b.weight)
                    && a.bias.is_some() == b.bias.is_some()
            })
            .map(|run| {
                let weights: Vec<_> = run.iter().map(|part| &part.weight).collect();
                let weight = Weight::new(&weights, device)?;
                let biases: Vec<&Tensor> = run.iter().flat_map(|part| &part.bias).collect();
                let bias = match *biases {
                    [] => None,
                    _ => Some(Tensor::cat(&biases, 0)?),
                };
                let widths = run.iter().map(|part| part.out).collect();
                Ok((Linear::of(weight, bias, device)?, widths))
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
fn stack(parts: &[&LinearWeight], device: &Device) -> Result<LinearWeight> {
    if let [single] = parts {
        return Ok((*single).clone());
    }
    let (dense, quantized) = by_kind(parts);
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
    table: Table,
    dtype: DType,
}

#[derive(Debug, Clone)]
enum Table {
    Stored(LinearWeight),
    /// Shared with the head.
    Packed(PackedLinear),
}

impl Embedding {
    /// An embedding with rows of `weight` `[vocab, hidden]`, looked up as `dtype`.
    pub(super) fn new(weight: LinearWeight, dtype: DType, device: &Device) -> Result<Self> {
        let table = Table::Stored(settle(weight, dtype, device)?);
        Ok(Self { table, dtype })
    }

    /// An embedding, and the head of a model that has none of its own: both are in one memory.
    pub(super) fn with_head(
        weight: LinearWeight,
        dtype: DType,
        device: &Device,
    ) -> Result<(Self, Linear)> {
        let weight = settle(weight, dtype, device)?;
        let head = Linear::of(Weight::new(&[&weight], device)?, None, device)?;
        let table = match &head.weight {
            Weight::Packed(packed) => Table::Packed(packed.clone()),
            Weight::Dense(_) | Weight::Quantized(_) => Table::Stored(weight),
        };
        Ok((Self { table, dtype }, head))
    }

    /// ids u32 `[rows]` to `[rows, hidden]`. Quantised rows are dequantised as they are read.
    pub(super) fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let rows = match &self.table {
            Table::Stored(LinearWeight::Dense(weight)) => weight.index_select(ids, 0)?,
            Table::Stored(LinearWeight::Quantized(weight)) => weight.embedding(ids)?,
            Table::Packed(weight) => weight.rows(&ids.to_vec1()?)?,
        };
        Ok(rows.to_dtype(self.dtype)?)
    }
}
