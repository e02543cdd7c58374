//! What the decoder's own elementwise ops share: rows of a strided matrix, in f32, in
//! parallel. candle's ops want contiguous operands; slices of a fused product are not, and
//! copying them would cost more than the arithmetic.

use candle_core::{CpuStorage, Layout, Result, Tensor, WithDType};
use half::{bf16, f16};
use rayon::prelude::*;

use super::cpu;

/// An element type of the residual stream. Arithmetic is in f32.
pub(crate) trait Element: WithDType + cpu::Element {
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for f16 {
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Element for bf16 {
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// The rows of a matrix `[rows, columns]` whose columns are adjacent in memory.
pub(crate) struct Rows<'a, T> {
    data: &'a [T],
    start: usize,
    stride: usize,
    columns: usize,
}

impl<'a, T: Element> Rows<'a, T> {
    pub(crate) fn new(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
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

    pub(crate) fn row(&self, row: usize) -> &'a [T] {
        let start = self.start + row * self.stride;
        &self.data[start..start + self.columns]
    }
}

/// `x` itself if its columns are adjacent, else a contiguous copy.
pub(crate) fn with_adjacent_columns(x: &Tensor) -> Result<Tensor> {
    match *x.stride() {
        [_, 1] => Ok(x.clone()),
        _ => x.contiguous(),
    }
}

/// Elements of a part at least, or handing it to another thread costs more than it saves.
const PART: usize = 32 * 1024;

/// A new matrix `[rows, columns]`, row by row, on the threads of the current pool.
pub(crate) fn build_rows<T: Element>(
    rows: usize,
    columns: usize,
    fill: impl Fn(usize, &mut [T]) + Sync,
) -> CpuStorage {
    let mut out = vec![T::zero(); rows * columns];
    if out.is_empty() {
        return T::to_cpu_storage_owned(out);
    }
    let parts = (out.len() / PART).clamp(1, 2 * rayon::current_num_threads());
    let per_part = rows.div_ceil(parts);
    let part = |(number, part): (usize, &mut [T])| {
        for (i, out) in part.chunks_exact_mut(columns).enumerate() {
            fill(number * per_part + i, out);
        }
    };
    if parts == 1 {
        part((0, &mut out));
    } else {
        out.par_chunks_mut(per_part * columns)
            .enumerate()
            .for_each(part);
    }
    T::to_cpu_storage_owned(out)
}
