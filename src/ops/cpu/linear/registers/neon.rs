//! Products of bytes on AArch64, all of signed ones.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::super::simd::{Neon, Simd};
use super::{ByteSimd, ByteTask, top_mask};

/// NEON with products of four bytes (`DOT`: Cortex-A75, Apple A11, Neoverse N1 and later) or
/// only of one.
#[derive(Clone, Copy)]
pub(super) struct Bytes<const DOT: bool>(Neon);

impl Bytes<true> {
    pub(super) fn detect() -> Option<Self> {
        let has = std::arch::is_aarch64_feature_detected!("dotprod");
        has.then(Neon::detect).flatten().map(Self)
    }
}

impl Bytes<false> {
    pub(super) fn detect() -> Option<Self> {
        Neon::detect().map(Self)
    }
}

impl<const DOT: bool> Bytes<DOT> {
    pub(super) fn run<T: ByteTask>(self, task: T) {
        #[target_feature(enable = "neon")]
        fn compiled<T: ByteTask, const DOT: bool>(task: T, simd: Bytes<DOT>) {
            task.run(simd);
        }
        // SAFETY: `detect`, the only maker of `self`, found the feature.
        unsafe { compiled(task, self) }
    }

    /// Adds to each lane the products of its four bytes, none of `x` is −128.
    #[inline(always)]
    fn dot(self, sum: int32x4_t, weights: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: `self` proves that the machine has the instructions. (The intrinsic for the
        // first is not stable.)
        unsafe {
            if DOT {
                let mut sum = sum;
                asm!(
                    ".arch_extension dotprod",
                    "sdot {sum:v}.4s, {weights:v}.16b, {x:v}.16b",
                    sum = inout(vreg) sum,
                    weights = in(vreg) weights,
                    x = in(vreg) x,
                    options(pure, nomem, nostack, preserves_flags)
                );
                sum
            } else {
                // 2 * 128 * 127 fits 16 bits.
                let low = vmull_s8(vget_low_s8(weights), vget_low_s8(x));
                vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(weights, x)))
            }
        }
    }

    /// As [`Self::dot`], of both pairs; weights are below 64.
    #[inline(always)]
    fn dot_both(self, sum: int32x4_t, weights: [int8x16_t; 2], x: [int8x16_t; 2]) -> int32x4_t {
        if DOT {
            return self.dot(self.dot(sum, weights[0], x[0]), weights[1], x[1]);
        }
        // SAFETY: `self` proves that the machine has NEON. Four products of 63 and 127 fit 16
        // bits.
        unsafe {
            let low = vmull_s8(vget_low_s8(weights[0]), vget_low_s8(x[0]));
            let low = vmlal_s8(low, vget_low_s8(weights[1]), vget_low_s8(x[1]));
            let high = vmull_high_s8(weights[0], x[0]);
            let high = vmlal_high_s8(high, weights[1], x[1]);
            vpadalq_s16(sum, vpaddq_s16(low, high))
        }
    }
}

// The SAFETY of every intrinsic below: `self` proves that the machine has the feature, and
// pointers are as the caller promised.
impl<const DOT: bool> ByteSimd for Bytes<DOT> {
    type Floats = Neon;
    type I = int32x4x2_t;
    const BYTE_OFFSET: i32 = 0;

    #[inline(always)]
    fn floats(self) -> Neon {
        self.0
    }

    #[inline(always)]
    fn splat(self, x: i32) -> int32x4x2_t {
        // SAFETY: see above.
        unsafe { int32x4x2_t(vdupq_n_s32(x), vdupq_n_s32(x)) }
    }

    #[inline(always)]
    unsafe fn load(self, src: *const u8) -> int32x4x2_t {
        // SAFETY: see above.
        unsafe { int32x4x2_t(vld1q_s32(src.cast()), vld1q_s32(src.add(16).cast())) }
    }

