//! x86 with 512-bit registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Simd, Task};

/// AVX-512 (F, BW, DQ, VL): Skylake-X, Zen 4 and later.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Avx512(());

impl Avx512 {
    pub(in super::super) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    pub(in super::super) fn run<T: Task>(self, task: T) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn compiled<T: Task>(task: T, simd: Avx512) {
            task.run(simd);
        }
        // SAFETY: `detect`, the only maker of `self`, found these features.
        unsafe { compiled(task, self) }
    }
}

// The SAFETY of every intrinsic below: `self` proves that the machine has the feature, and
// pointers are as the caller promised.
impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const MANY_REGISTERS: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above. The instruction returns its second operand for a NaN.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn pow2(self, shifted: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let bits = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
            _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23)))
        }
    }

    #[inline(always)]
    fn unless_below(self, x: __m512, least: __m512, y: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, least), y) }
    }

    #[inline(always)]
    fn sum4x4(self, a: [[__m512; 4]; 4]) -> [[f32; 4]; 4] {
        // SAFETY: see above. Within 128-bit lanes pairs are interleaved and added until a
        // register holds its part of four sums in each of them; then lanes are.
        unsafe {
            let z = _mm512_setzero_ps();
            let mut rows = [z; 4];
            for (row, [a, b, c, d]) in rows.iter_mut().zip(a) {
                let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
                *row = _mm512_add_ps(
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
                );
            }
            let [a, b, c, d] = rows;
            let all = halves(halves(a, b), halves(c, d));
            std::mem::transmute::<__m512, [[f32; 4]; 4]>(all)
        }
    }

    #[inline(always)]
    unsafe fn load_f32(self, src: *const f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(src) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, src: *const f16) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(src.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, src: *const bf16) -> __m512 {
        // SAFETY: see above. A bf16 is the upper half of an f32.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pair(self, src: *const bf16) -> [__m512; 2] {
        // SAFETY: see above. A bf16 is the upper half of an f32.
        unsafe {
            let bits = _mm512_loadu_si512(src.cast());
            let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)),
                _mm512_castsi512_ps(odd),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(self, dst: *mut f32, a: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(dst, a) }
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

/// The 128-bit lanes of `a`, added in pairs, then those of `b`.
///
/// # Safety
/// The machine has AVX-512F.
#[inline(always)]
unsafe fn halves(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        let odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
        _mm512_add_ps(even, odd)
    }
}
