//! From scores to weights: cap, mask, online softmax. Plain loops over scores are inlined into
//! the kernels and vectorised with them.

use std::ops::Range;

use super::simd::{MAX_LANES, Simd};
use crate::ops::Mask;

/// Keys that a query at `position` sees of a context of `len` tokens.
pub(super) fn visible(mask: Mask, position: i64, len: usize) -> Range<usize> {
    mask.keys(position, len)
}

/// The soft cap of scaled products.
#[inline(always)]
pub(super) fn cap_scores(scores: &mut [f32], cap: f32) {
    let inverse = 1.0 / cap;
    for s in scores {
        *s = cap * tanh(*s * inverse);
    }
}

/// The running softmax of a query vector (Milakov and Gimelshein 2018): largest score so far, and
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
}

/// One online softmax step of each lane: replaces the scores, `[keys, lanes]`, by weights
/// relative to the new maximum, and says in `shrink` by which factor everything accumulated
/// before shrinks. Whole registers of lanes.
///
/// While all scores are −inf, weights are 0. A NaN score gives a NaN sum.
#[inline(always)]
pub(super) fn absorb<S: Simd>(
    simd: S,
    max: &mut [f32],
    sum: &mut [f32],
    shrink: &mut [f32],
    scores: &mut [f32],
) {
    let width = max.len();
    let keys = scores.len() / width;
    assert!(width.is_multiple_of(S::LANES) && sum.len() == width && shrink.len() == width);
    for lane in (0..width).step_by(S::LANES) {
        // SAFETY: `width` is a multiple of LANES, so a register from `lane` on lies in each
        // of the three slices and in the row of each key.
        unsafe {
            let old = simd.load_f32(max.as_ptr().add(lane));
            let scores = scores.as_mut_ptr().add(lane);
            let mut new = old;
            for key in 0..keys {
                new = simd.max(simd.load_f32(scores.add(key * width)), new);
            }
            simd.store(max.as_mut_ptr().add(lane), new);
            // As `base`.
            let base = simd.unless_below(new, simd.splat(f32::MIN), new);
            let factor = exp_of(simd, simd.sub(old, base));
            simd.store(shrink.as_mut_ptr().add(lane), factor);
            let mut part = simd.splat(0.0);
            for key in 0..keys {
                let score = scores.add(key * width);
                let weight = exp_of(simd, simd.sub(simd.load_f32(score), base));
                simd.store(score, weight);
                part = simd.add(part, weight);
            }
            let sum = sum.as_mut_ptr().add(lane);
            simd.store(sum, simd.mul_add(simd.load_f32(sum), factor, part));
        }
    }
}

/// What to subtract from scores of which `max` is the largest: itself, or 0 while there is
/// none, because −inf − −inf is NaN.
#[inline(always)]
pub(super) fn base(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
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
    use super::super::simd::{Isa, Task};
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

    /// Lanes whose scores go by in parts have the sums of the whole.
    struct Parts;

    impl Task for Parts {
        fn run<S: Simd>(self, simd: S) {
            let width = 2 * S::LANES;
            let score = |key: usize, lane: usize| ((key * 37 + lane * 11) % 41) as f32 * 0.3 - 5.0;
            let scores: Vec<f32> = (0..100 * width)
                .map(|i| score(i / width, i % width))
                .collect();
            let (mut max, mut sum) = (vec![f32::NEG_INFINITY; width], vec![0.0; width]);
            let mut shrink = vec![0.0; width];
            for part in scores.chunks(23 * width) {
                absorb(simd, &mut max, &mut sum, &mut shrink, &mut part.to_vec());
            }
            for lane in 0..width {
                let scores = (0..100).map(|key| f64::from(score(key, lane)).exp());
                let want = scores.sum::<f64>().ln();
                let lse = f64::from(max[lane]) + f64::from(sum[lane]).ln();
                assert!((lse - want).abs() < 1e-6, "lane {lane}: {lse}, not {want}");
            }
            let mut scores = vec![0.0; 3 * width];
            scores[width] = f32::NAN;
            absorb(simd, &mut max, &mut sum, &mut shrink, &mut scores);
            assert!(sum[0].is_nan(), "a NaN that is seen must not be lost");
            assert!(sum[1..].iter().all(|sum| sum.is_finite()));
        }
    }

    #[test]
    fn lanes_absorbed_in_parts_have_the_sums_of_the_whole() {
        Isa::all().into_iter().for_each(|isa| isa.run(Parts));
    }

    /// Scores that are −inf weigh nothing, before and after the first that is not.
    struct Hidden;

    impl Task for Hidden {
        fn run<S: Simd>(self, simd: S) {
            let width = S::LANES;
            let (mut max, mut sum) = (vec![f32::NEG_INFINITY; width], vec![0.0; width]);
            let mut shrink = vec![1.0; width];
            let mut absorb = |keys: &[f32]| {
                let mut scores: Vec<f32> = keys.iter().flat_map(|&s| vec![s; width]).collect();
                absorb(simd, &mut max, &mut sum, &mut shrink, &mut scores);
                let weights: Vec<f32> = scores.iter().step_by(width).copied().collect();
                (weights, max[0], sum[0], shrink[0])
            };
            let hidden = f32::NEG_INFINITY;
            assert_eq!(absorb(&[hidden; 3]), (vec![0.0; 3], hidden, 0.0, 0.0));
            let first = absorb(&[hidden, 1.0, hidden]);
            assert_eq!(first, (vec![0.0, 1.0, 0.0], 1.0, 1.0, 0.0));
            assert_eq!(absorb(&[hidden; 2]), (vec![0.0; 2], 1.0, 1.0, 1.0));
        }
    }

    #[test]
    fn hidden_scores_weigh_nothing() {
        Isa::all().into_iter().for_each(|isa| isa.run(Hidden));
    }
}
