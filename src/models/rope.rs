//! Rotary position embedding at arbitrary positions.
//!
//! Angles are computed per step from f64 frequencies for just the positions of the step, and
//! rounded to f32 once: exact at any position, no table to build for a context of 131,072
//! tokens, and nothing that a 16-bit model could round. A step of 512 rows and head dimension
//! 64 takes 16,384 sines, half a millisecond, once for all layers.

use std::f64::consts::TAU;

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::rope_spec::{LongRopeDivisors, RopePairs, RopeScaling, RopeSpec};
use crate::ops::rowwise::{Element, Rows, build_rows, with_adjacent_columns};

/// The frequencies of one [`RopeSpec`].
#[derive(Debug, Clone)]
pub(super) struct Rope {
    /// Radians per position of each pair, `[dim / 2]`.
    frequencies: Vec<f64>,
    pairs: RopePairs,
    /// Factor of every cosine and sine.
    factor: f64,
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
    /// The rope of a model that runs up to `context` tokens. `divisors`, `[dim / 2]`, divide
    /// the frequencies on top of the spec's own scaling.
    pub(super) fn new(spec: &RopeSpec, context: usize, divisors: Option<&[f32]>) -> Self {
        let frequencies = (0..spec.dim / 2)
            .map(|i| {
                let divisor = divisors
                    .and_then(|divisors| divisors.get(i))
                    .map_or(1.0, |&divisor| f64::from(divisor));
                scaled(spec, context, i) / divisor
            })
            .collect();
        Self {
            frequencies,
            pairs: spec.pairs,
            factor: match spec.scaling {
                RopeScaling::Yarn {
                    attention_factor, ..
                }
                | RopeScaling::LongRope {
                    attention_factor, ..
                } => attention_factor,
                _ => 1.0,
            },
        }
    }

    /// The angles of rows at `positions`.
    pub(super) fn angles(&self, positions: &[u32], device: &Device) -> Result<Angles> {
        let shape = (positions.len(), self.frequencies.len());
        let (sin, cos): (Vec<f32>, Vec<f32>) = self.table(positions).into_iter().unzip();
        Ok(Angles {
            cos: Tensor::from_vec(cos, shape, device)?,
            sin: Tensor::from_vec(sin, shape, device)?,
            pairs: self.pairs,
        })
    }

    /// Sine and cosine of every angle, position by position.
    pub(super) fn table(&self, positions: &[u32]) -> Vec<(f32, f32)> {
        positions
            .iter()
            .flat_map(|&position| {
                self.frequencies
                    .iter()
                    .map(move |frequency| f64::from(position) * frequency)
            })
            .map(|angle| {
                let (sin, cos) = angle.sin_cos();
                ((sin * self.factor) as f32, (cos * self.factor) as f32)
            })
            .collect()
    }

    /// Frequencies and factor.
    #[cfg(test)]
    pub(super) fn into_parts(self) -> (Vec<f64>, f64) {
        (self.frequencies, self.factor)
    }
}

/// The frequency of pair `i`, without divisors from the checkpoint.
fn scaled(spec: &RopeSpec, context: usize, i: usize) -> f64 {
    let plain = spec.base.powf(-2.0 * i as f64 / spec.dim as f64);
    match &spec.scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear { factor } => plain / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            let turns = *original_context as f64 * plain / TAU;
            let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            blend(plain, *factor, keep)
        }
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            truncate,
            ..
        } => {
            // The number of the pair, as a real one, that makes so many turns.
            let pair_of = |turns: f64| {
                let wavelength = *original_context as f64 / (turns * TAU);
                spec.dim as f64 * wavelength.ln() / (2.0 * spec.base.ln())
            };
            let (mut first, mut last) = (pair_of(*beta_fast), pair_of(*beta_slow));
            if *truncate {
                (first, last) = (first.floor(), last.ceil());
            }
            let first = first.max(0.0);
            let last = last.min(spec.dim as f64 - 1.0);
            // As transformers: without it an empty blend would divide by 0.
            let width = if first == last { 0.001 } else { last - first };
            blend(plain, *factor, 1.0 - (i as f64 - first) / width)
        }
        RopeScaling::LongRope {
            divisors,
            original_context,
            ..
        } => match divisors {
            LongRopeDivisors::Stored => plain,
            LongRopeDivisors::Listed { short, long } => {
                let long_list = context > *original_context;
                plain / if long_list { long[i] } else { short[i] }
            }
        },
        RopeScaling::Proportional { turned, factor } if i < *turned => plain / factor,
        RopeScaling::Proportional { .. } => 0.0,
    }
}

