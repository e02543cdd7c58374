//! From scores to weights: cap, slope, mask, online softmax. Plain loops over a row of
//! scores, inlined into the kernels and vectorised with them.

use std::ops::Range;

use super::simd::{MAX_LANES, Simd};
use crate::ops::{AttentionOptions, Mask};

/// Keys that a query at `position` sees of a context of `len` tokens.
pub(super) fn visible(mask: Mask, position: i64, len: usize) -> Range<usize> {
    mask.keys(position, len)
}

/// Turns the scaled products of one query with the keys from `first` on into scores; hidden
/// keys get −inf by assignment, so that whatever was there does not matter.
#[inline(always)]
pub(super) fn finish_scores(
    scores: &mut [f32],
    first: usize,
    position: i64,
    visible: &Range<usize>,
    head: usize,
    options: &AttentionOptions,
) {
    if let Some(cap) = options.softcap {
        let inverse = 1.0 / cap;
        for s in scores.iter_mut() {
            *s = cap * tanh(*s * inverse);
        }
    }
    if let Some(slopes) = &options.alibi_slopes {
        let slope = slopes[head];
        let distance = first as i64 - position;
        for (j, s) in scores.iter_mut().enumerate() {
            *s += slope * (distance + j as i64) as f32;
        }
    }
    let before = visible.start.saturating_sub(first).min(scores.len());
    let until = visible.end.saturating_sub(first).min(scores.len());
    scores[..before].fill(f32::NEG_INFINITY);
    scores[until.max(before)..].fill(f32::NEG_INFINITY);
}

/// The running softmax of one row (Milakov and Gimelshein 2018): largest score so far, and
/// the sum of `e^(score − max)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Running {
    pub max: f32,
    pub sum: f32,
}

impl Running {
    pub(super) const EMPTY: Self = Self {
        max: f32::NEG_INFINITY,
        sum: 0.0,
    };

    /// Replaces scores by weights relative to the new maximum and returns the factor by which
    /// everything accumulated before shrinks.
    ///
    /// While all scores are −inf, weights are 0. A NaN score gives a NaN sum.
    #[inline(always)]
    pub(super) fn absorb<S: Simd>(&mut self, simd: S, scores: &mut [f32]) -> f32 {
        let max = largest(simd, scores).max(self.max);
        let base = base(max);
        let shrink = exp(self.max - base);
        let sum = to_weights(simd, scores, base);
        self.max = max;
        self.sum = self.sum * shrink + sum;
        shrink
    }
}

/// What to subtract from scores of which `max` is the largest: itself, or 0 while there is
/// none, because −inf − −inf is NaN.
#[inline(always)]
pub(super) fn base(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

/// The largest value; NaN is passed over.
#[inline(always)]
fn largest<S: Simd>(simd: S, values: &[f32]) -> f32 {
    let mut lanes = simd.splat(f32::NEG_INFINITY);
    let mut chunks = values.chunks_exact(S::LANES);
    for chunk in &mut chunks {
        // SAFETY: the chunk has LANES elements.
        lanes = simd.max(unsafe { simd.load_f32(chunk.as_ptr()) }, lanes);
    }
    let mut max = f32::NEG_INFINITY;
    for &x in to_array(simd, lanes)[..S::LANES]
        .iter()
        .chain(chunks.remainder())
    {
        max = if x > max { x } else { max };
    }
    max
}

/// `s = e^(s − base)` for all scores; their sum.
#[inline(always)]
fn to_weights<S: Simd>(simd: S, scores: &mut [f32], base: f32) -> f32 {
    let base = simd.splat(base);
    let mut sums = simd.splat(0.0);
    let mut chunks = scores.chunks_exact_mut(S::LANES);
    for chunk in &mut chunks {
        // SAFETY: the chunk has LANES elements.
        unsafe {
            let score = simd.load_f32(chunk.as_ptr());
            let weight = exp_of(simd, simd.sub(score, base));
            simd.store(chunk.as_mut_ptr(), weight);
            sums = simd.add(weight, sums);
        }
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; MAX_LANES];
        last[..rest.len()].copy_from_slice(rest);
        // SAFETY: LANES elements, by the assertion in `to_array`.
        let score = unsafe { simd.load_f32(last.as_ptr()) };
        let weight = exp_of(simd, simd.sub(score, base));
        rest.copy_from_slice(&to_array(simd, weight)[..rest.len()]);
        sums = simd.add(weight, sums);
    }
    to_array(simd, sums)[..S::LANES].iter().sum()
}

/// The lanes of a register, and zeros.
#[inline(always)]
pub(super) fn to_array<S: Simd>(simd: S, register: S::V) -> [f32; MAX_LANES] {
    const { assert!(S::LANES <= MAX_LANES) };
    let mut array = [0.0; MAX_LANES];
    // SAFETY: LANES elements fit, by the assertion.
    unsafe { simd.store(array.as_mut_ptr(), register) };
    array
}

/// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 10 bits, so that n times it is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below it `e^x` is no normal number.
const LEAST: f32 = -87.336_54;

