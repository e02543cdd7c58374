//! The gated activation of a feed-forward network, in one pass.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::rowwise::{Element, Rows, build_rows, with_adjacent_columns};
use super::spec::Activation;

/// `activation(gate) · up`, elementwise: `[rows, inner]` each, of one dtype, rows at any
/// stride.
pub(super) fn gated(activation: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if !gate.device().is_cpu() {
        return portable(activation, gate, up);
    }
    with_adjacent_columns(gate)?.apply_op2_no_bwd(&with_adjacent_columns(up)?, &Gated(activation))
}

/// [`gated`] from candle's ops, for devices without an op of ours.
fn portable(activation: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Silu => gate.silu()?.mul(up),
        Activation::GeluTanh => gate.gelu()?.mul(up),
        Activation::ClampedSwiglu { alpha, limit } => {
            let gate = gate.minimum(limit)?;
            let up = (up.clamp(-limit, limit)? + 1.0)?;
            let open = candle_nn::ops::sigmoid(&(&gate * alpha)?)?;
            gate.mul(&open)?.mul(&up)
        }
    }
}

struct Gated(Activation);

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
        let shape = gate_layout.shape().dims2()?;
        let gate = Rows::<T>::new(gate, gate_layout)?;
        let up = Rows::<T>::new(up, up_layout)?;
        Ok(match self.0 {
            Activation::Silu => each(shape, &gate, &up, |gate, up| silu(gate) * up),
            Activation::GeluTanh => each(shape, &gate, &up, |gate, up| gelu_tanh(gate) * up),
            Activation::ClampedSwiglu { alpha, limit } => {
                let (alpha, limit) = (alpha as f32, limit as f32);
                each(shape, &gate, &up, |gate, up| {
                    let gate = gate.min(limit);
                    gate * sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1.0)
                })
            }
        })
    }
}

fn each<T: Element>(
    (rows, inner): (usize, usize),
    gate: &Rows<'_, T>,
    up: &Rows<'_, T>,
    f: impl Fn(f32, f32) -> f32 + Sync,
) -> CpuStorage {
    build_rows(rows, inner, |row, out: &mut [T]| {
        for ((out, gate), up) in out.iter_mut().zip(gate.row(row)).zip(up.row(row)) {
            *out = T::narrow(f(gate.widen(), up.widen()));
        }
    })
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn gelu_tanh(x: f32) -> f32 {
    let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn equals_f64_on_strided_halves_of_one_matrix() -> Result<()> {
        for (rows, inner) in [(3, 8), (40, 512)] {
            let values = (0..2 * rows * inner).map(|i| 6.0 * (i as f32 * 12.9898).sin());
            let both = Tensor::from_iter(values, &Device::Cpu)?.reshape((rows, 2 * inner))?;
            for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)]
            {
                let both = both.to_dtype(dtype)?;
                let (gate, up) = (both.narrow(1, 0, inner)?, both.narrow(1, inner, inner)?);
                let out = gated(Activation::Silu, &gate, &up)?;
                assert_eq!(out.dtype(), dtype);
                let out = out.to_dtype(DType::F64)?.to_vec2::<f64>()?;
                let both = both.to_dtype(DType::F64)?.to_vec2::<f64>()?;
                for (out, both) in out.iter().zip(&both) {
                    for i in 0..inner {
                        let gate = both[i];
                        let expected = gate / (1.0 + (-gate).exp()) * both[inner + i];
                        assert!((out[i] - expected).abs() <= tolerance * expected.abs().max(1e-3));
                    }
                }
            }
        }
        Ok(())
    }
}
