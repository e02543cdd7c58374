//! The two products of the streaming kernel, in registers: queries with rows of K, weights
//! with rows of V. Both read a K/V row once for up to four query vectors, and fetch on the way
//! what is needed later.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use super::ahead::{Ahead, LINE};
use super::element::Element;
use super::simd::Simd;

/// Tokens of a product with K.
pub(super) const TOKENS: usize = 4;

/// Query vectors of a register block, at most.
const VECTORS: usize = 4;

/// Calls `$f::<S, T, H>` with as many query vectors as a register block takes, up to 4.
macro_rules! blocks_of_vectors {
    ($n:expr, $i:ident, $f:ident ( $($arg:expr),* $(,)? )) => {
        while $i < $n {
            match $n - $i {
                1 => { $f::<S, T, 1>($($arg),*); $i += 1; }
                2 => { $f::<S, T, 2>($($arg),*); $i += 2; }
                3 => { $f::<S, T, 3>($($arg),*); $i += 3; }
                _ => { $f::<S, T, 4>($($arg),*); $i += 4; }
            }
        }
    };
}

/// `out[j * stride + i] = q[i] · k[j]` for all query vectors `[n, dim]`.
///
/// # Safety
/// Each of `k` points at `dim` elements.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, T: Element>(
    simd: S,
    q: &[f32],
    dim: usize,
    k: [*const T; TOKENS],
    ahead: &mut Ahead<T>,
    out: &mut [f32],
    stride: usize,
) {
    let n = q.len() / dim;
    assert!(q.len() == n * dim && out.len() >= (TOKENS - 1) * stride + n);
    let (q, out) = (q.as_ptr(), out.as_mut_ptr());
    let blocks = n.div_ceil(VECTORS);
    let mut i = 0;
    // SAFETY: the caller's promise; q holds vectors up to n, and `out` all of their products.
    unsafe {
        blocks_of_vectors!(
            n,
            i,
            dot_block(
                simd,
                q.add(i * dim),
                dim,
                k,
                (&mut *ahead, blocks),
                out.add(i),
                stride
            )
        );
    }
}

/// # Safety
/// `q` points at `H * dim` elements, each of `k` at `dim`, and `out` at rows of `H` places
/// `stride` apart, one for each token.
#[inline(always)]
unsafe fn dot_block<S: Simd, T: Element, const H: usize>(
    simd: S,
    q: *const f32,
    dim: usize,
    k: [*const T; TOKENS],
    (ahead, blocks): (&mut Ahead<T>, usize),
    out: *mut f32,
    stride: usize,
) {
    let [k0, k1, k2, k3] = k;
    // SAFETY: the caller's promise.
    unsafe {
        if S::MANY_REGISTERS {
            dot_tokens::<S, T, H, TOKENS>(simd, q, dim, k, (ahead, blocks), out, stride);
        } else {
            dot_tokens::<S, T, H, 2>(simd, q, dim, [k0, k1], (ahead, blocks), out, stride);
            dot_tokens::<S, T, H, 2>(
                simd,
                q,
                dim,
                [k2, k3],
                (ahead, blocks),
                out.add(2 * stride),
                stride,
            );
        }
    }
}

/// `H * N` sums in registers.
///
/// # Safety
/// That of [`dot_block`], for `N` tokens.
#[inline(always)]
unsafe fn dot_tokens<S: Simd, T: Element, const H: usize, const N: usize>(
    simd: S,
    q: *const f32,
    dim: usize,
    k: [*const T; N],
    (ahead, blocks): (&mut Ahead<T>, usize),
    out: *mut f32,
    stride: usize,
) {
    let mut sums = [[simd.splat(0.0); VECTORS]; N];
    let line = LINE / size_of::<T>();
    // Every line of K once, spread over the blocks that read it.
    let lines = N.div_ceil(blocks);
    let mut at = 0;
    // SAFETY: all elements below are before `dim`.
    unsafe {
        while at + line <= dim {
            ahead.fetch(simd, lines);
            for part in 0..line / S::LANES {
                let at = at + part * S::LANES;
                dot_step::<S, T, H, N>(simd, q, dim, k, at, &mut sums);
            }
            at += line;
        }
        while at + S::LANES <= dim {
            dot_step::<S, T, H, N>(simd, q, dim, k, at, &mut sums);
            at += S::LANES;
        }
    }
    let mut totals = [[0.0; VECTORS]; N];
    for n in 0..N {
        totals[n] = simd.sum4(sums[n]);
    }
    if at < dim {
        for (n, totals) in totals.iter_mut().enumerate() {
            for (h, total) in totals.iter_mut().enumerate().take(H) {
                for at in at..dim {
                    // SAFETY: `at < dim`.
                    *total += unsafe { *q.add(h * dim + at) * (*k[n].add(at)).to_f32() };
                }
            }
        }
    }
    for n in 0..N {
        for h in 0..H {
            // SAFETY: the caller's promise.
            unsafe { *out.add(n * stride + h) = totals[n][h] };
        }
    }
}

