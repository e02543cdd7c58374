//! The gated activation of a feed-forward network, in one pass.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::rowwise::{Element, Rows, build_rows, with_adjacent_columns};

/// `silu(gate) · up`, elementwise: `[rows, inner]` each, of one dtype, rows at any stride.
pub(super) fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if !gate.device().is_cpu() {
        return gate.silu()?.mul(up);
    }
    with_adjacent_columns(gate)?.apply_op2_no_bwd(&with_adjacent_columns(up)?, &SiluMul)
}

struct SiluMul;

impl CustomOp2 for SiluMul {
    fn name(&self) -> &'static str {
        "silu_mul"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let run = match gate {
            CpuStorage::F16(_) => silu_mul_rows::<f16>,
            CpuStorage::BF16(_) => silu_mul_rows::<bf16>,
            _ => silu_mul_rows::<f32>,
        };
        Ok((
            run(gate, gate_layout, up, up_layout)?,
            gate_layout.shape().clone(),
        ))
    }
}

fn silu_mul_rows<T: Element>(
    gate: &CpuStorage,
    gate_layout: &Layout,
    up: &CpuStorage,
    up_layout: &Layout,
) -> Result<CpuStorage> {
    let (rows, inner) = gate_layout.shape().dims2()?;
    let gate = Rows::<T>::new(gate, gate_layout)?;
    let up = Rows::<T>::new(up, up_layout)?;
    Ok(build_rows(rows, inner, |row, out: &mut [T]| {
        for ((out, gate), up) in out.iter_mut().zip(gate.row(row)).zip(up.row(row)) {
            let gate = gate.widen();
            *out = T::narrow(gate / (1.0 + (-gate).exp()) * up.widen());
        }
    }))
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
                let out = silu_mul(&both.narrow(1, 0, inner)?, &both.narrow(1, inner, inner)?)?;
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
