//! A tile of outputs for any number of rows, whatever its weights are.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

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

/// Writes the outputs of tile `number` of `rows` rows.
///
/// # Safety
/// Nobody else writes this tile at the same time.
#[inline(always)]
pub(super) unsafe fn all_rows<S: ByteSimd>(
    simd: S,
    kernel: impl Kernel<S>,
    rows: usize,
    number: usize,
    out: Out<'_>,
) {
    let mut row = 0;
    while row < rows {
        // SAFETY: the caller's promise.
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

/// # Safety
/// As [`all_rows`].
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
