//! x86 with 256-bit registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Simd, Task};

/// AVX2 with FMA and F16C: Haswell, Zen and later.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Avx2(());

impl Avx2 {
    pub(in super::super) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    pub(in super::super) fn run<T: Task>(self, task: T) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<T: Task>(task: T, simd: Avx2) {
            task.run(simd);
        }
        // SAFETY: `detect`, the only maker of `self`, found these features.
        unsafe { compiled(task, self) }
    }
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above. The instruction returns its second operand for a NaN.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn pow2(self, shifted: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let bits = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
            _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)))
        }
    }

    #[inline(always)]
    fn unless_below(self, x: __m256, least: __m256, y: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, least), y) }
    }

    #[inline(always)]
    fn sum4x4(self, a: [[__m256; 4]; 4]) -> [[f32; 4]; 4] {
        let mut sums = [[0.0; 4]; 4];
        for (sums, [a, b, c, d]) in sums.iter_mut().zip(a) {
            // SAFETY: see above.
            *sums = unsafe { four(_mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d))) };
        }
        sums
    }

    #[inline(always)]
    unsafe fn load_f32(self, src: *const f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(src) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, src: *const f16) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(src.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, src: *const bf16) -> __m256 {
        // SAFETY: see above. A bf16 is the upper half of an f32.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pair(self, src: *const bf16) -> [__m256; 2] {
        // SAFETY: see above. A bf16 is the upper half of an f32.
        unsafe {
            let bits = _mm256_loadu_si256(src.cast());
            let odd = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)),
                _mm256_castsi256_ps(odd),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(self, dst: *mut f32, a: __m256) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(dst, a) }
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

/// The sum of the two halves.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
unsafe fn four(a: __m256) -> [f32; 4] {
    // SAFETY: the caller's promise; the types have one size and no invalid values.
    unsafe {
        let sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        std::mem::transmute::<__m128, [f32; 4]>(sum)
    }
}
