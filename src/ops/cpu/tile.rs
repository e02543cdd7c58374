//! The two products of the matrix kernel, in registers: queries with rows of K, weights with
//! rows of V.
//!
//! In both, the lanes of a register are rows of the matrix, and a number of K or V is spread over
//! a register and meets up to [`REGISTERS`] of them. So nothing has to be transposed,
//! and the softmax between the products reduces nothing across a register.
//! Every sum is one chain, whatever is computed beside it.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use super::ahead::LINE;
use super::simd::Simd;

/// Registers of matrix rows of a product, at most.
pub(super) const REGISTERS: usize = 3;

/// Elements that are multiplied between two requests for memory. Divides every dim.
const STEP: usize = 8;

/// `scores[j] = q · k[j]` for a block of `R` registers of matrix rows: `q` is `[dim, block]`,
/// `scores` `[keys, block]`, with room for a multiple of 16 keys. Behind the last of `k` it stands
/// in, and nobody looks at those scores.
///
/// # Safety
/// Each of `k` points at `dim` elements.
#[inline(always)]
pub(super) unsafe fn multiply_keys<S: Simd, T, const R: usize>(
    simd: S,
    q: &[f32],
    k: &[*const f32],
    scores: &mut [f32],
    ahead: &mut Ahead<'_, T>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if S::MANY_REGISTERS && R == 1 {
            keys::<S, T, R, 16>(simd, q, k, scores, ahead);
        } else if S::MANY_REGISTERS {
            keys::<S, T, R, 8>(simd, q, k, scores, ahead);
        } else {
            keys::<S, T, R, 4>(simd, q, k, scores, ahead);
        }
    }
}

/// # Safety
/// That of [`multiply_keys`].
#[inline(always)]
unsafe fn keys<S: Simd, T, const R: usize, const N: usize>(
    simd: S,
    q: &[f32],
    k: &[*const f32],
    scores: &mut [f32],
    ahead: &mut Ahead<'_, T>,
) {
    let block = R * S::LANES;
    let dim = q.len() / block;
    assert!(q.len() == dim * block && dim.is_multiple_of(STEP));
    assert!(scores.len() >= k.len().next_multiple_of(N) * block);
    let (q, scores) = (q.as_ptr(), scores.as_mut_ptr());
    for (first, part) in k.chunks(N).enumerate() {
        let mut k = [part[part.len() - 1]; N];
        k[..part.len()].copy_from_slice(part);
        let mut sums = [[simd.splat(0.0); R]; N];
        for start in (0..dim).step_by(STEP) {
            ahead.fetch(simd);
            for i in start..start + STEP {
                let mut x = [simd.splat(0.0); R];
                for r in 0..R {
                    // SAFETY: within row `i` of `dim`.
                    x[r] = unsafe { simd.load_f32(q.add(i * block + r * S::LANES)) };
                }
                for n in 0..N {
                    // SAFETY: the caller's promise.
                    let y = simd.splat(unsafe { *k[n].add(i) });
                    for r in 0..R {
                        sums[n][r] = simd.mul_add(x[r], y, sums[n][r]);
                    }
                }
            }
        }
        for n in 0..N {
            for r in 0..R {
                let at = (first * N + n) * block + r * S::LANES;
                // SAFETY: a row below `k.len()`, rounded up to whole `N`.
                unsafe { simd.store(scores.add(at), sums[n][r]) };
            }
        }
    }
}

/// `sums = sums · shrink + Σ_j weights[j] · v[j]` for a block of `R` registers of matrix rows:
/// `weights` is `[keys, block]`, `sums` `[dim, block]`, `shrink` `[block]`.
///
/// # Safety
/// Each of `v` points at `dim` elements.
#[inline(always)]
pub(super) unsafe fn multiply_values<S: Simd, T, const R: usize>(
    simd: S,
    weights: &[f32],
    v: &[*const f32],
    shrink: &[f32],
    sums: &mut [f32],
    ahead: &mut Ahead<'_, T>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let dim = sums.len() / (R * S::LANES);
        if S::MANY_REGISTERS && R == 1 && dim.is_multiple_of(16) {
            values::<S, T, R, 16>(simd, weights, v, shrink, sums, ahead);
        } else if S::MANY_REGISTERS {
            values::<S, T, R, 8>(simd, weights, v, shrink, sums, ahead);
        } else {
            values::<S, T, R, 4>(simd, weights, v, shrink, sums, ahead);
        }
    }
}

/// # Safety
/// That of [`multiply_values`].
#[inline(always)]
unsafe fn values<S: Simd, T, const R: usize, const N: usize>(
    simd: S,
    weights: &[f32],
    v: &[*const f32],
    shrink: &[f32],
    sums: &mut [f32],
    ahead: &mut Ahead<'_, T>,
) {
    let block = R * S::LANES;
    let dim = sums.len() / block;
    assert!(sums.len() == dim * block && dim.is_multiple_of(N));
    assert!(weights.len() >= v.len() * block && shrink.len() == block);
    let (weights, shrink, sums) = (weights.as_ptr(), shrink.as_ptr(), sums.as_mut_ptr());
    for column in (0..dim).step_by(N) {
        let mut parts = [[simd.splat(0.0); R]; N];
        for (first, rows) in v.chunks(STEP).enumerate() {
            ahead.fetch(simd);
            for (j, &row) in rows.iter().enumerate() {
                let mut x = [simd.splat(0.0); R];
                for r in 0..R {
                    let at = (first * STEP + j) * block + r * S::LANES;
                    // SAFETY: within the weights of this row of V.
                    x[r] = unsafe { simd.load_f32(weights.add(at)) };
                }
                for n in 0..N {
                    // SAFETY: the caller's promise.
                    let y = simd.splat(unsafe { *row.add(column + n) });
                    for r in 0..R {
                        parts[n][r] = simd.mul_add(x[r], y, parts[n][r]);
                    }
                }
            }
        }
        for r in 0..R {
            // SAFETY: `shrink` has a block, and the columns are below `dim`.
            unsafe {
                let shrink = simd.load_f32(shrink.add(r * S::LANES));
                for n in 0..N {
                    let sum = sums.add((column + n) * block + r * S::LANES);
                    let part = simd.mul_add(simd.load_f32(sum), shrink, parts[n][r]);
                    simd.store(sum, part);
                }
            }
        }
    }
}

/// Asks for rows that are needed later, a few lines at a time between the products: asking for
/// many at once fills the queues to memory.
pub(super) struct Ahead<'a, T> {
    rows: &'a [*const T],
    /// Bytes of each row.
    bytes: usize,
    row: usize,
    byte: usize,
    /// Lines of a request.
    lines: usize,
}

impl<'a, T> Ahead<'a, T> {
    /// Fetches `dim` elements of each row during the products of `blocks` blocks with as many.
    pub(super) fn new(rows: &'a [*const T], dim: usize, blocks: usize) -> Self {
        let bytes = dim * size_of::<T>();
        let requests = blocks * rows.len().div_ceil(STEP) * (dim / STEP);
        Self {
            rows,
            bytes,
            row: 0,
            byte: 0,
            lines: (rows.len() * bytes.div_ceil(LINE)).div_ceil(requests.max(1)),
        }
    }

    #[inline(always)]
    fn fetch<S: Simd>(&mut self, simd: S) {
        for _ in 0..self.lines {
            let Some(row) = self.rows.get(self.row) else {
                return;
            };
            simd.prefetch(row.wrapping_byte_add(self.byte));
            self.byte += LINE;
            if self.byte >= self.bytes {
                (self.row, self.byte) = (self.row + 1, 0);
            }
        }
    }
}
