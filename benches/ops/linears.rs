//! Linear layers, ours and candle's, at several numbers of rows.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::Result;
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_paged_attn::models::{Linear, LinearWeight};
use criterion::{Bencher, Criterion};

/// `(out, inp)`. candle has faster products of Q8_0 for rows of whole 256, and the K formats are
/// for these alone.
const SHAPES: [(usize, usize); 2] = [(2048, 2048), (1536, 576)];
const ROWS: [usize; 5] = [1, 4, 16, 64, 512];

/// Bytes of the layers that are run in turn, so that none is in a cache when its turn comes, as
/// in a model.
const BYTES: usize = 160 << 20;

const WEIGHTS: [(&str, Stored); 7] = [
    ("f32", Stored::Dense(DType::F32)),
    ("bf16", Stored::Dense(DType::BF16)),
    ("Q8_0", Stored::Blocks(GgmlDType::Q8_0)),
    ("Q4_0", Stored::Blocks(GgmlDType::Q4_0)),
    ("Q4_1", Stored::Blocks(GgmlDType::Q4_1)),
    ("Q4_K", Stored::Blocks(GgmlDType::Q4K)),
    ("Q6_K", Stored::Blocks(GgmlDType::Q6K)),
];

#[derive(Clone, Copy)]
enum Stored {
    Dense(DType),
    Blocks(GgmlDType),
}

pub fn linears(c: &mut Criterion) -> Result<()> {
    for (out, inp) in SHAPES {
        for (name, stored) in WEIGHTS {
            if matches!(stored, Stored::Blocks(kind) if !inp.is_multiple_of(kind.block_size())) {
                continue;
            }
            let full = Tensor::rand(-1f32, 1.0, (out, inp), &Device::Cpu)?;
            let (dtype, weight) = match stored {
                Stored::Dense(dtype) => (dtype, LinearWeight::Dense(full.to_dtype(dtype)?)),
                Stored::Blocks(kind) => {
                    let weight = Arc::new(QTensor::quantize(&full, kind)?);
                    (DType::F32, LinearWeight::Quantized(weight))
                }
            };
            let layers = (BYTES / bytes(stored, out * inp)).max(2);
            let name = |rows: usize, side: &str| {
                format!("linear {name} {out} x {inp}, {rows} rows, {side}")
            };
            let ours = (0..layers)
                .map(|_| Ok(Linear::new(weight.clone(), None, dtype, &Device::Cpu)?))
                .collect::<Result<Vec<_>>>()?;
            for rows in ROWS {
                let x = Tensor::rand(-1f32, 1.0, (rows, inp), &Device::Cpu)?;
                c.bench_function(&name(rows, "ours"), |b| {
                    in_turn(b, &ours, |layer| Ok(layer.forward(&x)?));
                });
            }
            drop(ours);
            let candle = (0..layers)
                .map(|_| Peer::new(&weight))
                .collect::<Result<Vec<_>>>()?;
            for rows in ROWS {
                let x = Tensor::rand(-1f32, 1.0, (rows, inp), &Device::Cpu)?.to_dtype(dtype)?;
                c.bench_function(&name(rows, "candle"), |b| {
                    in_turn(b, &candle, |layer| layer.forward(&x));
                });
            }
        }
    }
    Ok(())
}

fn bytes(stored: Stored, elements: usize) -> usize {
    match stored {
        Stored::Dense(dtype) => elements * dtype.size_in_bytes(),
        Stored::Blocks(kind) => elements / kind.block_size() * kind.type_size(),
    }
}

/// On candle's pool, as in a forward pass.
fn in_turn<T: Sync>(
    b: &mut Bencher<'_>,
    layers: &[T],
    forward: impl Fn(&T) -> Result<Tensor> + Sync,
) {
    let mut turn = 0;
    Device::Cpu.with_context(|| {
        b.iter(|| {
            turn = (turn + 1) % layers.len();
            black_box(forward(&layers[turn]))
        });
    });
}

/// candle's own product.
enum Peer {
    /// `[out, inp]`
    Dense(Tensor),
    Blocks(QMatMul),
}

impl Peer {
    /// A layer with memory of its own.
    fn new(weight: &LinearWeight) -> Result<Self> {
        Ok(match weight {
            LinearWeight::Dense(weight) => Self::Dense(weight.copy()?),
            LinearWeight::Quantized(weight) => {
                let storage = candle_core::quantized::QStorage::from_data(
                    weight.data()?.into_owned().into(),
                    &Device::Cpu,
                    weight.dtype(),
                )?;
                let weight = QTensor::new(storage, weight.shape())?;
                Self::Blocks(QMatMul::QTensor(Arc::new(weight)))
            }
            other => anyhow::bail!("no product of {other:?}"),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Dense(weight) => x.matmul(&weight.t()?)?,
            Self::Blocks(weight) => weight.forward(x)?,
        })
    }
}
