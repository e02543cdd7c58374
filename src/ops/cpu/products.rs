//! The two products of the streaming kernel, in registers: queries with rows of K, weights
//! with rows of V. Both read a K/V row once for up to four query vectors, and fetch on the way
//! what is needed later.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use super::ahead::{Ahead, LINE};
use super::element::Element;
use super::simd::{MAX_LANES, Simd};

/// Tokens of a product with K.
pub(super) const TOKENS: usize = 4;

/// Query vectors of a register block, at most.
const VECTORS: usize = 4;

/// Puts the elements of a query in the order in which those of K are loaded: whole pairs of
/// registers may hold even and odd elements.
#[inline(always)]
pub(super) fn to_load_order<S: Simd, T: Element>(vector: &mut [f32]) {
    if !T::EVEN_ODD {
        return;
    }
    for pair in vector.chunks_exact_mut(2 * S::LANES) {
        let mut copy = [0.0; 2 * MAX_LANES];
        copy[..2 * S::LANES].copy_from_slice(pair);
        for i in 0..S::LANES {
            pair[i] = copy[2 * i];
            pair[S::LANES + i] = copy[2 * i + 1];
        }
    }
}

/// What [`to_load_order`] did, undone.
#[inline(always)]
pub(super) fn from_load_order<S: Simd, T: Element>(vector: &mut [f32]) {
    if !T::EVEN_ODD {
        return;
    }
    for pair in vector.chunks_exact_mut(2 * S::LANES) {
        let mut copy = [0.0; 2 * MAX_LANES];
        copy[..2 * S::LANES].copy_from_slice(pair);
        for i in 0..S::LANES {
            pair[2 * i] = copy[i];
            pair[2 * i + 1] = copy[S::LANES + i];
        }
    }
}

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

/// `out[j * stride + i] = q[i] · k[j]` for all query vectors `[n, dim]`, in load order.
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
    let mut sums = [[simd.splat(0.0); VECTORS]; VECTORS];
    let pair = 2 * S::LANES;
    // Every line of K once, spread over the blocks that read it.
    let lines = (N * pair * size_of::<T>()).div_ceil(LINE * blocks);
    let mut at = 0;
    // SAFETY: all elements below are before `dim`.
    unsafe {
        while at + pair <= dim {
            ahead.fetch(simd, lines);
            let mut part = [[simd.splat(0.0); 2]; N];
            for n in 0..N {
                part[n] = T::load_pair(simd, k[n].add(at));
            }
            for half in 0..2 {
                for h in 0..H {
                    let q = simd.load_f32(q.add(h * dim + at + half * S::LANES));
                    for n in 0..N {
                        sums[n][h] = simd.mul_add(q, part[n][half], sums[n][h]);
                    }
                }
            }
            at += pair;
        }
        if at + S::LANES <= dim {
            ahead.fetch(simd, lines.div_ceil(2));
            for n in 0..N {
                let part = T::load(simd, k[n].add(at));
                for h in 0..H {
                    sums[n][h] = simd.mul_add(simd.load_f32(q.add(h * dim + at)), part, sums[n][h]);
                }
            }
            at += S::LANES;
        }
    }
    let mut totals = simd.sum4x4(sums);
    for (n, totals) in totals.iter_mut().enumerate().take(N) {
        for (h, total) in totals.iter_mut().enumerate().take(H) {
            for at in at..dim {
                // SAFETY: `at < dim`.
                *total += unsafe { *q.add(h * dim + at) * (*k[n].add(at)).to_f32() };
            }
            // SAFETY: the caller's promise.
            unsafe { *out.add(n * stride + h) = *total };
        }
    }
}

/// `sums[i] = sums[i] * shrink[i] + Σ_j weights[j * stride + i] * v[j]` for all query vectors;
/// `sums` is `[n, dim]`, in load order.
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
/// That of [`weigh`]; `sums` points at `H * dim` elements, `shrink` at `H`, and `weights` at rows
/// of `H` that are `stride` apart, one for each row of `v`.
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
                    for (j, row) in v.iter().enumerate() {
                        sum += *weights.add(j * stride + h) * (*row.add(x)).to_f32();
                    }
                    *sums.add(h * dim + x) = sum;
                }
            }
        }
    }
}

/// `C` registers of columns from `at` on, for `H` query vectors: pairs of them, or one.
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
    for &row in v {
        // SAFETY: the caller's promise.
        unsafe {
            ahead.fetch(simd, lines);
            let row = row.add(at);
            let mut part = [simd.splat(0.0); C];
            if C == 1 {
                part[0] = T::load(simd, row);
            }
            for c in (1..C).step_by(2) {
                let pair = T::load_pair(simd, row.add((c - 1) * S::LANES));
                (part[c - 1], part[c]) = (pair[0], pair[1]);
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

    use super::super::ahead::{Rows, TILE};
    use super::super::simd::{Isa, Task};
    use super::*;

    /// Both products of `n` query vectors of `dim` elements with tokens of type `T`.
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
            let tile = |row| Rows {
                start: [pointers[row]; TILE],
                len: dim,
            };
            let mut ahead = Ahead::new(&tile(0), &tile(1));
            let four = [pointers[0], pointers[1], pointers[2], pointers[3]];
            let mut loaded = q.clone();
            loaded.chunks_exact_mut(dim).for_each(to_load_order::<S, T>);
            // SAFETY: every row holds `dim` elements.
            unsafe { dots(simd, &loaded, dim, four, &mut ahead, &mut out, stride) };
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
            sums.chunks_exact_mut(dim).for_each(to_load_order::<S, T>);
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
            sums.chunks_exact_mut(dim).for_each(from_load_order::<S, T>);
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

    fn products_of<T: Element>(n: usize, dim: usize, from_f32: fn(f32) -> T) {
        for isa in Isa::all() {
            isa.run(Products { n, dim, from_f32 });
        }
    }

    #[test]
    fn products_on_every_instruction_set() {
        for n in [1, 3, 4, 7] {
            for dim in [8, 24, 40, 64, 80, 120, 128] {
                products_of::<f32>(n, dim, |x| x);
                products_of(n, dim, f16::from_f32);
                products_of(n, dim, bf16::from_f32);
            }
        }
    }
}
