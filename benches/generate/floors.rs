//! What the machine can do at most: bytes read and products computed per second.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use candle_core::{Device, Tensor};
use rayon::prelude::*;

const SAMPLES: usize = 7;

/// Prints the best of a few runs of each, on candle's own threads.
pub fn print() -> Result<()> {
    let read = Device::Cpu.with_context(read_gb_per_s);
    println!("plain read of 1 GiB: {read:.1} GB/s");
    for (rows, inner, columns) in [(1024, 1024, 1024), (512, 576, 3072), (512, 1536, 576)] {
        let rate = gemm_gflop_per_s(rows, inner, columns)?;
        println!("f32 product [{rows}, {inner}] @ [{inner}, {columns}]: {rate:.0} GFLOP/s");
    }
    println!();
    Ok(())
}

/// Sums a buffer far larger than the caches.
fn read_gb_per_s() -> f64 {
    let data = vec![1u64; 1 << 27];
    let bytes = size_of_val(data.as_slice()) as f64;
    let part = data.len() / rayon::current_num_threads();
    let sum = || -> u64 {
        let parts = data.par_chunks(part.max(1));
        parts.map(|part| part.iter().sum::<u64>()).sum()
    };
    best(|| {
        black_box(sum());
        Ok(())
    })
    .map_or(f64::NAN, |seconds| bytes / seconds / 1e9)
}

fn gemm_gflop_per_s(rows: usize, inner: usize, columns: usize) -> Result<f64> {
    let a = Tensor::rand(-1f32, 1.0, (rows, inner), &Device::Cpu)?;
    let b = Tensor::rand(-1f32, 1.0, (columns, inner), &Device::Cpu)?.t()?;
    let flops = 2.0 * (rows * inner * columns) as f64;
    let seconds = best(|| {
        black_box(a.matmul(&b)?);
        Ok(())
    })?;
    Ok(flops / seconds / 1e9)
}

/// Seconds of the fastest run.
fn best(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..SAMPLES {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}
