//! Integer registers of the machine, found at run time: what [`Simd`] is for floats.
//!
//! A register holds as many 32-bit lanes as one of floats; of weights and activations each
//! lane holds four bytes, whose products with four others are summed.

#[cfg(target_arch = "aarch64")]
mod neon;

use super::super::simd::{self, Simd};

/// An instruction set with products of bytes. A value of an implementing type proves that the
/// machine has it.
pub(super) trait ByteSimd: Copy + 'static {
    type Floats: Simd;
    /// A register of i32, or of four bytes in place of each.
    type I: Copy;
    /// What [`Self::dot_bytes`] leaves in each byte, to be taken off by its caller.
    const BYTE_OFFSET: i32;

    /// The floats of the same machine.
    fn floats(self) -> Self::Floats;
    fn splat(self, x: i32) -> Self::I;
    /// # Safety
    /// `src` points at four readable bytes per lane; any alignment.
    unsafe fn load(self, src: *const u8) -> Self::I;
    /// Adds the products of `bytes`, which are weights plus 128, with the signed activations
    /// `x`, none of which is −128. A weight counts as itself plus [`Self::BYTE_OFFSET`].
    fn dot_bytes(self, sum: Self::I, bytes: Self::I, x: Self::I) -> Self::I;
    /// Adds the products of the lower half-bytes with `low` and of the upper ones with `high`.
    fn dot_nibbles(self, sum: Self::I, nibbles: Self::I, low: Self::I, high: Self::I) -> Self::I;
    /// As [`Self::dot_nibbles`], of weights with `BITS` bits above their half-byte, all of them
    /// below 64: in each byte of `tops`, those of the lower half-bytes start at bit `at` and
    /// those of the upper ones follow. `at` is even, and both fit the byte.
    fn dot_topped<const BITS: u32>(
        self,
        sum: Self::I,
        nibbles: Self::I,
        tops: Self::I,
        at: u32,
        low: Self::I,
        high: Self::I,
    ) -> Self::I;
    /// # Safety
    /// `src` points at a readable byte per lane.
    unsafe fn load_i8(self, src: *const i8) -> Self::I;
    /// `a * b + c`, where nothing leaves 32 bits.
    fn mul_add(self, a: Self::I, b: Self::I, c: Self::I) -> Self::I;
    fn to_f32(self, x: Self::I) -> <Self::Floats as Simd>::V;
}

/// `BITS` bits above a half-byte.
const fn top_mask<const BITS: u32>() -> u8 {
    ((1 << BITS) - 1) << 4
}

/// Work that [`dispatch`] compiles for an instruction set. Implement `run` with
/// `#[inline(always)]`.
pub(super) trait ByteTask {
    fn run<S: ByteSimd>(self, simd: S);
}

/// Runs a task on the best instruction set that the machine has.
pub(super) fn dispatch<T: ByteTask>(task: T) {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = x86::Vnni::detect() {
            return simd.run(task);
        }
        if let Some(simd) = x86::Bytes2::detect() {
            return simd.run(task);
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        if let Some(simd) = neon::Bytes::<true>::detect() {
            return simd.run(task);
        }
        if let Some(simd) = neon::Bytes::<false>::detect() {
            return simd.run(task);
        }
    }
    task.run(simd::Plain);
}

/// Runs a task on every instruction set that the machine has.
#[cfg(test)]
pub(super) fn dispatch_to_each<T: ByteTask + Clone>(task: T) {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = x86::Vnni::detect() {
            simd.run(task.clone());
        }
        if let Some(simd) = x86::Bytes2::detect() {
            simd.run(task.clone());
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        if let Some(simd) = neon::Bytes::<true>::detect() {
            simd.run(task.clone());
        }
        if let Some(simd) = neon::Bytes::<false>::detect() {
            simd.run(task.clone());
        }
    }
    task.run(simd::Plain);
}

const LANES: usize = simd::Plain::LANES;

impl ByteSimd for simd::Plain {
    type Floats = Self;
    type I = [i32; LANES];
    const BYTE_OFFSET: i32 = 0;

    #[inline(always)]
    fn floats(self) -> Self {
        self
    }