    #[inline(always)]
    fn dot_bytes(self, sum: int32x4x2_t, bytes: int32x4x2_t, x: int32x4x2_t) -> int32x4x2_t {
        // SAFETY: see above.
        unsafe {
            let offset = vdupq_n_s8(-128);
            int32x4x2_t(
                self.dot(sum.0, veorq_s8(quads(bytes.0), offset), quads(x.0)),
                self.dot(sum.1, veorq_s8(quads(bytes.1), offset), quads(x.1)),
            )
        }
    }

    #[inline(always)]
    fn dot_nibbles(
        self,
        sum: int32x4x2_t,
        nibbles: int32x4x2_t,
        low: int32x4x2_t,
        high: int32x4x2_t,
    ) -> int32x4x2_t {
        // SAFETY: see above.
        unsafe {
            int32x4x2_t(
                self.dot_both(sum.0, halves(nibbles.0), [quads(low.0), quads(high.0)]),
                self.dot_both(sum.1, halves(nibbles.1), [quads(low.1), quads(high.1)]),
            )
        }
    }

    #[inline(always)]
    fn dot_topped<const BITS: u32>(
        self,
        sum: int32x4x2_t,
        nibbles: int32x4x2_t,
        tops: int32x4x2_t,
        at: u32,
        low: int32x4x2_t,
        high: int32x4x2_t,
    ) -> int32x4x2_t {
        // SAFETY: see above.
        unsafe {
            let first = topped::<BITS>(nibbles.0, tops.0, at);
            let second = topped::<BITS>(nibbles.1, tops.1, at);
            int32x4x2_t(
                self.dot_both(sum.0, first, [quads(low.0), quads(high.0)]),
                self.dot_both(sum.1, second, [quads(low.1), quads(high.1)]),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, src: *const i8) -> int32x4x2_t {
        // SAFETY: see above.
        unsafe {
            let wide = vmovl_s8(vld1_s8(src));
            int32x4x2_t(vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide))
        }
    }

    #[inline(always)]
    fn mul_add(self, a: int32x4x2_t, b: int32x4x2_t, c: int32x4x2_t) -> int32x4x2_t {
        // SAFETY: see above.
        unsafe { int32x4x2_t(vmlaq_s32(c.0, a.0, b.0), vmlaq_s32(c.1, a.1, b.1)) }
    }

    #[inline(always)]
    fn to_f32(self, x: int32x4x2_t) -> <Neon as Simd>::V {
        // SAFETY: see above.
        unsafe { float32x4x2_t(vcvtq_f32_s32(x.0), vcvtq_f32_s32(x.1)) }
    }
}

/// The bytes of each lane.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn quads(x: int32x4_t) -> int8x16_t {
    // SAFETY: the caller's promise.
    unsafe { vreinterpretq_s8_s32(x) }
}

/// The lower half-bytes and the upper ones.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn halves(nibbles: int32x4_t) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = vreinterpretq_u8_s32(nibbles);
        let low = vandq_u8(bytes, vdupq_n_u8(15));
        [
            vreinterpretq_s8_u8(low),
            vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes)),
        ]
    }
}

/// As [`halves`], with `BITS` bits of `tops` above each: those from `at` on above the lower ones,
/// the next above the upper ones.
///
/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn topped<const BITS: u32>(nibbles: int32x4_t, tops: int32x4_t, at: u32) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise. A negative count moves to the right.
    unsafe {
        let [low, high] = halves(nibbles);
        let (tops, mask) = (vreinterpretq_u8_s32(tops), vdupq_n_u8(top_mask::<BITS>()));
        let of_low = vandq_u8(vshlq_u8(tops, vdupq_n_s8(4 - at as i8)), mask);
        let of_high = vandq_u8(vshlq_u8(tops, vdupq_n_s8(4 - (at + BITS) as i8)), mask);
        [
            vorrq_s8(low, vreinterpretq_s8_u8(of_low)),
            vorrq_s8(high, vreinterpretq_s8_u8(of_high)),
        ]
    }
}
