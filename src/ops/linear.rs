//! `PackedLinear`: a linear layer's weight in the layout of the CPU's kernels.

use std::fmt;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Storage, Tensor};

use super::cpu::linear::{Format, Packed, Stored, SuperFormat};
use crate::error::{Error, Result};

const OP: &str = "linear";

/// A weight matrix `[out, inp]` for products on a CPU: f32, f16, bf16, Q8_0, Q4_0, Q4_1, Q4_K,
/// Q5_K or Q6_K, as many bits as it was stored with (1/8 bit more for Q4_K and Q5_K), plus zeros
/// that fill `out` up to a multiple of 32 (of 16 for the block formats).
///
/// A row has the same bits alone and in any batch. Sums are in f32; the block formats round
/// the activations to 8 bits per block of 32, the K formats per block of 256, as ggml does
/// (candle takes 256 at a time for Q8_0 too on some machines). Cloning shares the weights.
#[derive(Clone)]
pub(crate) struct PackedLinear {
    packed: Arc<Packed>,
}

impl fmt::Debug for PackedLinear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackedLinear")
            .field("out", &self.packed.out())
            .field("inp", &self.packed.inp())
            .finish_non_exhaustive()
    }
}

impl PackedLinear {
    /// Whether [`Self::from_quantized`] takes a format.
    pub(crate) fn takes(dtype: GgmlDType) -> bool {
        stored(dtype, &[]).is_some()
    }

    /// Packs dense matrices `[rows, inp]` of one dtype, one above the other. Costs a copy; the
    /// originals are not needed afterwards.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`] or [`Error::Device`] for a matrix that does not fit
    /// the first one, or is not f32, f16 or bf16 on a CPU; [`Error::Empty`] for none.
    pub(crate) fn from_dense(parts: &[&Tensor]) -> Result<Self> {
        let [first, ..] = parts else {
            return Err(Error::Empty {
                op: OP,
                what: "list of weights",
            });
        };
        let (mut out, mut inp) = (0, 0);
        for (number, part) in parts.iter().enumerate() {
            let (rows, columns) = dims2("weight", part.dims())?;
            if number > 0 && columns != inp {
                return Err(shape("weight", format!("[out, {inp}]"), part.dims()));
            }
            if part.dtype() != first.dtype()
                || !matches!(part.dtype(), DType::F32 | DType::F16 | DType::BF16)
            {
                return Err(Error::Dtype {
                    op: OP,
                    tensor: "weight",
                    expected: "F32, F16 or BF16, one for all parts".into(),
                    got: part.dtype(),
                });
            }
            on_cpu("weight", part)?;
            (out, inp) = (out + rows, columns);
        }
        let contiguous = parts
            .iter()
            .map(|part| part.contiguous())
            .collect::<candle_core::Result<Vec<_>>>()?;
        let guards: Vec<_> = contiguous.iter().map(Tensor::storage_and_layout).collect();
        let stored = guards
            .iter()
            .map(|(storage, layout)| dense(storage, layout))
            .collect::<Option<Vec<_>>>();
        Self::new(stored.as_deref(), out, inp)
    }

    /// Packs matrices of one block format, one above the other.
    ///
    /// # Errors
    /// As [`Self::from_dense`]; [`Error::Unsupported`] for a format that [`Self::takes`] does
    /// not take.
    pub(crate) fn from_quantized(parts: &[&QTensor]) -> Result<Self> {
        if parts.is_empty() {
            return Err(Error::Empty {
                op: OP,
                what: "list of weights",
            });
        }
        let (mut out, mut inp) = (0, 0);
        let mut bytes = Vec::with_capacity(parts.len());
        for (number, part) in parts.iter().enumerate() {
            let (rows, columns) = dims2("weight", part.shape().dims())?;
            if part.dtype() != parts[0].dtype() || !Self::takes(part.dtype()) {
                return Err(Error::Unsupported {
                    what: "block format of a packed weight",
                    got: format!("{:?}", part.dtype()),
                    supported: "Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K, one for all parts".into(),
                });
            }
            if number > 0 && columns != inp {
                let expected = format!("[out, {inp}]");
                return Err(shape("weight", expected, part.shape().dims()));
            }
            bytes.push((part.dtype(), part.data()?));
            (out, inp) = (out + rows, columns);
        }
        let stored = bytes
            .iter()
            .map(|(dtype, bytes)| stored(*dtype, bytes))
            .collect::<Option<Vec<_>>>();
        Self::new(stored.as_deref(), out, inp)
    }

