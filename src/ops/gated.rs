//! `gated`: the gated activation of a feed-forward network, in one pass.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::cpu;
use super::rowwise::{Element, Rows, build_rows, with_adjacent_columns};

/// What a gate goes through before it is multiplied.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Gate {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU by its approximation with tanh.
    GeluTanh,
    /// `gate · sigmoid(alpha · gate) · (up + 1)`, of a gate of at most `limit` and an up within
    /// `-limit..=limit`.
    ClampedSwiglu { alpha: f32, limit: f32 },
}

/// `activation(gate) · up`, elementwise: `[rows, inner]` each, of one dtype, rows at any
/// stride. The result is contiguous; the arithmetic is in f32.
///
/// # Errors
/// What candle answers for other shapes or dtypes.
pub(crate) fn gated(activation: Gate, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if !gate.device().is_cpu() {
        return portable(activation, gate, up);
    }
    with_adjacent_columns(gate)?.apply_op2_no_bwd(&with_adjacent_columns(up)?, &Gated(activation))
}

/// [`gated`] from candle's ops, for devices without an op of ours.
fn portable(activation: Gate, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    match activation {
        Gate::Silu => gate.silu()?.mul(up),
        // candle's `gelu` is the one with tanh.
        Gate::GeluTanh => gate.gelu()?.mul(up),
        Gate::ClampedSwiglu { alpha, limit } => {
            let gate = gate.minimum(f64::from(limit))?;
            let up = (up.clamp(-limit, limit)? + 1.0)?;
            let open = candle_nn::ops::sigmoid(&(&gate * f64::from(alpha))?)?;
            gate.mul(&open)?.mul(&up)
        }
    }
}

struct Gated(Gate);

impl CustomOp2 for Gated {
    fn name(&self) -> &'static str {
        "gated_activation"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let run = match gate {
            CpuStorage::F16(_) => Self::run::<f16>,
            CpuStorage::BF16(_) => Self::run::<bf16>,
            _ => Self::run::<f32>,
        };
        Ok((
            run(self, gate, gate_layout, up, up_layout)?,
            gate_layout.shape().clone(),
        ))
    }
}

impl Gated {
    fn run<T: Element>(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<CpuStorage> {
        let (rows, inner) = gate_layout.shape().dims2()?;
        if up_layout.shape() != gate_layout.shape() {
            candle_core::bail!("gated: {gate_layout:?} and {up_layout:?}");
        }
        let gate = Rows::<T>::new(gate, gate_layout)?;
        let up = Rows::<T>::new(up, up_layout)?;
        Ok(build_rows(rows, inner, |row, out: &mut [T]| {
            cpu::gate_row(self.0, gate.row(row), up.row(row), out);
        }))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// The activations as they are defined.
    fn reference(activation: Gate, gate: f64, up: f64) -> f64 {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match activation {
            Gate::Silu => gate * sigmoid(gate) * up,
            Gate::GeluTanh => {
                let root = (2.0 / std::f64::consts::PI).sqrt();
                0.5 * gate * (1.0 + (root * (gate + 0.044715 * gate.powi(3))).tanh()) * up
            }
            Gate::ClampedSwiglu { alpha, limit } => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                let gate = gate.min(limit);
                gate * sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1.0)
            }
        }
    }

    const ALL: [Gate; 3] = [
        Gate::Silu,
        Gate::GeluTanh,
        Gate::ClampedSwiglu {
            alpha: 1.702,
            limit: 4.0,
        },
    ];

    #[test]
    fn equals_f64_on_strided_halves_of_one_matrix_and_alone() -> Result<()> {
        for activation in ALL {
            for (rows, inner) in [(3, 8), (1, 1), (2, 261), (150, 512)] {
                let values = (0..2 * rows * inner).map(|i| 9.0 * (i as f32 * 12.9898).sin());
                let both = Tensor::from_iter(values, &Device::Cpu)?.reshape((rows, 2 * inner))?;
                for (dtype, tolerance) in
                    [(DType::F32, 2e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)]
                {
                    let both = both.to_dtype(dtype)?;
                    let (gate, up) = (both.narrow(1, 0, inner)?, both.narrow(1, inner, inner)?);
                    let out = gated(activation, &gate, &up)?;
                    assert_eq!((out.dtype(), out.dims()), (dtype, &[rows, inner][..]));
                    let out = out.to_dtype(DType::F64)?.to_vec2::<f64>()?;
                    let both = both.to_dtype(DType::F64)?.to_vec2::<f64>()?;
                    for (row, (out, both)) in out.iter().zip(&both).enumerate() {
                        for i in 0..inner {
                            let want = reference(activation, both[i], both[inner + i]);
                            let error = (out[i] - want).abs();
                            assert!(
                                error <= tolerance * want.abs().max(1e-1),
                                "{activation:?} of {} and {}: {} for {want}",
                                both[i],
                                both[inner + i],
                                out[i],
                            );
                        }
                        let one = |x: &Tensor| x.narrow(0, row, 1);
                        let alone = gated(activation, &one(&gate)?, &one(&up)?)?;
                        assert_eq!(alone.to_dtype(DType::F64)?.to_vec2::<f64>()?[0], *out);
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn agrees_with_candles_ops() -> Result<()> {
        for activation in ALL {
            let values = (0..7000).map(|i| 9.0 * (i as f32 * 12.9898).sin());
            let both = Tensor::from_iter(values, &Device::Cpu)?.reshape((7, 1000))?;
            let (gate, up) = (both.narrow(1, 0, 500)?, both.narrow(1, 500, 500)?);
            let ours = gated(activation, &gate, &up)?;
            let far = (ours - portable(activation, &gate, &up)?)?.abs()?;
            assert!(far.max_all()?.to_scalar::<f32>()? < 2e-5);
        }
        Ok(())
    }

    #[test]
    fn extremes_stay_what_they_are() -> Result<()> {
        let gate = [-1e30f32, -90.0, 90.0, 1e30, f32::NAN];
        let gate = Tensor::new(&gate, &Device::Cpu)?.reshape((1, 5))?;
        let out = gated(Gate::Silu, &gate, &gate.ones_like()?)?.to_vec2::<f32>()?;
        assert_eq!(out[0][..4], [0.0, 0.0, 90.0, 1e30]);
        assert!(out[0][4].is_nan());
        Ok(())
    }
}
