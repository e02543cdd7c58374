//! The two products of the streaming kernel, in registers: queries with rows of K, weights
//! with rows of V. Both read a K/V row once for four query vectors, and fetch on the way the
//! rows that are needed next (to the second cache level: the first is too small for what is
//! under way).

// Index loops over small constant ranges: they unroll, and the arrays stay in registers.
#![expect(clippy::needless_range_loop)]

use super::element::Element;
use super::simd::Simd;

/// Tokens of a product with K.
pub(super) const TOKENS: usize = 4;

/// Query vectors of a register block.
const VECTORS: usize = 4;

/// `out[j * stride + i] = q[i] · k[j]` for all query vectors `[n, dim]`.
#[inline(always)]
pub(super) fn dots<S: Simd, T: Element>(
    simd: S,
    q: &[f32],
    dim: usize,
    k: [&[T]; TOKENS],
    next: [&[T]; TOKENS],
    out: &mut [f32],
    stride: usize,
) {
    let n = q.len() / dim;
    let mut next = Some(next);
    let mut i = 0;
    while i < n {
        let (q, out) = (&q[i * dim..], &mut out[i..]);
        if n - i >= VECTORS {
            dot_block::<S, T, VECTORS>(simd, q, dim, k, next, out, stride);
            i += VECTORS;
        } else {
            dot_block::<S, T, 1>(simd, q, dim, k, next, out, stride);
            i += 1;
        }
        next = None;
    }
}

#[inline(always)]
fn dot_block<S: Simd, T: Element, const H: usize>(
    simd: S,
    q: &[f32],
    dim: usize,
    k: [&[T]; TOKENS],
    next: Option<[&[T]; TOKENS]>,
    out: &mut [f32],
    stride: usize,
) {
    if S::MANY_REGISTERS {
        dot_tokens::<S, T, H, TOKENS>(simd, q, dim, k, next, out, stride);
    } else {
        let [k0, k1, k2, k3] = k;
        let (low, high) = match next {
            Some([a, b, c, d]) => (Some([a, b]), Some([c, d])),
            None => (None, None),
        };
        dot_tokens::<S, T, H, 2>(simd, q, dim, [k0, k1], low, out, stride);
        dot_tokens::<S, T, H, 2>(simd, q, dim, [k2, k3], high, &mut out[2 * stride..], stride);
    }
}

/// `H * N` sums in registers.
#[inline(always)]
fn dot_tokens<S: Simd, T: Element, const H: usize, const N: usize>(
    simd: S,
    q: &[f32],
    dim: usize,
    k: [&[T]; N],
    next: Option<[&[T]; N]>,
    out: &mut [f32],
    stride: usize,
) {
    assert!(q.len() >= H * dim);
    for n in 0..N {
        assert!(k[n].len() == dim);
    }
    let zero = simd.splat(0.0);
    let mut sums = [[zero; VECTORS]; N];
    let whole = dim - dim % S::LANES;
    let mut at = 0;
    while at < whole {
        let mut part = [zero; N];
        for n in 0..N {
            if let Some(next) = next {
                fetch(simd, next[n], at);
            }
            // SAFETY: `at + LANES <= whole <= dim`, the length of every row of k.
            part[n] = unsafe { T::load(simd, k[n].as_ptr().add(at)) };
        }
        for h in 0..H {
            // SAFETY: as above; q holds H vectors of `dim`.
            let q_part = unsafe { simd.load_f32(q.as_ptr().add(h * dim + at)) };
            for n in 0..N {
                sums[n][h] = simd.mul_add(q_part, part[n], sums[n][h]);
            }
        }
        at += S::LANES;
    }
    for n in 0..N {
        let mut sum = simd.sum4(sums[n]);
        for h in 0..H {
            for at in whole..dim {
                sum[h] += q[h * dim + at] * k[n][at].to_f32();
            }
        }
        out[n * stride..][..H].copy_from_slice(&sum[..H]);
    }
}

