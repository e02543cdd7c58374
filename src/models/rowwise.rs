//! What the decoder's own elementwise ops share: rows of a strided matrix, in f32, in
//! parallel. candle's ops want contiguous operands; slices of a fused product are not, and
//! copying them would cost more than the arithmetic.

use candle_core::{CpuStorage, Layout, Result, Tensor, WithDType};
use half::{bf16, f16};
use rayon::prelude::*;

/// An element type of the residual stream. Arithmetic is in f32.
pub(super) trait Element: WithDType + Send + Sync {
    fn widen(self) -> f32;
    fn narrow(x: f32) -> Self;
}

impl Element for f32 {
    fn widen(self) -> f32 {
        self
    }
    fn narrow(x: f32) -> Self {
        x
    }
}

impl Element for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Element for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// The rows of a matrix `[rows, columns]` whose columns are adjacent in memory.
pub(super) struct Rows<'a, T> {
    data: &'a [T],
    start: usize,
    stride: usize,
    columns: usize,
}

impl<'a, T: Element> Rows<'a, T> {
    pub(super) fn new(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let (_, columns) = layout.shape().dims2()?;
        match *layout.stride() {
            [stride, 1] => Ok(Self {
                data: storage.as_slice::<T>()?,
                start: layout.start_offset(),
                stride,
                columns,
            }),
            _ => candle_core::bail!("the columns of a row are not adjacent: {layout:?}"),
        }
    }

    pub(super) fn row(&self, row: usize) -> &'a [T] {
        let start = self.start + row * self.stride;
        &self.data[start..start + self.columns]
    }
}

/// `x` itself if its columns are adjacent, else a contiguous copy.
pub(super) fn with_adjacent_columns(x: &Tensor) -> Result<Tensor> {
    match *x.stride() {
        [_, 1] => Ok(x.clone()),
        _ => x.contiguous(),
    }
}

/// Elements below which handing rows to other threads costs more than it saves.
const PARALLEL_FROM: usize = 16 * 1024;

/// A new matrix `[rows, columns]`, row by row, on the threads of the current pool.
pub(super) fn build_rows<T: Element>(
    rows: usize,
    columns: usize,
    fill: impl Fn(usize, &mut [T]) + Sync,
) -> CpuStorage {
    let mut out = vec![T::zero(); rows * columns];
    if columns > 0 && out.len() < PARALLEL_FROM {
        out.chunks_exact_mut(columns)
            .enumerate()
            .for_each(|(row, out)| fill(row, out));
    } else if columns > 0 {
        out.par_chunks_exact_mut(columns)
            .enumerate()
            .for_each(|(row, out)| fill(row, out));
    }
    T::to_cpu_storage_owned(out)
}