    #[inline(always)]
    fn splat(self, x: i32) -> Self::I {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(self, src: *const u8) -> Self::I {
        // SAFETY: the caller's promise.
        unsafe { src.cast::<Self::I>().read_unaligned() }
    }

    #[inline(always)]
    fn dot_bytes(self, mut sum: Self::I, bytes: Self::I, x: Self::I) -> Self::I {
        for i in 0..LANES {
            let (bytes, x) = (bytes[i].to_ne_bytes(), x[i].to_ne_bytes());
            for j in 0..4 {
                sum[i] += (i32::from(bytes[j]) - 128) * i32::from(x[j] as i8);
            }
        }
        sum
    }

    #[inline(always)]
    fn dot_nibbles(
        self,
        mut sum: Self::I,
        nibbles: Self::I,
        low: Self::I,
        high: Self::I,
    ) -> Self::I {
        for i in 0..LANES {
            let nibbles = nibbles[i].to_ne_bytes();
            let (low, high) = (low[i].to_ne_bytes(), high[i].to_ne_bytes());
            for j in 0..4 {
                sum[i] += i32::from(nibbles[j] & 15) * i32::from(low[j] as i8);
                sum[i] += i32::from(nibbles[j] >> 4) * i32::from(high[j] as i8);
            }
        }
        sum
    }

    #[inline(always)]
    fn dot_topped<const BITS: u32>(
        self,
        mut sum: Self::I,
        nibbles: Self::I,
        tops: Self::I,
        at: u32,
        low: Self::I,
        high: Self::I,
    ) -> Self::I {
        for i in 0..LANES {
            let (nibbles, tops) = (nibbles[i].to_ne_bytes(), tops[i].to_ne_bytes());
            let (low, high) = (low[i].to_ne_bytes(), high[i].to_ne_bytes());
            for j in 0..4 {
                let tops = u16::from(tops[j]) << 4;
                let top = |at: u32| (tops >> at) as u8 & top_mask::<BITS>();
                let lower = nibbles[j] & 15 | top(at);
                let upper = nibbles[j] >> 4 | top(at + BITS);
                sum[i] += i32::from(lower) * i32::from(low[j] as i8);
                sum[i] += i32::from(upper) * i32::from(high[j] as i8);
            }
        }
        sum
    }

    #[inline(always)]
    unsafe fn load_i8(self, src: *const i8) -> Self::I {
        // SAFETY: the caller's promise.
        let bytes = unsafe { src.cast::<[i8; LANES]>().read_unaligned() };
        let mut x = [0; LANES];
        for i in 0..LANES {
            x[i] = bytes[i].into();
        }
        x
    }

    #[inline(always)]
    fn mul_add(self, a: Self::I, b: Self::I, mut c: Self::I) -> Self::I {
        for i in 0..LANES {
            c[i] += a[i] * b[i];
        }
        c
    }

    #[inline(always)]
    fn to_f32(self, x: Self::I) -> [f32; LANES] {
        let mut floats = [0.0; LANES];
        for i in 0..LANES {
            floats[i] = x[i] as f32;
        }
        floats
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::super::simd::{Avx2, Avx512};
    use super::{ByteSimd, ByteTask, top_mask};

    /// AVX-512 with VNNI: Cascade Lake, Zen 4 and later.
    #[derive(Clone, Copy)]
    pub(super) struct Vnni(Avx512);

    impl Vnni {
        pub(super) fn detect() -> Option<Self> {
            let has = is_x86_feature_detected!("avx512vnni");
            has.then(Avx512::detect).flatten().map(Self)
        }

        pub(super) fn run<T: ByteTask>(self, task: T) {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn compiled<T: ByteTask>(task: T, simd: Vnni) {
                task.run(simd);
            }
            // SAFETY: `detect`, the only maker of `self`, found these features.
            unsafe { compiled(task, self) }
        }
    }

    // The SAFETY of every intrinsic below: `self` proves that the machine has the feature, and
    // pointers are as the caller promised.
    impl ByteSimd for Vnni {
        type Floats = Avx512;
        type I = __m512i;
        /// The instruction takes the unsigned bytes as they are.
        const BYTE_OFFSET: i32 = 128;

        #[inline(always)]
        fn floats(self) -> Avx512 {
            self.0
        }

        #[inline(always)]
        fn splat(self, x: i32) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_set1_epi32(x) }
        }

        #[inline(always)]
        unsafe fn load(self, src: *const u8) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_loadu_si512(src.cast()) }
        }

        #[inline(always)]
        fn dot_bytes(self, sum: __m512i, bytes: __m512i, x: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_dpbusd_epi32(sum, bytes, x) }
        }

        #[inline(always)]
        fn dot_nibbles(
            self,
            sum: __m512i,
            nibbles: __m512i,
            low: __m512i,
            high: __m512i,
        ) -> __m512i {
            // SAFETY: see above.
            unsafe {
                let mask = _mm512_set1_epi8(15);
                let lower = _mm512_and_si512(nibbles, mask);
                let upper = _mm512_and_si512(_mm512_srli_epi16::<4>(nibbles), mask);
                _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, lower, low), upper, high)
            }
        }

        #[inline(always)]
        fn dot_topped<const BITS: u32>(
            self,
            sum: __m512i,
            nibbles: __m512i,
            tops: __m512i,
            at: u32,
            low: __m512i,
            high: __m512i,
        ) -> __m512i {
            /// The bits from `at` on, above a half-byte.
            #[inline(always)]
            unsafe fn top<const BITS: u32>(tops: __m512i, at: u32) -> __m512i {
                // SAFETY: the caller has the feature. Bits that come from a neighbour are cut off.
                unsafe {
                    let moved = match at {
                        0..4 => _mm512_sllv_epi32(tops, _mm512_set1_epi32(4 - at as i32)),
                        _ => _mm512_srlv_epi32(tops, _mm512_set1_epi32(at as i32 - 4)),
                    };
                    _mm512_and_si512(moved, _mm512_set1_epi8(top_mask::<BITS>() as i8))
                }
            }
            // SAFETY: see above.
            unsafe {
                let mask = _mm512_set1_epi8(15);
                let lower = _mm512_and_si512(nibbles, mask);
                let upper = _mm512_and_si512(_mm512_srli_epi16::<4>(nibbles), mask);
                let lower = _mm512_or_si512(lower, top::<BITS>(tops, at));
                let upper = _mm512_or_si512(upper, top::<BITS>(tops, at + BITS));
                _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, lower, low), upper, high)
            }
        }

        #[inline(always)]
        unsafe fn load_i8(self, src: *const i8) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(src.cast())) }
        }

        #[inline(always)]
        fn mul_add(self, a: __m512i, b: __m512i, c: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_add_epi32(_mm512_mullo_epi32(a, b), c) }
        }

        #[inline(always)]
        fn to_f32(self, x: __m512i) -> __m512 {
            // SAFETY: see above.
            unsafe { _mm512_cvtepi32_ps(x) }
        }
    }

    /// The byte products of AVX2.
    #[derive(Clone, Copy)]
    pub(super) struct Bytes2(Avx2);

    impl Bytes2 {
        pub(super) fn detect() -> Option<Self> {
            Avx2::detect().map(Self)
        }

        pub(super) fn run<T: ByteTask>(self, task: T) {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn compiled<T: ByteTask>(task: T, simd: Bytes2) {
                task.run(simd);
            }
            // SAFETY: `detect`, the only maker of `self`, found these features.
            unsafe { compiled(task, self) }
        }
    }

    impl ByteSimd for Bytes2 {
        type Floats = Avx2;
        type I = __m256i;
        const BYTE_OFFSET: i32 = 0;

        #[inline(always)]
        fn floats(self) -> Avx2 {
            self.0
        }

        #[inline(always)]
        fn splat(self, x: i32) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_set1_epi32(x) }
        }

        #[inline(always)]
        unsafe fn load(self, src: *const u8) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_loadu_si256(src.cast()) }
        }

        #[inline(always)]
        fn dot_bytes(self, sum: __m256i, bytes: __m256i, x: __m256i) -> __m256i {
            // SAFETY: see above. Pairs of products are summed in 16 bits, which would overflow
            // for bytes above 128: so the weight's sign goes to the activation. 2 * 128 * 127
            // fits.
            unsafe {
                let weights = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
                let pairs =
                    _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        }

        #[inline(always)]
        fn dot_nibbles(
            self,
            sum: __m256i,
            nibbles: __m256i,
            low: __m256i,
            high: __m256i,
        ) -> __m256i {
            // SAFETY: see above. Four products of 15 and 127 fit 16 bits.
            unsafe {
                let mask = _mm256_set1_epi8(15);
                let lower = _mm256_and_si256(nibbles, mask);
                let upper = _mm256_and_si256(_mm256_srli_epi16::<4>(nibbles), mask);
                let pairs = _mm256_add_epi16(
                    _mm256_maddubs_epi16(lower, low),
                    _mm256_maddubs_epi16(upper, high),
                );
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        }

        #[inline(always)]
        fn dot_topped<const BITS: u32>(
            self,
            sum: __m256i,
            nibbles: __m256i,
            tops: __m256i,
            at: u32,
            low: __m256i,
            high: __m256i,
        ) -> __m256i {
            /// The bits from `at` on, above a half-byte.
            #[inline(always)]
            unsafe fn top<const BITS: u32>(tops: __m256i, at: u32) -> __m256i {
                // SAFETY: the caller has the feature. Bits that come from a neighbour are cut off.
                unsafe {
                    let moved = match at {
                        0..4 => _mm256_sllv_epi32(tops, _mm256_set1_epi32(4 - at as i32)),
                        _ => _mm256_srlv_epi32(tops, _mm256_set1_epi32(at as i32 - 4)),
                    };
                    _mm256_and_si256(moved, _mm256_set1_epi8(top_mask::<BITS>() as i8))
                }
            }
            // SAFETY: see above. Four products of 63 and 127 fit 16 bits.
            unsafe {
                let mask = _mm256_set1_epi8(15);
                let lower = _mm256_and_si256(nibbles, mask);
                let upper = _mm256_and_si256(_mm256_srli_epi16::<4>(nibbles), mask);
                let lower = _mm256_or_si256(lower, top::<BITS>(tops, at));
                let upper = _mm256_or_si256(upper, top::<BITS>(tops, at + BITS));
                let pairs = _mm256_add_epi16(
                    _mm256_maddubs_epi16(lower, low),
                    _mm256_maddubs_epi16(upper, high),
                );
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        }

        #[inline(always)]
        unsafe fn load_i8(self, src: *const i8) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(src.cast())) }
        }

        #[inline(always)]
        fn mul_add(self, a: __m256i, b: __m256i, c: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_add_epi32(_mm256_mullo_epi32(a, b), c) }
        }

        #[inline(always)]
        fn to_f32(self, x: __m256i) -> __m256 {
            // SAFETY: see above.
            unsafe { _mm256_cvtepi32_ps(x) }
        }
    }
}
