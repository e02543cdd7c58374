//! A tile of outputs for any number of rows, whatever its weights are.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use std::ops::Range;

use super::super::simd::Simd;
use super::Out;
use super::registers::ByteSimd;

/// Outputs of a tile: the 32-bit lanes of the widest register.
pub(super) const TILE: usize = 16;

/// What computes the outputs of a tile.
pub(super) trait Kernel<S: ByteSimd>: Copy {
    /// The sums of a register of outputs from `lane` on, for `ROWS` rows from `row` on. A row has
    /// the same bits whatever `ROWS` is. The first rows ask for weights before they are needed, as
    /// `dense` says. Implement it with `#[inline(always)]`.
    fn outputs<const ROWS: usize>(
        self,
        simd: S,
        row: usize,
        lane: usize,
    ) -> [<S::Floats as Simd>::V; ROWS];
}

/// The outputs of some tiles of a weight for all rows of `x`.
pub(super) struct Tiles<'a, W, X> {
    pub(super) weight: &'a W,
    pub(super) tiles: Range<usize>,
    pub(super) x: &'a X,
    pub(super) out: Out<'a>,
}

impl<W, X> Tiles<'_, W, X> {
    /// Computes them, `rows` rows, each tile with the kernel that `kernel` makes of its number.
    #[inline(always)]
    pub(super) fn compute<S: ByteSimd, K: Kernel<S>>(
        &self,
        simd: S,
        rows: usize,
        kernel: impl Fn(usize) -> K,
    ) {
        for number in self.tiles.clone() {
            let (kernel, out) = (kernel(number), self.out);
            let mut row = 0;
            while row < rows {
                // SAFETY: this task alone has this tile.
                row += unsafe {
                    match rows - row {
                        8.. if S::Floats::MANY_REGISTERS => {
                            some_rows::<S, 8>(simd, kernel, row, number, out)
                        }
                        4.. => some_rows::<S, 4>(simd, kernel, row, number, out),
                        2.. => some_rows::<S, 2>(simd, kernel, row, number, out),
                        _ => some_rows::<S, 1>(simd, kernel, row, number, out),
                    }
                };
            }
        }
    }
}

/// Writes the outputs of tile `number` of `ROWS` rows from `row` on, and answers how many.
///
/// # Safety
/// Nobody else writes this tile at the same time.
#[inline(always)]
unsafe fn some_rows<S: ByteSimd, const ROWS: usize>(
    simd: S,
    kernel: impl Kernel<S>,
    row: usize,
    number: usize,
    out: Out<'_>,
) -> usize {
    let mut sums = [[0.0; TILE]; ROWS];
    for lane in (0..TILE).step_by(S::Floats::LANES) {
        let register = kernel.outputs::<ROWS>(simd, row, lane);
        for r in 0..ROWS {
            // SAFETY: `lane + LANES <= TILE`.
            unsafe {
                simd.floats()
                    .store(sums[r].as_mut_ptr().add(lane), register[r])
            };
        }
    }
    for r in 0..ROWS {
        // SAFETY: the caller's promise.
        unsafe { out.write(row + r, number * TILE, &sums[r]) };
    }
    ROWS
}
