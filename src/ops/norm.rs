//! `rms_norm`: root mean square norm of the rows of a matrix.

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::cpu;
use super::rowwise::{Element, Rows, build_rows, with_adjacent_columns};

/// `x / √(mean(x²) + eps) · weight` of each row of x `[rows, width]`, f32, f16 or bf16, rows at
/// any stride; weight f32 `[width]`, contiguous. The result is contiguous and of x's dtype; the
/// arithmetic is in f32.
///
/// # Errors
/// What candle answers for other shapes or dtypes.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return portable(x, weight, eps);
    }
    with_adjacent_columns(x)?.apply_op2_no_bwd(weight, &RmsNorm { eps })
}

/// [`rms_norm`] by candle's op, for other devices. By way of f32: candle's 16-bit norm rounds
/// the root of the mean square as well.
fn portable(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let x32 = x.to_dtype(DType::F32)?.contiguous()?;
    candle_nn::ops::rms_norm(&x32, weight, eps)?.to_dtype(x.dtype())
}

struct RmsNorm {
    eps: f32,
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let run = match x {
            CpuStorage::F16(_) => Self::run::<f16>,
            CpuStorage::BF16(_) => Self::run::<bf16>,
            _ => Self::run::<f32>,
        };
        Ok((
            run(self, x, x_layout, weight, weight_layout)?,
            x_layout.shape().clone(),
        ))
    }
}

impl RmsNorm {
    fn run<T: Element>(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<CpuStorage> {
        let (rows, width) = x_layout.shape().dims2()?;
        let x = Rows::<T>::new(x, x_layout)?;
        let weight = match weight_layout.contiguous_offsets() {
            Some((start, end)) if end - start == width => &weight.as_slice::<f32>()?[start..end],
            _ => candle_core::bail!("rms_norm: {width} columns and weights {weight_layout:?}"),
        };
        Ok(build_rows(rows, width, |row, out: &mut [T]| {
            cpu::rms_norm_row(x.row(row), weight, self.eps, out);
        }))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn equals_f64_on_strided_rows_of_any_width_and_alone() -> Result<()> {
        for (rows, width) in [(1, 1), (3, 63), (5, 64), (4, 576), (200, 1000)] {
            let values = (0..rows * (width + 9)).map(|i| 6.0 * (i as f32 * 12.9898).sin());
            let wide = Tensor::from_iter(values, &Device::Cpu)?.reshape((rows, width + 9))?;
            let weight =
                Tensor::from_iter((0..width).map(|i| 1.0 - i as f32 / 7e2), wide.device())?;
            let weights = weight.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)]
            {
                let x = wide.to_dtype(dtype)?.narrow(1, 4, width)?;
                let out = rms_norm(&x, &weight, 1e-5)?;
                assert_eq!((out.dtype(), out.dims()), (dtype, &[rows, width][..]));
                let stock = portable(&x, &weight, 1e-5)?.to_dtype(DType::F64)?;
                let [got, x64] = [&out, &x].map(|x| x.to_dtype(DType::F64)?.to_vec2::<f64>());
                let (got, x64, stock) = (got?, x64?, stock.to_vec2::<f64>()?);
                for row in 0..rows {
                    let squares: f64 = x64[row].iter().map(|x| x * x).sum();
                    let root = (squares / width as f64 + 1e-5).sqrt();
                    for i in 0..width {
                        let want = x64[row][i] / root * weights[i];
                        let close =
                            |got: f64| (got - want).abs() <= tolerance * want.abs().max(1e-3);
                        assert!(close(got[row][i]) && close(stock[row][i]), "{row} {i}");
                    }
                    let alone = rms_norm(&x.narrow(0, row, 1)?, &weight, 1e-5)?;
                    let alone = alone.to_dtype(DType::F64)?.to_vec2::<f64>()?;
                    assert_eq!(alone[0], got[row]);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn refuses_a_weight_of_another_width() -> Result<()> {
        let x = Tensor::zeros((2, 8), DType::F32, &Device::Cpu)?;
        let weight = Tensor::zeros(7, DType::F32, &Device::Cpu)?;
        assert!(rms_norm(&x, &weight, 1e-5).is_err());
        Ok(())
    }
}