/// One register of dimensions.
///
/// # Safety
/// That of [`dot_block`], for `N` tokens; `at + LANES <= dim`.
#[inline(always)]
unsafe fn dot_step<S: Simd, T: Element, const H: usize, const N: usize>(
    simd: S,
    q: *const f32,
    dim: usize,
    k: [*const T; N],
    at: usize,
    sums: &mut [[S::V; VECTORS]; N],
) {
    let mut part = [simd.splat(0.0); N];
    // SAFETY: the caller's promise.
    unsafe {
        for n in 0..N {
            part[n] = T::load(simd, k[n].add(at));
        }
        for h in 0..H {
            let q_part = simd.load_f32(q.add(h * dim + at));
            for n in 0..N {
                sums[n][h] = simd.mul_add(q_part, part[n], sums[n][h]);
            }
        }
    }
}

/// `sums[i] = sums[i] * shrink[i] + Σ_j weights[j * stride + i] * v[j]` for all query vectors;
/// `sums` is `[n, dim]`.
///
/// # Safety
/// Each of `v` points at `dim` elements.
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd, T: Element>(
    simd: S,
    sums: &mut [f32],
    dim: usize,
    shrink: &[f32],
    (weights, stride): (&[f32], usize),
    v: &[*const T],
    ahead: &mut Ahead<T>,
) {
    let n = sums.len() / dim;
    assert!(sums.len() == n * dim && shrink.len() >= n);
    assert!(!v.is_empty() && weights.len() >= (v.len() - 1) * stride + n);
    let sums = sums.as_mut_ptr();
    let (shrink, weights) = (shrink.as_ptr(), weights.as_ptr());
    let blocks = n.div_ceil(VECTORS);
    let mut i = 0;
    // SAFETY: the caller's promise; sums, shrink and weights hold vectors up to n.
    unsafe {
        blocks_of_vectors!(
            n,
            i,
            weigh_block(
                simd,
                sums.add(i * dim),
                dim,
                shrink.add(i),
                (weights.add(i), stride),
                v,
                (&mut *ahead, blocks)
            )
        );
    }
}

/// # Safety
/// `sums` points at `H * dim` elements, `shrink` at `H`, `weights` at rows of `H` that are
/// `stride` apart, one for each of `v`, and each of `v` at `dim` elements.
#[inline(always)]
unsafe fn weigh_block<S: Simd, T: Element, const H: usize>(
    simd: S,
    sums: *mut f32,
    dim: usize,
    shrink: *const f32,
    (weights, stride): (*const f32, usize),
    v: &[*const T],
    (ahead, blocks): (&mut Ahead<T>, usize),
) {
    let w = (weights, stride);
    let mut at = 0;
    // SAFETY: the caller's promise; columns up to `dim`.
    unsafe {
        if S::MANY_REGISTERS {
            while at + 4 * S::LANES <= dim {
                weigh_columns::<S, T, H, 4>(
                    simd,
                    sums,
                    (dim, at),
                    shrink,
                    w,
                    v,
                    (&mut *ahead, blocks),
                );
                at += 4 * S::LANES;
            }
        }
        while at + 2 * S::LANES <= dim {
            weigh_columns::<S, T, H, 2>(simd, sums, (dim, at), shrink, w, v, (&mut *ahead, blocks));
            at += 2 * S::LANES;
        }
        if at + S::LANES <= dim {
            weigh_columns::<S, T, H, 1>(simd, sums, (dim, at), shrink, w, v, (&mut *ahead, blocks));
            at += S::LANES;
        }
        if at < dim {
            for h in 0..H {
                for x in at..dim {
                    let mut sum = *sums.add(h * dim + x) * *shrink.add(h);
                    for (j, v) in v.iter().enumerate() {
                        sum += *weights.add(j * stride + h) * (*v.add(x)).to_f32();
                    }
                    *sums.add(h * dim + x) = sum;
                }
            }
        }
    }
}

