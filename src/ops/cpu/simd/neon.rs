//! AArch64.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::{Simd, Task};

/// NEON, which AArch64 always has.
///
/// A register of the kernels is two of the machine's: so the eight sums of a kernel are sixteen
/// chains, enough for machines that add four registers in a cycle, and fill half of the 32
/// registers.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Neon(());

impl Neon {
    pub(in super::super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }

    pub(in super::super) fn run<T: Task>(self, task: T) {
        #[target_feature(enable = "neon")]
        fn compiled<T: Task>(task: T, simd: Neon) {
            task.run(simd);
        }
        // SAFETY: `detect`, the only maker of `self`, found the feature.
        unsafe { compiled(task, self) }
    }
}

// The SAFETY of every intrinsic below: `self` proves that the machine has the feature, and
// pointers are as the caller promised.
impl Simd for Neon {
    type V = float32x4x2_t;
    const LANES: usize = 8;
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe { float32x4x2_t(vdupq_n_f32(x), vdupq_n_f32(x)) }
    }

    #[inline(always)]
    fn add(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe { float32x4x2_t(vaddq_f32(a.0, b.0), vaddq_f32(a.1, b.1)) }
    }

    #[inline(always)]
    fn sub(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe { float32x4x2_t(vsubq_f32(a.0, b.0), vsubq_f32(a.1, b.1)) }
    }

    #[inline(always)]
    fn mul(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe { float32x4x2_t(vmulq_f32(a.0, b.0), vmulq_f32(a.1, b.1)) }
    }

    #[inline(always)]
    fn max(self, a: float32x4x2_t, b: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: see above. The instructions for a maximum treat NaN otherwise.
        unsafe {
            float32x4x2_t(
                vbslq_f32(vcgtq_f32(a.0, b.0), a.0, b.0),
                vbslq_f32(vcgtq_f32(a.1, b.1), a.1, b.1),
            )
        }
    }

    #[inline(always)]
    fn mul_add(self, a: float32x4x2_t, b: float32x4x2_t, c: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe { float32x4x2_t(vfmaq_f32(c.0, a.0, b.0), vfmaq_f32(c.1, a.1, b.1)) }
    }

    #[inline(always)]
    fn pow2(self, shifted: float32x4x2_t) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe { float32x4x2_t(pow2(shifted.0), pow2(shifted.1)) }
    }

    #[inline(always)]
    fn unless_below(
        self,
        x: float32x4x2_t,
        least: float32x4x2_t,
        y: float32x4x2_t,
    ) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe {
            let zero = vdupq_n_f32(0.0);
            float32x4x2_t(
                vbslq_f32(vcltq_f32(x.0, least.0), zero, y.0),
                vbslq_f32(vcltq_f32(x.1, least.1), zero, y.1),
            )
        }
    }

    #[inline(always)]
    fn sum4x4(self, a: [[float32x4x2_t; 4]; 4]) -> [[f32; 4]; 4] {
        let mut sums = [[0.0; 4]; 4];
        for (sums, [a, b, c, d]) in sums.iter_mut().zip(a) {
            // SAFETY: see above; four f32 are stored.
            unsafe {
                let ab = vpaddq_f32(vaddq_f32(a.0, a.1), vaddq_f32(b.0, b.1));
                let cd = vpaddq_f32(vaddq_f32(c.0, c.1), vaddq_f32(d.0, d.1));
                vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(ab, cd));
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn load_f32(self, src: *const f32) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe { float32x4x2_t(vld1q_f32(src), vld1q_f32(src.add(4))) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, src: *const f16) -> float32x4x2_t {
        // SAFETY: see above.
        unsafe {
            let bits = vld1q_u16(src.cast());
            float32x4x2_t(
                vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(bits))),
                vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(bits))),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, src: *const bf16) -> float32x4x2_t {
        // SAFETY: see above. A bf16 is the upper half of an f32.
        unsafe {
            let bits = vld1q_u16(src.cast());
            float32x4x2_t(
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(bits))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(bits)),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pair(self, src: *const bf16) -> [float32x4x2_t; 2] {
        const { assert!(cfg!(target_endian = "little")) };
        // SAFETY: see above. A bf16 is the upper half of an f32.
        unsafe {
            let bits = [vld1q_u32(src.cast()), vld1q_u32(src.add(8).cast())];
            let upper = vdupq_n_u32(0xffff_0000);
            [
                float32x4x2_t(
                    vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits[0])),
                    vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits[1])),
                ),
                float32x4x2_t(
                    vreinterpretq_f32_u32(vandq_u32(bits[0], upper)),
                    vreinterpretq_f32_u32(vandq_u32(bits[1], upper)),
                ),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(self, dst: *mut f32, a: float32x4x2_t) {
        // SAFETY: see above.
        unsafe {
            vst1q_f32(dst, a.0);
            vst1q_f32(dst.add(4), a.1);
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        // SAFETY: a prefetch never faults and changes nothing that a program sees. (The
        // intrinsic for it is not stable.)
        unsafe {
            asm!(
                "prfm pldl1keep, [{}]",
                in(reg) address,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
}

/// # Safety
/// The machine has NEON.
#[inline(always)]
unsafe fn pow2(shifted: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted));
        vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(127 << 23)))
    }
}
