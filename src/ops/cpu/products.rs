//! The two products of the streaming kernel, in registers: queries with rows of K, weights
//! with rows of V. Both read a K/V row once for up to four query vectors, and fetch on the way
//! what is needed later.

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use super::ahead::Ahead;
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

/// One head of some rows.
pub(super) struct Head<'a, T> {
    pub rows: &'a [*const T],
    /// At least as many rows, to be asked for while those are used.
    pub later: &'a [*const T],
    /// Its first element in a row.
    pub offset: usize,
}

// Not derived: that would ask for `T: Copy`.
impl<T> Clone for Head<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Head<'_, T> {}

impl<T> Head<'_, T> {
    /// Of the register blocks that go through the same rows the first asks for later ones.
    #[inline(always)]
    fn of_block(self, block: usize) -> Self {
        let later = if block == 0 { self.later } else { self.rows };
        Self { later, ..self }
    }

    /// Start of the head in a row, and in the one that is asked for meanwhile.
    ///
    /// # Safety
    /// There is a row `i`, and a later one.
    #[inline(always)]
    unsafe fn row(&self, i: usize) -> (*const T, *const T) {
        // SAFETY: the caller's promise.
        let (row, later) = unsafe { (self.rows.get_unchecked(i), self.later.get_unchecked(i)) };
        (
            row.wrapping_add(self.offset),
            later.wrapping_add(self.offset),
        )
    }
}

/// Register blocks that `vectors` query vectors make.
pub(super) fn blocks(vectors: usize) -> usize {
    vectors.div_ceil(VECTORS)
}

/// Calls `$f::<S, T, H>` for blocks of as many query vectors as a register block takes, the
/// last one smaller.
macro_rules! blocks_of_vectors {
    ($n:expr, $i:ident, $f:ident ( $($arg:expr),* $(,)? )) => {
        for $i in (0..$n).step_by(VECTORS) {
            match $n - $i {
                1 => $f::<S, T, 1>($($arg),*),
                2 => $f::<S, T, 2>($($arg),*),
                3 => $f::<S, T, 3>($($arg),*),
                _ => $f::<S, T, 4>($($arg),*),
            }
        }
    };
}

/// `out[j * stride + i] = q[i] · k[j]` for all query vectors `[n, dim]`, in load order.
///
/// # Safety
/// Each of the rows of `k` has `dim` elements from its offset on.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, T: Element>(
    simd: S,
    q: &[f32],
    dim: usize,
    k: Head<'_, T>,
    ahead: &mut Ahead<'_, T>,
    out: &mut [f32],
    stride: usize,
) {
    let n = q.len() / dim;
    assert!(q.len() == n * dim && out.len() >= (TOKENS - 1) * stride + n);
    assert!(k.rows.len() >= TOKENS && k.later.len() >= TOKENS);
    let (q, out) = (q.as_ptr(), out.as_mut_ptr());
    // SAFETY: the caller's promise; q holds vectors up to n, and `out` all of their products.
    unsafe {
        blocks_of_vectors!(
            n,
            i,
            dot_block(
                simd,
                q.add(i * dim),
                dim,
                k.of_block(i),
                &mut *ahead,
                out.add(i),
                stride
            )
        );
    }
}

/// # Safety
/// `q` points at `H * dim` elements, `k` has [`TOKENS`] rows, each with `dim` elements from its
/// offset on, and `out` points at rows of `H` places `stride` apart, one for each token.
#[inline(always)]
unsafe fn dot_block<S: Simd, T: Element, const H: usize>(
    simd: S,
    q: *const f32,
    dim: usize,
    k: Head<'_, T>,
    ahead: &mut Ahead<'_, T>,
    out: *mut f32,
    stride: usize,
) {
    const { assert!(TOKENS == 4) };
    // SAFETY: the caller's promise.
    unsafe {
        let [k0, k1, k2, k3] = [k.row(0), k.row(1), k.row(2), k.row(3)];
        if S::MANY_REGISTERS {
            dot_tokens::<S, T, H, 4>(simd, q, dim, [k0, k1, k2, k3], ahead, out, stride);
        } else {
            dot_tokens::<S, T, H, 2>(simd, q, dim, [k0, k1], ahead, out, stride);
            let out = out.add(2 * stride);
            dot_tokens::<S, T, H, 2>(simd, q, dim, [k2, k3], ahead, out, stride);
        }
    }
}