/// `C` registers of columns from `at` on, for `H` query vectors.
///
/// # Safety
/// That of [`weigh_block`]; the columns lie below `dim`.
#[inline(always)]
unsafe fn weigh_columns<S: Simd, T: Element, const H: usize, const C: usize>(
    simd: S,
    sums: *mut f32,
    (dim, at): (usize, usize),
    shrink: *const f32,
    (mut weights, stride): (*const f32, usize),
    v: &[*const T],
    (ahead, blocks): (&mut Ahead<T>, usize),
) {
    let lines = (C * S::LANES * size_of::<T>()).div_ceil(LINE * blocks);
    let mut acc = [[simd.splat(0.0); C]; H];
    for h in 0..H {
        // SAFETY: the caller's promise.
        let factor = simd.splat(unsafe { *shrink.add(h) });
        for c in 0..C {
            // SAFETY: row h of `sums` holds `dim` elements, of which these are some.
            let old = unsafe { simd.load_f32(sums.add(h * dim + at + c * S::LANES)) };
            acc[h][c] = simd.mul(old, factor);
        }
    }
    for j in 0..v.len() {
        // SAFETY: the caller's promise.
        unsafe {
            ahead.fetch(simd, lines);
            let row = v.get_unchecked(j).add(at);
            let mut part = [simd.splat(0.0); C];
            for c in 0..C {
                part[c] = T::load(simd, row.add(c * S::LANES));
            }
            for h in 0..H {
                let weight = simd.splat(*weights.add(h));
                for c in 0..C {
                    acc[h][c] = simd.mul_add(weight, part[c], acc[h][c]);
                }
            }
        }
        weights = weights.wrapping_add(stride);
    }
    for h in 0..H {
        for c in 0..C {
            // SAFETY: as for the load above.
            unsafe { simd.store(sums.add(h * dim + at + c * S::LANES), acc[h][c]) };
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::ahead::TILE;
    use super::super::simd::{Task, dispatch_to_each};
    use super::*;

    /// Both products of `n` query vectors of `dim` elements with tokens of type `T`.
    #[derive(Clone)]
    struct Products<T> {
        n: usize,
        dim: usize,
        from_f32: fn(f32) -> T,
    }

    fn ramp(len: usize, step: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * step) % 23) as f32 / 8.0 - 1.25)
            .collect()
    }

    fn assert_near(got: f32, want: f64) {
        let size = want.abs().max(1.0);
        assert!((f64::from(got) - want).abs() < 1e-5 * size, "{got} {want}");
    }

    impl<T: Element> Task for Products<T> {
        fn run<S: Simd>(self, simd: S) {
            let Self { n, dim, from_f32 } = self;
            let stride = n + 3;
            let q = ramp(n * dim, 7);
            // All values are exact in 16 bits.
            let tokens: Vec<Vec<T>> = (0..5)
                .map(|j| ramp(dim, j + 5).into_iter().map(from_f32).collect())
                .collect();
            let rows: Vec<&[T]> = tokens.iter().map(|row| &row[..]).collect();
            let wide = |j: usize, x: usize| f64::from(rows[j][x].to_f32());

            let mut out = vec![f32::NAN; TOKENS * stride];
            let pointers: Vec<*const T> = rows.iter().map(|row| row.as_ptr()).collect();
            let mut ahead = Ahead::new(&[pointers[0]; TILE], &[pointers[1]; TILE], dim);
            let four = [pointers[0], pointers[1], pointers[2], pointers[3]];
            // SAFETY: every row holds `dim` elements.
            unsafe { dots(simd, &q, dim, four, &mut ahead, &mut out, stride) };
            for j in 0..TOKENS {
                for i in 0..n {
                    let want = (0..dim)
                        .map(|x| f64::from(q[i * dim + x]) * wide(j, x))
                        .sum();
                    assert_near(out[j * stride + i], want);
                }
                assert!(out[j * stride + n..][..3].iter().all(|x| x.is_nan()));
            }

            let (shrink, weights) = (ramp(n, 3), ramp(5 * stride, 11));
            let old = ramp(n * dim, 13);
            let mut sums = old.clone();
            // SAFETY: every row holds `dim` elements.
            unsafe {
                weigh(
                    simd,
                    &mut sums,
                    dim,
                    &shrink,
                    (&weights, stride),
                    &pointers,
                    &mut ahead,
                );
            }
            for i in 0..n {
                for x in 0..dim {
                    let kept = f64::from(old[i * dim + x]) * f64::from(shrink[i]);
                    let new: f64 = (0..5)
                        .map(|j| f64::from(weights[j * stride + i]) * wide(j, x))
                        .sum();
                    assert_near(sums[i * dim + x], kept + new);
                }
            }
        }
    }

    #[test]
    fn products_on_every_instruction_set() {
        for n in [1, 3, 4, 7] {
            for dim in [8, 24, 40, 64, 80, 120, 128] {
                dispatch_to_each(Products::<f32> {
                    n,
                    dim,
                    from_f32: |x| x,
                });
                dispatch_to_each(Products {
                    n,
                    dim,
                    from_f32: f16::from_f32,
                });
                dispatch_to_each(Products {
                    n,
                    dim,
                    from_f32: bf16::from_f32,
                });
            }
        }
    }
}