    fn new(stored: Option<&[Stored<'_>]>, out: usize, inp: usize) -> Result<Self> {
        let packed = stored.and_then(|stored| Packed::new(stored, out, inp));
        match packed {
            Some(packed) => Ok(Self {
                packed: Arc::new(packed),
            }),
            None => Err(Error::Invariant {
                op: OP,
                what: format!("parts of a weight [{out}, {inp}] do not fit together"),
            }),
        }
    }

    /// `x @ weightᵀ` of x f32 `[rows, inp]`, any strides, to f32 `[rows, out]`. Cost: one pass
    /// over the weight for a few rows; nothing is allocated but the result and, once per
    /// thread, room for rounded activations. Runs on the threads of the current rayon pool.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`] or [`Error::Device`].
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inp = self.packed.inp();
        match x.dims() {
            [_, columns] if *columns == inp => {}
            got => return Err(shape("x", format!("[rows, {inp}]"), got)),
        }
        if x.dtype() != DType::F32 {
            return Err(Error::Dtype {
                op: OP,
                tensor: "x",
                expected: "F32".into(),
                got: x.dtype(),
            });
        }
        on_cpu("x", x)?;
        Ok(x.contiguous()?.apply_op1_no_bwd(self)?)
    }

    /// The rows of the weight that `ids` name, f32 `[ids.len(), inp]`: an embedding.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`].
    pub(crate) fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let (out, inp) = (self.packed.out(), self.packed.inp());
        if let Some(&token) = ids.iter().find(|&&id| id as usize >= out) {
            return Err(Error::TokenOutOfRange {
                op: OP,
                token,
                vocab: out,
            });
        }
        let mut rows = vec![0.0; ids.len() * inp];
        if inp > 0 {
            for (row, &id) in rows.chunks_exact_mut(inp).zip(ids) {
                self.packed.row(id as usize, row);
            }
        }
        let shape = (ids.len(), inp);
        Ok(Tensor::from_vec(rows, shape, &candle_core::Device::Cpu)?)
    }
}

impl CustomOp1 for PackedLinear {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, _) = layout.shape().dims2()?;
        let (start, end) = match layout.contiguous_offsets() {
            Some(range) => range,
            None => candle_core::bail!("x is not contiguous: {layout:?}"),
        };
        let out = self.packed.product(&x.as_slice::<f32>()?[start..end]);
        Ok((CpuStorage::F32(out), (rows, self.packed.out()).into()))
    }
}

/// Blocks of a format, `None` where there is no kernel for it.
fn stored(dtype: GgmlDType, bytes: &[u8]) -> Option<Stored<'_>> {
    Some(match dtype {
        GgmlDType::Q8_0 => Stored::Blocks(Format::Q8_0, bytes),
        GgmlDType::Q4_0 => Stored::Blocks(Format::Q4_0, bytes),
        GgmlDType::Q4_1 => Stored::Blocks(Format::Q4_1, bytes),
        GgmlDType::Q4K => Stored::Superblocks(SuperFormat::Q4K, bytes),
        GgmlDType::Q5K => Stored::Superblocks(SuperFormat::Q5K, bytes),
        GgmlDType::Q6K => Stored::Superblocks(SuperFormat::Q6K, bytes),
        _ => return None,
    })
}

/// The elements of a contiguous tensor, `None` if it is another kind of tensor than checked.
fn dense<'a>(storage: &'a Storage, layout: &Layout) -> Option<Stored<'a>> {
    let Storage::Cpu(storage) = storage else {
        return None;
    };
    let (start, end) = layout.contiguous_offsets()?;
    match storage {
        CpuStorage::F32(data) => data.get(start..end).map(Stored::F32),
        CpuStorage::F16(data) => data.get(start..end).map(Stored::F16),
        CpuStorage::BF16(data) => data.get(start..end).map(Stored::BF16),
        _ => None,
    }
}

fn dims2(tensor: &str, dims: &[usize]) -> Result<(usize, usize)> {
    match *dims {
        [out, inp] if inp > 0 => Ok((out, inp)),
        _ => Err(shape(tensor, "[out, inp]".into(), dims)),
    }
}

fn shape(tensor: &str, expected: String, got: &[usize]) -> Error {
    Error::Shape {
        op: OP,
        tensor: tensor.into(),
        expected,
        got: got.to_vec(),
    }
}

fn on_cpu(name: &'static str, tensor: &Tensor) -> Result<()> {
    match tensor.device().location() {
        candle_core::DeviceLocation::Cpu => Ok(()),
        got => Err(Error::Device {
            op: OP,
            tensor: name,
            expected: candle_core::DeviceLocation::Cpu,
            got,
        }),
    }
}