/// `H * N` sums in registers.
///
/// # Safety
/// That of [`dot_block`], for `N` tokens: the first of each pair points at `dim` elements.
#[inline(always)]
unsafe fn dot_tokens<S: Simd, T: Element, const H: usize, const N: usize>(
    simd: S,
    q: *const f32,
    dim: usize,
    rows: [(*const T, *const T); N],
    ahead: &mut Ahead<'_, T>,
    out: *mut f32,
    stride: usize,
) {
    let mut sums = [[simd.splat(0.0); VECTORS]; VECTORS];
    let (k, later) = (rows.map(|row| row.0), rows.map(|row| row.1));
    let pair = 2 * S::LANES;
    let mut at = 0;
    // SAFETY: all elements below are before `dim`.
    unsafe {
        while at + pair <= dim {
            ahead.fetch(simd, later, at, pair);
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
            ahead.fetch(simd, later, at, S::LANES);
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
    if at < dim {
        for (k, totals) in k.iter().zip(&mut totals) {
            for (h, total) in totals.iter_mut().enumerate().take(H) {
                for at in at..dim {
                    // SAFETY: `at < dim`.
                    *total += unsafe { *q.add(h * dim + at) * (*k.add(at)).to_f32() };
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

/// `sums[i] = sums[i] * shrink[i] + Σ_j weights[j * stride + i] * v[j]` for all query vectors;
/// `sums` is `[n, dim]`, in load order.
///
/// # Safety
/// Each of the rows of `v` has `dim` elements from its offset on.
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd, T: Element>(
    simd: S,
    sums: &mut [f32],
    dim: usize,
    shrink: &[f32],
    (weights, stride): (&[f32], usize),
    v: Head<'_, T>,
    ahead: &mut Ahead<'_, T>,
) {
    let n = sums.len() / dim;
    assert!(sums.len() == n * dim && shrink.len() >= n);
    assert!(!v.rows.is_empty() && v.later.len() >= v.rows.len());
    assert!(weights.len() >= (v.rows.len() - 1) * stride + n);
    let sums = sums.as_mut_ptr();
    let (shrink, weights) = (shrink.as_ptr(), weights.as_ptr());
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
                v.of_block(i),
                &mut *ahead
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
    v: Head<'_, T>,
    ahead: &mut Ahead<'_, T>,
) {
    let w = (weights, stride);
    let mut at = 0;
    // SAFETY: the caller's promise; columns up to `dim`.
    unsafe {
        if S::MANY_REGISTERS {
            while at + 4 * S::LANES <= dim {
                weigh_columns::<S, T, H, 4>(simd, sums, (dim, at), shrink, w, v, &mut *ahead);
                at += 4 * S::LANES;
            }
        }
        while at + 2 * S::LANES <= dim {
            weigh_columns::<S, T, H, 2>(simd, sums, (dim, at), shrink, w, v, &mut *ahead);
            at += 2 * S::LANES;
        }
        if at + S::LANES <= dim {
            weigh_columns::<S, T, H, 1>(simd, sums, (dim, at), shrink, w, v, &mut *ahead);
            at += S::LANES;
        }
        if at < dim {
            for h in 0..H {
                for x in at..dim {
                    let mut sum = *sums.add(h * dim + x) * *shrink.add(h);
                    for j in 0..v.rows.len() {
                        sum += *weights.add(j * stride + h) * (*v.row(j).0.add(x)).to_f32();
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
    v: Head<'_, T>,
    ahead: &mut Ahead<'_, T>,
) {
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
    for j in 0..v.rows.len() {
        // SAFETY: the caller's promise.
        unsafe {
            let (row, later) = v.row(j);
            ahead.fetch(simd, [later], at, C * S::LANES);
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

    use super::super::ahead::TILE;
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
            let tiles = [pointers[0]; 2 * TILE];
            let mut ahead = Ahead::new(&tiles, [dim, dim], blocks(n));
            let head = Head {
                rows: &pointers,
                later: ahead.later(0),
                offset: 0,
            };
            let mut loaded = q.clone();
            loaded.chunks_exact_mut(dim).for_each(to_load_order::<S, T>);
            // SAFETY: every row holds `dim` elements.
            unsafe { dots(simd, &loaded, dim, head, &mut ahead, &mut out, stride) };
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
                    head,
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
