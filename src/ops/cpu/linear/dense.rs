//! Products with plain floats. 16-bit weights are widened in registers, sums are in f32.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use std::ops::Range;

use super::super::ahead::LINE;
use super::super::element::Element;
use super::super::simd::{Simd, Task};
use super::Out;
use super::aligned::{Aligned, Plain};

/// Outputs of a tile: two of the widest registers.
pub(super) const TILE: usize = 32;

/// How far ahead weights are fetched, in bytes: still in the first cache level when they are
/// needed, beside rows of `x`.
pub(super) const AHEAD: usize = 8 << 10;

/// `[tiles][inp][TILE]`, the last tile filled up with zeros.
pub(super) struct Dense<T> {
    weights: Aligned<T>,
    inp: usize,
}

impl<T: Element + Plain> Dense<T> {
    pub(super) fn zeros(out: usize, inp: usize) -> Self {
        Self {
            weights: Aligned::zeros(out.div_ceil(TILE) * TILE * inp),
            inp,
        }
    }

    /// Weights `[rows, inp]` of the outputs from `first` on.
    pub(super) fn fill(&mut self, first: usize, rows: &[T]) {
        for (out, row) in (first..).zip(rows.chunks_exact(self.inp)) {
            let tile = &mut self.weights[out / TILE * TILE * self.inp..];
            let column = tile.iter_mut().skip(out % TILE).step_by(TILE);
            for (packed, &weight) in column.zip(row) {
                *packed = weight;
            }
        }
    }

    /// The weights `[inp]` of one output.
    pub(super) fn row(&self, out: usize, row: &mut [f32]) {
        let tile = &self.weights[out / TILE * TILE * self.inp..];
        for (x, packed) in row.iter_mut().zip(tile.chunks_exact(TILE)) {
            *x = packed[out % TILE].to_f32();
        }
    }

    fn tile(&self, tile: usize) -> &[T] {
        let len = TILE * self.inp;
        &self.weights[tile * len..][..len]
    }
}

/// The outputs of some tiles for all rows of `x`, `[rows, inp]`.
#[derive(Clone)]
pub(super) struct DenseTiles<'a, T> {
    pub(super) weight: &'a Dense<T>,
    pub(super) tiles: Range<usize>,
    pub(super) x: &'a [f32],
    pub(super) out: Out<'a>,
}

impl<T: Element + Plain> Task for DenseTiles<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let inp = self.weight.inp;
        let rows = self.x.len() / inp;
        for number in self.tiles.clone() {
            let weights = self.weight.tile(number);
            let mut row = 0;
            while row < rows {
                let x = &self.x[row * inp..];
                row += match rows - row {
                    12.. if S::MANY_REGISTERS => self.block::<S, 12>(simd, weights, x, number, row),
                    8.. if S::MANY_REGISTERS => self.block::<S, 8>(simd, weights, x, number, row),
                    4.. => self.block::<S, 4>(simd, weights, x, number, row),
                    2.. => self.block::<S, 2>(simd, weights, x, number, row),
                    _ => self.block::<S, 1>(simd, weights, x, number, row),
                };
            }
        }
    }
}

impl<T: Element + Plain> DenseTiles<'_, T> {
    /// The outputs of a tile for `ROWS` rows, the first of which is number `row`.
    #[inline(always)]
    fn block<S: Simd, const ROWS: usize>(
        &self,
        simd: S,
        weights: &[T],
        x: &[f32],
        tile: usize,
        row: usize,
    ) -> usize {
        let mut sums = [[0.0; TILE]; ROWS];
        for column in (0..TILE).step_by(2 * S::LANES) {
            let fetch = ROWS >= 4 && row == 0;
            let both = columns::<S, T, ROWS>(simd, weights, x, self.weight.inp, column, fetch);
            for r in 0..ROWS {
                for (i, sum) in both[r].into_iter().enumerate() {
                    // SAFETY: `column + 2 * LANES <= TILE`.
                    unsafe { simd.store(sums[r].as_mut_ptr().add(column + i * S::LANES), sum) };
                }
            }
        }
        for r in 0..ROWS {
            // SAFETY: this task alone has this tile.
            unsafe { self.out.write(row + r, tile * TILE, &sums[r]) };
        }
        ROWS
    }
}

/// The sums of two registers of outputs. Each is one chain over `inp`, whatever `ROWS` is: so
/// a row has the same bits alone and in any batch.
///
/// With `fetch`, weights are asked for before they are needed: several rows use a line for so
/// long that the machine does not look far enough ahead, and memory would stand idle.
#[inline(always)]
fn columns<S: Simd, T: Element, const ROWS: usize>(
    simd: S,
    weights: &[T],
    x: &[f32],
    inp: usize,
    column: usize,
    fetch: bool,
) -> [[S::V; 2]; ROWS] {
    assert!(weights.len() == TILE * inp && column + 2 * S::LANES <= TILE);
    assert!(x.len() >= ROWS * inp);
    let mut sums = [[simd.splat(0.0); 2]; ROWS];
    for i in 0..inp {
        // SAFETY: within row `i` of `inp`, by the first assertion.
        let (first, second) = unsafe {
            let at = weights.as_ptr().add(i * TILE + column);
            if fetch {
                for line in (0..2 * S::LANES * size_of::<T>()).step_by(LINE) {
                    simd.prefetch(at.wrapping_byte_add(AHEAD + line));
                }
            }
            (T::load(simd, at), T::load(simd, at.add(S::LANES)))
        };
        for r in 0..ROWS {
            // SAFETY: `r * inp + i < ROWS * inp`, by the second assertion.
            let x = simd.splat(unsafe { *x.get_unchecked(r * inp + i) });
            sums[r][0] = simd.mul_add(first, x, sums[r][0]);
            sums[r][1] = simd.mul_add(second, x, sums[r][1]);
        }
    }
    sums
}