/// `sums[i] = sums[i] * shrink[i] + Σ_j weights[j * stride + i] * v[j]` for all query vectors;
/// `sums` is `[n, dim]`.
#[inline(always)]
pub(super) fn weigh<S: Simd, T: Element>(
    simd: S,
    sums: &mut [f32],
    dim: usize,
    shrink: &[f32],
    (weights, stride): (&[f32], usize),
    v: &[&[T]],
    next: &[&[T]],
) {
    let n = sums.len() / dim;
    let mut next = next;
    let mut i = 0;
    while i < n {
        let (sums, shrink) = (&mut sums[i * dim..], &shrink[i..]);
        let weights = (&weights[i..], stride);
        if n - i >= VECTORS {
            weigh_block::<S, T, VECTORS>(simd, sums, dim, shrink, weights, v, next);
            i += VECTORS;
        } else {
            weigh_block::<S, T, 1>(simd, sums, dim, shrink, weights, v, next);
            i += 1;
        }
        next = &[];
    }
}

#[inline(always)]
fn weigh_block<S: Simd, T: Element, const H: usize>(
    simd: S,
    sums: &mut [f32],
    dim: usize,
    shrink: &[f32],
    weights: (&[f32], usize),
    v: &[&[T]],
    next: &[&[T]],
) {
    let mut at = 0;
    if S::MANY_REGISTERS {
        while at + 4 * S::LANES <= dim {
            weigh_columns::<S, T, H, 4>(simd, sums, (dim, at), shrink, weights, v, next);
            at += 4 * S::LANES;
        }
    }
    while at + 2 * S::LANES <= dim {
        weigh_columns::<S, T, H, 2>(simd, sums, (dim, at), shrink, weights, v, next);
        at += 2 * S::LANES;
    }
    if at + S::LANES <= dim {
        weigh_columns::<S, T, H, 1>(simd, sums, (dim, at), shrink, weights, v, next);
        at += S::LANES;
    }
    for h in 0..H {
        for x in at..dim {
            let mut sum = sums[h * dim + x] * shrink[h];
            for (j, v) in v.iter().enumerate() {
                sum += weights.0[j * weights.1 + h] * v[x].to_f32();
            }
            sums[h * dim + x] = sum;
        }
    }
}

/// `C` registers of columns from `at` on, for `H` query vectors.
#[inline(always)]
fn weigh_columns<S: Simd, T: Element, const H: usize, const C: usize>(
    simd: S,
    sums: &mut [f32],
    (dim, at): (usize, usize),
    shrink: &[f32],
    (weights, stride): (&[f32], usize),
    v: &[&[T]],
    next: &[&[T]],
) {
    assert!(sums.len() >= H * dim && at + C * S::LANES <= dim);
    let mut acc = [[simd.splat(0.0); C]; H];
    for h in 0..H {
        let factor = simd.splat(shrink[h]);
        for c in 0..C {
            // SAFETY: row h of `sums` holds `dim` elements, of which these are some.
            let old = unsafe { simd.load_f32(sums.as_ptr().add(h * dim + at + c * S::LANES)) };
            acc[h][c] = simd.mul(old, factor);
        }
    }
    for j in 0..v.len() {
        let row = v[j];
        assert!(row.len() == dim);
        let mut part = [simd.splat(0.0); C];
        for c in 0..C {
            if let Some(next) = next.get(j) {
                fetch(simd, next, at + c * S::LANES);
            }
            // SAFETY: the row holds `dim` elements.
            part[c] = unsafe { T::load(simd, row.as_ptr().add(at + c * S::LANES)) };
        }
        let weights = &weights[j * stride..][..H];
        for h in 0..H {
            let weight = simd.splat(weights[h]);
            for c in 0..C {
                acc[h][c] = simd.mul_add(weight, part[c], acc[h][c]);
            }
        }
    }
    for h in 0..H {
        for c in 0..C {
            // SAFETY: as for the load above.
            unsafe {
                simd.store(
                    sums.as_mut_ptr().add(h * dim + at + c * S::LANES),
                    acc[h][c],
                );
            }
        }
    }
}

/// Asks for the part of a row that starts `at` elements in.
#[inline(always)]
fn fetch<S: Simd, T>(simd: S, row: &[T], at: usize) {
    simd.prefetch(row.as_ptr().wrapping_add(at));
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

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
            let four = [rows[0], rows[1], rows[2], rows[3]];
            dots(simd, &q, dim, four, four, &mut out, stride);
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
            weigh(
                simd,
                &mut sums,
                dim,
                &shrink,
                (&weights, stride),
                &rows,
                &rows[..2],
            );
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