/// Between `frequency / factor`, where `keep` is 0 or less, and `frequency`, where it is 1 or
/// more.
fn blend(frequency: f64, factor: f64, keep: f64) -> f64 {
    let keep = keep.clamp(0.0, 1.0);
    frequency * (keep + (1.0 - keep) / factor)
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
    let (a, b) = (a.to_f32(), b.to_f32());
    (
        T::from_f32(a * cos - b * sin),
        T::from_f32(a * sin + b * cos),
    )
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

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: usize = 131_072;
    const LLAMA3: RopeScaling = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };

    fn spec(dim: usize, pairs: RopePairs, scaling: RopeScaling) -> RopeSpec {
        RopeSpec {
            dim,
            base: 500_000.0,
            pairs,
            scaling,
        }
    }

    /// Frequency `i` written as the formulas of the papers and of transformers have it.
    fn frequency(spec: &RopeSpec, i: usize) -> f64 {
        let plain = 1.0 / spec.base.powf((2 * i) as f64 / spec.dim as f64);
        match spec.scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let wavelength = 2.0 * std::f64::consts::PI / plain;
                let original = original_context as f64;
                if wavelength < original / high_freq_factor {
                    plain
                } else if wavelength > original / low_freq_factor {
                    plain / factor
                } else {
                    let smooth = (original / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * plain / factor + smooth * plain
                }
            }
            ref other => unreachable!("{other:?} is tested in families"),
        }
    }

    /// Values from -3 to 3 without a pattern.
    fn values(rows: usize, columns: usize) -> Result<Tensor> {
        let values = (0..rows * columns).map(|i| 3.0 * (i as f32 * 12.9898).sin());
        Tensor::from_iter(values, &Device::Cpu)?.reshape((rows, columns))
    }

    /// The rotation of one head in f64.
    fn turned(x: &[f64], spec: &RopeSpec, divisors: &[f32], position: u32) -> Vec<f64> {
        let mut out = x.to_vec();
        for (i, &divisor) in divisors[..spec.dim / 2].iter().enumerate() {
            let angle = f64::from(position) * frequency(spec, i) / f64::from(divisor);
            let (a, b) = match spec.pairs {
                RopePairs::Halves => (i, i + spec.dim / 2),
                RopePairs::Neighbours => (2 * i, 2 * i + 1),
            };
            out[a] = x[a] * angle.cos() - x[b] * angle.sin();
            out[b] = x[a] * angle.sin() + x[b] * angle.cos();
        }
        out
    }

    #[test]
    fn c18_angles_at_position_15962_are_f64_rounded_once() -> Result<()> {
        for scaling in [
            RopeScaling::None,
            RopeScaling::Linear { factor: 4.0 },
            LLAMA3,
        ] {
            let spec = spec(128, RopePairs::Halves, scaling);
            let positions = [15_962, 0, 131_071];
            let angles = Rope::new(&spec, CONTEXT, None).angles(&positions, &Device::Cpu)?;
            assert_eq!(angles.cos.dtype(), DType::F32);
            let (cos, sin) = (angles.cos.to_vec2::<f32>()?, angles.sin.to_vec2::<f32>()?);
            for (row, position) in positions.into_iter().enumerate() {
                for i in 0..64 {
                    let angle = f64::from(position) * frequency(&spec, i);
                    // Half a unit in the last place, and what f64 loses on an angle this large.
                    let close = |got: f32, want: f64| {
                        (f64::from(got) - want).abs() <= f64::from(f32::EPSILON) / 4.0 + 1e-9
                    };
                    assert!(close(cos[row][i], angle.cos()), "cos {position} {i}");
                    assert!(close(sin[row][i], angle.sin()), "sin {position} {i}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn c18_a_bf16_row_is_turned_in_f32() -> Result<()> {
        let spec = spec(64, RopePairs::Halves, RopeScaling::None);
        let angles = Rope::new(&spec, CONTEXT, None).angles(&[15_962], &Device::Cpu)?;
        let x = values(1, 128)?.to_dtype(DType::BF16)?;
        let got = angles.apply(&x, 2)?;
        assert_eq!(got.dtype(), DType::BF16);
        let got = got.to_dtype(DType::F64)?.to_vec3::<f64>()?;
        let x = x.to_dtype(DType::F64)?.to_vec2::<f64>()?;
        for head in 0..2 {
            let want = turned(&x[0][head * 64..][..64], &spec, &[1.0; 32], 15_962);
            for (got, want) in got[0][head].iter().zip(want) {
                // One rounding to the 8 bits of bf16 of a value that is exact to f32.
                assert!(
                    (got - want).abs() <= want.abs() / 256.0 + 1e-6,
                    "{got} {want}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn turns_strided_rows_at_any_position_like_f64() -> Result<()> {
        let divisors: Vec<f32> = (0..16).map(|i| 1.0 + i as f32 / 4.0).collect();
        for (rows, heads, dim, rope_dim, pairs, scaling) in [
            (5, 3, 32, 32, RopePairs::Halves, LLAMA3),
            (5, 3, 32, 32, RopePairs::Neighbours, RopeScaling::None),
            (4, 2, 40, 24, RopePairs::Halves, RopeScaling::None),
            (
                4,
                2,
                40,
                24,
                RopePairs::Neighbours,
                RopeScaling::Linear { factor: 2.0 },
            ),
            (130, 8, 32, 32, RopePairs::Halves, RopeScaling::None),
        ] {
            let spec = spec(rope_dim, pairs, scaling);
            let positions: Vec<u32> = (0..rows).map(|r| (r * 7919) % 5000).collect();
            let rows = rows as usize;
            let columns = heads * dim;
            let wide = values(rows, columns + 24)?;
            let x = wide.narrow(1, 8, columns)?;
            let angles =
                Rope::new(&spec, CONTEXT, Some(&divisors)).angles(&positions, &Device::Cpu)?;
            for got in [angles.apply(&x, heads)?, angles.apply_portable(&x, heads)?] {
                assert_eq!(got.dims(), [rows, heads, dim]);
                assert!(got.is_contiguous());
                let got = got.to_dtype(DType::F64)?.to_vec3::<f64>()?;
                let x = x.to_dtype(DType::F64)?.to_vec2::<f64>()?;
                for row in 0..rows {
                    for head in 0..heads {
                        let x = &x[row][head * dim..][..dim];
                        let want = turned(x, &spec, &divisors, positions[row]);
                        for (got, want) in got[row][head].iter().zip(want) {
                            assert!((got - want).abs() < 2e-6, "{row} {head}: {got} {want}");
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