/// `e^x` for `x ≤ 0` within 2 ulp; 0 below the normal numbers; NaN stays NaN.
///
/// `x = n ln 2 + r` with `|r| ≤ ln 2 / 2` and a Taylor polynomial of degree 7 in `r`, whose
/// remainder is below 1e-8. Branch-free.
#[inline(always)]
pub(super) fn exp_of<S: Simd>(simd: S, x: S::V) -> S::V {
    let shifted = simd.mul_add(x, simd.splat(std::f32::consts::LOG2_E), simd.splat(ROUND));
    let n = simd.sub(shifted, simd.splat(ROUND));
    let r = simd.mul_add(n, simd.splat(-LN2_HIGH), x);
    let r = simd.mul_add(n, simd.splat(-LN2_LOW), r);
    let mut p = simd.splat(1.0 / 5040.0);
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = simd.mul_add(p, r, simd.splat(c));
    }
    // A product, not an addition to the exponent: NaN must survive.
    let y = simd.mul(p, simd.pow2(shifted));
    simd.unless_below(x, simd.splat(LEAST), y)
}

/// As [`exp_of`], of one number.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    // A product, not an addition to the exponent: NaN must survive.
    if x < LEAST { 0.0 } else { p * scale }
}

/// `tanh x` within a few ulp: a Taylor polynomial near 0, where the quotient would cancel,
/// else `(1 − e^−2|x|) / (1 + e^−2|x|)`. Branch-free.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    let far = ((1.0 - e) / (1.0 + e)).copysign(x);
    let y = x * x;
    let mut p = 21_844.0 / 6_081_075.0;
    p = p * y - 1_382.0 / 155_925.0;
    p = p * y + 62.0 / 2_835.0;
    p = p * y - 17.0 / 315.0;
    p = p * y + 2.0 / 15.0;
    p = p * y - 1.0 / 3.0;
    p = p * y + 1.0;
    if x.abs() < 0.5 { p * x } else { far }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, Plain, Task};
    use super::*;

    fn assert_exp(exp: impl Fn(f32) -> f32) {
        let mut x = -87.0f32;
        while x <= 0.0 {
            let want = f64::from(x).exp();
            let off = (f64::from(exp(x)) - want).abs() / want;
            assert!(off < 2.4e-7, "{x}: off by {off:e}");
            x += 0.001_37;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-90.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::from_bits(0xffff_ffff)).is_nan());
    }

    struct Exp;

    impl Task for Exp {
        fn run<S: Simd>(self, simd: S) {
            assert_exp(|x| to_array(simd, exp_of(simd, simd.splat(x)))[S::LANES - 1]);
        }
    }

    #[test]
    fn exp_is_within_two_ulp_and_keeps_the_special_values() {
        assert_exp(exp);
        Isa::all().into_iter().for_each(|isa| isa.run(Exp));
    }

    #[test]
    fn tanh_is_within_a_few_ulp_and_keeps_the_special_values() {
        let mut x = -12.0f32;
        while x <= 12.0 {
            let want = f64::from(x).tanh();
            let off = (f64::from(tanh(x)) - want).abs() / want.abs().max(1e-30);
            assert!(off < 5e-7, "{x}: off by {off:e}");
            x += 0.000_73;
        }
        assert_eq!(tanh(0.0), 0.0);
        assert_eq!(tanh(1e5), 1.0);
        assert_eq!(tanh(f32::NEG_INFINITY), -1.0);
        assert!(tanh(f32::NAN).is_nan());
    }

    /// A row in parts has the sum of the whole.
    struct Parts;

    impl Task for Parts {
        fn run<S: Simd>(self, simd: S) {
            let scores: Vec<f32> = (0..100)
                .map(|i| ((i * 37) % 41) as f32 * 0.3 - 5.0)
                .collect();
            let want: f64 = scores.iter().map(|&s| f64::from(s).exp()).sum();
            let mut running = Running::EMPTY;
            for part in scores.chunks(23) {
                running.absorb(simd, &mut part.to_vec());
            }
            let lse = f64::from(running.max) + f64::from(running.sum).ln();
            assert!((lse - want.ln()).abs() < 1e-6);
            running.absorb(simd, &mut [f32::NAN; 17]);
            assert!(running.sum.is_nan(), "a NaN that is seen must not be lost");
        }
    }

    #[test]
    fn a_row_absorbed_in_parts_has_the_sum_of_the_whole() {
        Isa::all().into_iter().for_each(|isa| isa.run(Parts));
    }

    #[test]
    fn hidden_scores_weigh_nothing_whatever_they_were() {
        let mut running = Running::EMPTY;
        let mut scores = [f32::NAN, 1.0, f32::INFINITY];
        let options = AttentionOptions::new(1.0);
        finish_scores(&mut scores, 4, 5, &(5..6), 0, &options);
        assert_eq!(running.absorb(Plain, &mut scores), 0.0);
        assert_eq!(scores, [0.0, 1.0, 0.0]);
        let mut hidden = [f32::NAN; 3];
        finish_scores(&mut hidden, 6, 5, &(5..6), 0, &options);
        assert_eq!(running.absorb(Plain, &mut hidden), 1.0);
        assert_eq!((running.max, running.sum), (1.0, 1.0));
    }
}
