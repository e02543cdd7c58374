//! What the machine does at most.

use std::hint::black_box;

use anyhow::Result;
use candle_core::{CpuStorage, Device, Storage, Tensor};
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

/// Side of the product whose rate counts as the machine's.
pub const GEMM: usize = 1024;

/// Reads every byte of some CPU tensors once, on as many threads as the pool has.
///
/// A plain loop: the compiler makes vectors of it, and memory is what limits it.
pub fn read(tensors: &[&Tensor]) -> Result<()> {
    for tensor in tensors {
        let (storage, _) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cpu(CpuStorage::F32(data)) => sum(data, |x| x.to_bits()),
            Storage::Cpu(CpuStorage::F16(data)) => sum(data.reinterpret_cast(), u32::from),
            Storage::Cpu(CpuStorage::BF16(data)) => sum(data.reinterpret_cast(), u32::from),
            _ => anyhow::bail!("no plain read of this storage"),
        }
    }
    Ok(())
}

fn sum<T: Copy + Sync>(data: &[T], bits: impl Fn(T) -> u32 + Sync) {
    let part = data.len().div_ceil(rayon::current_num_threads()).max(1);
    let sum: u32 = data
        .par_chunks(part)
        .map(|part| part.iter().fold(0u32, |sum, &x| sum ^ bits(x)))
        .reduce(|| 0, |a, b| a ^ b);
    black_box(sum);
}

/// Operands of the product that shows the peak.
pub fn gemm_operands() -> Result<(Tensor, Tensor)> {
    let operand = || Tensor::rand(-1f32, 1.0, (GEMM, GEMM), &Device::Cpu);
    Ok((operand()?, operand()?))
}

/// Flops of that product.
pub fn gemm_flops() -> f64 {
    2.0 * (GEMM * GEMM * GEMM) as f64
}
