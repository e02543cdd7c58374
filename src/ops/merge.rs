//! `merge_states`: attention over two disjoint sets of keys from the attention over each.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};
use rayon::prelude::*;

use super::AttnState;
use crate::error::{Error, Result};

const OP: &str = "merge_states";

/// Combines the attention of the same queries over two disjoint sets of keys into the
/// attention over their union: `out = (out_a · e^lse_a + out_b · e^lse_b) / (e^lse_a + e^lse_b)`
/// and `lse = ln(e^lse_a + e^lse_b)`, computed so that nothing overflows.
///
/// Commutative; the state of no key, `(0, −inf)`, is the identity. The method is that of
/// FlashAttention's and FlashInfer's split softmax. One pass on a CPU, one kernel on CUDA, plain
/// tensor ops on any other device.
///
/// # Errors
/// [`Error::Shape`] and the like unless both states are F32 of one shape:
/// `out [rows, heads, v_dim]`, `lse [rows, heads]`.
pub fn merge_states(a: &AttnState, b: &AttnState) -> Result<AttnState> {
    let (rows, heads, dim) = a.out.dims3().map_err(|_| Error::Shape {
        op: OP,
        tensor: "a.out".into(),
        expected: "[rows, heads, v_dim]".into(),
        got: a.out.dims().to_vec(),
    })?;
    for (name, tensor, expected) in [
        ("a.lse", &a.lse, vec![rows, heads]),
        ("b.out", &b.out, vec![rows, heads, dim]),
        ("b.lse", &b.lse, vec![rows, heads]),
    ] {
        if tensor.dims() != expected {
            return Err(Error::Shape {
                op: OP,
                tensor: name.into(),
                expected: format!("{expected:?}"),
                got: tensor.dims().to_vec(),
            });
        }
    }
    for (name, tensor) in [
        ("a.out", &a.out),
        ("a.lse", &a.lse),
        ("b.out", &b.out),
        ("b.lse", &b.lse),
    ] {
        if tensor.dtype() != candle_core::DType::F32 {
            return Err(Error::Dtype {
                op: OP,
                tensor: name,
                expected: "F32".into(),
                got: tensor.dtype(),
            });
        }
    }
    if a.out.device().is_cpu() || a.out.device().is_cuda() {
        let lses = Tensor::stack(&[&a.lse, &b.lse], 0)?;
        let (a, b) = (a.out.contiguous()?, b.out.contiguous()?);
        let flat = a.apply_op3_no_bwd(&b, &lses, &MergeStates)?;
        return AttnState::split(&flat, (rows, heads, dim));
    }
    merge_by_tensor_ops(a, b)
}

/// [`merge_states`] of checked states, made of candle's own ops.
pub(super) fn merge_by_tensor_ops(a: &AttnState, b: &AttnState) -> Result<AttnState> {
    let base = finite_or_zero(&a.lse.maximum(&b.lse)?)?;
    let weight_a = (&a.lse - &base)?.exp()?;
    let weight_b = (&b.lse - &base)?.exp()?;
    let total = (&weight_a + &weight_b)?;
    let sum = (a.out.broadcast_mul(&weight_a.unsqueeze(2)?)?
        + b.out.broadcast_mul(&weight_b.unsqueeze(2)?)?)?;
    Ok(AttnState {
        out: sum.broadcast_div(&one_if_zero(&total)?.unsqueeze(2)?)?,
        lse: (base + total.log()?)?,
    })
}

/// The output of a state of which sinks (one logit per head) take their share. Every row must
/// have a key.
pub(super) fn take_sinks(state: &AttnState, sinks: &[f32]) -> Result<Tensor> {
    let sinks = Tensor::from_slice(sinks, (1, sinks.len()), state.lse.device())?;
    let taken = sinks.broadcast_sub(&state.lse)?.exp()?;
    Ok(state.out.broadcast_div(&(taken + 1.0)?.unsqueeze(2)?)?)
}

/// Rows that are merged without being handed to another thread, in elements.
const PART: usize = 16 * 1024;

/// Two `out` and the `lse` of both, `[2, rows, heads]`, all contiguous, to one flat state.
struct MergeStates;

impl CustomOp3 for MergeStates {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
        lses: &CpuStorage,
        lse_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, heads, dim) = a_layout.shape().dims3()?;
        let pairs = rows * heads;
        let a = &a.as_slice::<f32>()?[a_layout.start_offset()..];
        let b = &b.as_slice::<f32>()?[b_layout.start_offset()..];
        let lses = &lses.as_slice::<f32>()?[lse_layout.start_offset()..][..2 * pairs];
        let (lse_a, lse_b) = lses.split_at(pairs);
        let mut flat = vec![0.0; pairs * (dim + 1)];
        let (out, lse) = flat.split_at_mut(pairs * dim);
        let states_a = a.par_chunks_exact(dim).zip(lse_a);
        let states_b = b.par_chunks_exact(dim).zip(lse_b);
        out.par_chunks_exact_mut(dim)
            .zip(lse)
            .zip(states_a.zip(states_b))
            .with_min_len((PART / dim).max(1))
            .for_each(|((out, lse), ((a, lse_a), (b, lse_b)))| {
                *lse = merge_row(out, (a, *lse_a), (b, *lse_b));
            });
        Ok((CpuStorage::F32(flat), Shape::from(pairs * (dim + 1))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        a_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
        lses: &CudaStorage,
        lse_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let (rows, heads, dim) = a_layout.shape().dims3()?;
        let out = super::cuda::merge_states((a, a_layout), (b, b_layout), (lses, lse_layout))?;
        Ok((out, Shape::from(rows * heads * (dim + 1))))
    }
}

/// Merges one head of one row into `out`; its log-sum-exp.
fn merge_row(out: &mut [f32], (a, lse_a): (&[f32], f32), (b, lse_b): (&[f32], f32)) -> f32 {
    let max = lse_a.max(lse_b);
    // As `finite_or_zero` and `one_if_zero`.
    let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let (weight_a, weight_b) = ((lse_a - base).exp(), (lse_b - base).exp());
    let total = weight_a + weight_b;
    let part = if total == 0.0 { 1.0 } else { 1.0 / total };
    let (weight_a, weight_b) = (weight_a * part, weight_b * part);
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = a * weight_a + b * weight_b;
    }
    base + total.ln()
}

/// −inf becomes 0, so that subtracting it from −inf is not NaN.
pub(super) fn finite_or_zero(max: &Tensor) -> Result<Tensor> {
    let empty = max.eq(f32::NEG_INFINITY)?;
    Ok(empty.where_cond(&max.zeros_like()?, max)?)
}

/// 0 becomes 1, so that a row without keys divides 0 by 1.
pub(super) fn one_if_zero(total: &Tensor) -> Result<Tensor> {
    let empty = total.eq(0f32)?;
    Ok(empty.where_cond(&total.ones_like()?, total)?)
}
