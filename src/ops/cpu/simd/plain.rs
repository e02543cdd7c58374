//! What every target has.

use half::{bf16, f16};

use super::Simd;

/// What the target always has, by the compiler's own vectorisation.
#[derive(Clone, Copy)]
pub(in super::super) struct Plain;

const PLAIN: usize = 8;

impl Simd for Plain {
    type V = [f32; PLAIN];
    const LANES: usize = PLAIN;
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; PLAIN]
    }

    #[inline(always)]
    fn add(self, mut a: Self::V, b: Self::V) -> Self::V {
        for i in 0..PLAIN {
            a[i] += b[i];
        }
        a
    }

    #[inline(always)]
    fn sub(self, mut a: Self::V, b: Self::V) -> Self::V {
        for i in 0..PLAIN {
            a[i] -= b[i];
        }
        a
    }

    #[inline(always)]
    fn max(self, a: Self::V, mut b: Self::V) -> Self::V {
        for i in 0..PLAIN {
            b[i] = if a[i] > b[i] { a[i] } else { b[i] };
        }
        b
    }

    #[inline(always)]
    fn mul(self, mut a: Self::V, b: Self::V) -> Self::V {
        for i in 0..PLAIN {
            a[i] *= b[i];
        }
        a
    }

    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, mut c: Self::V) -> Self::V {
        for i in 0..PLAIN {
            // Without the instruction a fused product is a slow call.
            c[i] = if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                a[i].mul_add(b[i], c[i])
            } else {
                a[i] * b[i] + c[i]
            };
        }
        c
    }

    #[inline(always)]
    fn pow2(self, shifted: Self::V) -> Self::V {
        shifted.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23)))
    }

    #[inline(always)]
    fn unless_below(self, x: Self::V, least: Self::V, mut y: Self::V) -> Self::V {
        for i in 0..PLAIN {
            y[i] = if x[i] < least[i] { 0.0 } else { y[i] };
        }
        y
    }

    #[inline(always)]
    fn sum4x4(self, a: [[Self::V; 4]; 4]) -> [[f32; 4]; 4] {
        a.map(|row| row.map(|a| ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))))
    }

    #[inline(always)]
    unsafe fn load_f32(self, src: *const f32) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { src.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(self, src: *const f16) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { src.cast::<[f16; PLAIN]>().read_unaligned() }.map(f16::to_f32)
    }

    #[inline(always)]
    unsafe fn load_bf16(self, src: *const bf16) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { src.cast::<[bf16; PLAIN]>().read_unaligned() }
            .map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    #[inline(always)]
    unsafe fn load_bf16_pair(self, src: *const bf16) -> [Self::V; 2] {
        // SAFETY: the caller's promise.
        let bits = unsafe { src.cast::<[u32; PLAIN]>().read_unaligned() }.map(u32::from_le);
        [
            bits.map(|x| f32::from_bits(x << 16)),
            bits.map(|x| f32::from_bits(x & 0xffff_0000)),
        ]
    }

    #[inline(always)]
    unsafe fn store(self, dst: *mut f32, a: Self::V) {
        // SAFETY: the caller's promise.
        unsafe { dst.cast::<Self::V>().write_unaligned(a) }
    }

    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
}
