//! Rotary position embedding at arbitrary positions.
//!
//! Angles are computed per step from f64 frequencies for just the positions of the step, and
//! rounded to f32 once: exact at any position, no table to build for a context of 131,072
//! tokens, and nothing that a 16-bit model could round. A step of 512 rows and head dimension
//! 64 takes 16,384 sines, half a millisecond, once for all layers.

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::rowwise::{Element, Rows, build_rows, with_adjacent_columns};
use super::spec::{RopePairs, RopeScaling, RopeSpec};

/// The frequencies of one [`RopeSpec`].
#[derive(Debug, Clone)]
pub(super) struct Rope {
    /// Radians per position of each pair, `[dim / 2]`.
    frequencies: Vec<f64>,
    pairs: RopePairs,
}

/// Cosine and sine of every angle of one step.
#[derive(Debug, Clone)]
pub(super) struct Angles {
    /// f32 `[rows, dim / 2]`.
    cos: Tensor,
    /// f32 `[rows, dim / 2]`.
    sin: Tensor,
    pairs: RopePairs,
}

impl Rope {
    /// `divisors`, `[dim / 2]`, divide the frequencies on top of the spec's own scaling.
    pub(super) fn new(spec: &RopeSpec, divisors: Option<&[f32]>) -> Self {
        let frequencies = (0..spec.dim / 2)
            .map(|i| {
                let plain = spec.base.powf(-2.0 * i as f64 / spec.dim as f64);
                let divisor = divisors
                    .and_then(|divisors| divisors.get(i))
                    .map_or(1.0, |&divisor| f64::from(divisor));
                scaled(plain, spec.scaling) / divisor
            })
            .collect();
        Self {
            frequencies,
            pairs: spec.pairs,
        }
    }

    /// The angles of rows at `positions`.
    pub(super) fn angles(&self, positions: &[u32], device: &Device) -> Result<Angles> {
        let shape = (positions.len(), self.frequencies.len());
        let (sin, cos): (Vec<f32>, Vec<f32>) = positions
            .iter()
            .flat_map(|&position| {
                self.frequencies
                    .iter()
                    .map(move |frequency| f64::from(position) * frequency)
            })
            .map(|angle| {
                let (sin, cos) = angle.sin_cos();
                (sin as f32, cos as f32)
            })
            .unzip();
        Ok(Angles {
            cos: Tensor::from_vec(cos, shape, device)?,
            sin: Tensor::from_vec(sin, shape, device)?,
            pairs: self.pairs,
        })
    }
}

fn scaled(frequency: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            let turns = original_context as f64 * frequency / std::f64::consts::TAU;
            let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            let keep = keep.clamp(0.0, 1.0);
            frequency * (keep + (1.0 - keep) / factor)
        }
    }
}

impl Angles {
    /// Turns the heads of x `[rows, heads * dim]` (rows at any stride), row `r` by the angles
    /// of row `r`; elements of a head past the rope dimension pass through. The result is
    /// contiguous, `[rows, heads, dim]`, of x's dtype; the arithmetic is in f32.
    pub(super) fn apply(&self, x: &Tensor, heads: usize) -> Result<Tensor> {
        if x.device().is_cpu() {
            let op = Rotate {
                heads,
                pairs: self.pairs,
            };
            return with_adjacent_columns(x)?.apply_op3_no_bwd(&self.cos, &self.sin, &op);
        }
        self.apply_portable(x, heads)
    }

    /// [`Self::apply`] from candle's ops, for devices without an op of ours.
    fn apply_portable(&self, x: &Tensor, heads: usize) -> Result<Tensor> {
        let (rows, columns) = x.dims2()?;
        let dim = columns / heads;
        let turned_dim = 2 * self.cos.dim(1)?;
        // Each row is a batch entry of one token, so that each has angles of its own.
        let x32 = x.to_dtype(DType::F32)?.reshape((rows, heads, 1, dim))?;
        let cos = self.cos.unsqueeze(1)?;
        let sin = self.sin.unsqueeze(1)?;
        let turn = match self.pairs {
            RopePairs::Halves => candle_nn::rotary_emb::rope,
            RopePairs::Neighbours => candle_nn::rotary_emb::rope_i,
        };
        let turned = turn(&x32.narrow(3, 0, turned_dim)?.contiguous()?, &cos, &sin)?;
        let whole = if turned_dim == dim {
            turned
        } else {
            let rest = x32.narrow(3, turned_dim, dim - turned_dim)?;
            Tensor::cat(&[&turned, &rest], 3)?
        };
        whole.reshape((rows, heads, dim))?.to_dtype(x.dtype())
    }
}

struct Rotate {
    heads: usize,
    pairs: RopePairs,
}

impl CustomOp3 for Rotate {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        cos: &CpuStorage,
        cos_layout: &Layout,
        sin: &CpuStorage,
        sin_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let cos = Rows::new(cos, cos_layout)?;
        let sin = Rows::new(sin, sin_layout)?;
        let out = match x {
            CpuStorage::F16(_) => self.run(&Rows::<f16>::new(x, x_layout)?, x_layout, &cos, &sin),
            CpuStorage::BF16(_) => self.run(&Rows::<bf16>::new(x, x_layout)?, x_layout, &cos, &sin),
            _ => self.run(&Rows::<f32>::new(x, x_layout)?, x_layout, &cos, &sin),
        }?;
        let (rows, columns) = x_layout.shape().dims2()?;
        Ok((out, (rows, self.heads, columns / self.heads).into()))
    }
}

impl Rotate {
    fn run<T: Element>(
        &self,
        x: &Rows<'_, T>,
        x_layout: &Layout,
        cos: &Rows<'_, f32>,
        sin: &Rows<'_, f32>,
    ) -> Result<CpuStorage> {
        let (rows, columns) = x_layout.shape().dims2()?;
        let dim = columns / self.heads;
        Ok(build_rows(rows, columns, |row, out: &mut [T]| {
            let (cos, sin) = (cos.row(row), sin.row(row));
            let heads = x.row(row).chunks_exact(dim).zip(out.chunks_exact_mut(dim));
            for (x, out) in heads {
                match self.pairs {
                    RopePairs::Halves => turn_halves(x, out, cos, sin),
                    RopePairs::Neighbours => turn_neighbours(x, out, cos, sin),
                }
            }
        }))
    }
}

fn turn<T: Element>(a: T, b: T, cos: f32, sin: f32) -> (T, T) {
    let (a, b) = (a.widen(), b.widen());
    (T::narrow(a * cos - b * sin), T::narrow(a * sin + b * cos))
}

fn turn_halves<T: Element>(x: &[T], out: &mut [T], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (x, x_rest) = x.split_at(2 * half);
    let (out, out_rest) = out.split_at_mut(2 * half);
    out_rest.copy_from_slice(x_rest);
    let (x_low, x_high) = x.split_at(half);
    let (out_low, out_high) = out.split_at_mut(half);
    for i in 0..half {
        (out_low[i], out_high[i]) = turn(x_low[i], x_high[i], cos[i], sin[i]);
    }
}

fn turn_neighbours<T: Element>(x: &[T], out: &mut [T], cos: &[f32], sin: &[f32]) {
    let (x, x_rest) = x.split_at(2 * cos.len());
    let (out, out_rest) = out.split_at_mut(2 * cos.len());
    out_rest.copy_from_slice(x_rest);
    let pairs = x.chunks_exact(2).zip(out.chunks_exact_mut(2));
    for ((x, out), (&cos, &sin)) in pairs.zip(cos.iter().zip(sin)) {
        (out[0], out[1]) = turn(x[0], x[1], cos, sin);
    }
}
