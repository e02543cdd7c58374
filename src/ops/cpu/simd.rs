//! Vector registers of the machine, found at run time.
//!
//! A kernel is written once, generic in [`Simd`], with `#[inline(always)]` down to the
//! arithmetic; [`dispatch`] compiles it for each instruction set and picks one. The plain
//! loops of such a kernel (softmax, masks) are vectorised for the same instruction set.
//!
//! Register operations must not stand in a closure (also not one given to `map` or
//! `from_fn`): it is a function of its own, compiled without the instruction set, and every
//! operation becomes a call.

use half::{bf16, f16};

/// An instruction set. A value of an implementing type proves that the machine has it.
pub(crate) trait Simd: Copy + 'static {
    /// A register of f32.
    type V: Copy;
    /// f32 in a register.
    const LANES: usize;
    /// Whether 16 accumulators fit the register file beside their operands; else 8 do.
    const MANY_REGISTERS: bool;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger, `b` where `a` is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Sums of all lanes of four registers.
    fn sum4(self, a: [Self::V; 4]) -> [f32; 4];
    /// # Safety
    /// `src` points at `LANES` readable elements; any alignment.
    unsafe fn load_f32(self, src: *const f32) -> Self::V;
    /// # Safety
    /// `src` points at `LANES` readable elements; any alignment of 2.
    unsafe fn load_f16(self, src: *const f16) -> Self::V;
    /// # Safety
    /// `src` points at `LANES` readable elements; any alignment of 2.
    unsafe fn load_bf16(self, src: *const bf16) -> Self::V;
    /// # Safety
    /// `dst` points at `LANES` writable elements; any alignment.
    unsafe fn store(self, dst: *mut f32, a: Self::V);
    /// Asks for the cache line at an address, which need not be valid, into all levels.
    fn prefetch<T>(self, address: *const T);
}

/// Work that [`dispatch`] compiles for an instruction set. Implement `run` with
/// `#[inline(always)]`.
pub(super) trait Task {
    fn run<S: Simd>(self, simd: S);
}

/// Runs a task on the widest instruction set that the machine has.
pub(super) fn dispatch<T: Task>(task: T) {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = x86::Avx512::detect() {
            return simd.run(task);
        }
        if let Some(simd) = x86::Avx2::detect() {
            return simd.run(task);
        }
    }
    task.run(Plain);
}

/// Runs a task on every instruction set that the machine has.
#[cfg(test)]
pub(super) fn dispatch_to_each<T: Task + Clone>(task: T) {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = x86::Avx512::detect() {
            simd.run(task.clone());
        }
        if let Some(simd) = x86::Avx2::detect() {
            simd.run(task.clone());
        }
    }
    task.run(Plain);
}

/// What the target always has, by the compiler's own vectorisation.
#[derive(Clone, Copy)]
pub(super) struct Plain;

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
    fn sum4(self, a: [Self::V; 4]) -> [f32; 4] {
        a.map(|a| ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])))
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
    unsafe fn store(self, dst: *mut f32, a: Self::V) {
        // SAFETY: the caller's promise.
        unsafe { dst.cast::<Self::V>().write_unaligned(a) }
    }

    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use super::{Simd, Task};

    /// AVX-512 (F, BW, DQ, VL): Skylake-X, Zen 4 and later.
    #[derive(Clone, Copy)]
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
        fn sum4(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
            // SAFETY: see above. Pairs are interleaved and added until each 128-bit lane
            // holds one part of all four sums.
            unsafe {
                let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
                let all = _mm512_add_ps(
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
                );
                let all = _mm256_add_ps(
                    _mm512_castps512_ps256(all),
                    _mm512_extractf32x8_ps::<1>(all),
                );
                four(all)
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

    /// AVX2 with FMA and F16C: Haswell, Zen and later.
    #[derive(Clone, Copy)]
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
        fn sum4(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
            // SAFETY: see above.
            unsafe { four(_mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d))) }
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
}
