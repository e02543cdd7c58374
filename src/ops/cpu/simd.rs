//! Vector registers of the machine, found at run time.
//!
//! A kernel is written once, generic in [`Simd`], with `#[inline(always)]` down to the
//! arithmetic; [`Isa::run`] compiles it for each instruction set. The plain loops of such a kernel
//! (masks, caps) are vectorised for the same instruction set.
//!
//! Register operations must not stand in a closure (also not one given to `map` or
//! `from_fn`): it is a function of its own, compiled without the instruction set, and every
//! operation becomes a call.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
pub(super) use {avx2::Avx2, avx512::Avx512};

#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
pub(super) use plain::Plain;

/// The largest [`Simd::LANES`].
pub(super) const MAX_LANES: usize = 16;

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
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger, `b` where `a` is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `2^n` where the low bits of the f32 `shifted` hold the integer n.
    fn pow2(self, shifted: Self::V) -> Self::V;
    /// `y` where `x` is not below `least` (also where it is NaN), else 0.
    fn unless_below(self, x: Self::V, least: Self::V, y: Self::V) -> Self::V;
    /// Sums of all lanes, of each of 16 registers.
    fn sum4x4(self, a: [[Self::V; 4]; 4]) -> [[f32; 4]; 4];
    /// # Safety
    /// `src` points at `LANES` readable elements; any alignment.
    unsafe fn load_f32(self, src: *const f32) -> Self::V;
    /// # Safety
    /// `src` points at `LANES` readable elements; any alignment of 2.
    unsafe fn load_f16(self, src: *const f16) -> Self::V;
    /// # Safety
    /// `src` points at `LANES` readable elements; any alignment of 2.
    unsafe fn load_bf16(self, src: *const bf16) -> Self::V;
    /// The even elements of `2 * LANES` from `src` on, and the odd ones: cheaper than in order.
    ///
    /// # Safety
    /// `src` points at `2 * LANES` readable elements; any alignment of 2.
    unsafe fn load_bf16_pair(self, src: *const bf16) -> [Self::V; 2];
    /// # Safety
    /// `dst` points at `LANES` writable elements; any alignment.
    unsafe fn store(self, dst: *mut f32, a: Self::V);
    /// Asks for the cache line at an address, which need not be valid, into all levels.
    fn prefetch<T>(self, address: *const T);
}

/// Work that [`Isa::run`] compiles for an instruction set. Implement `run` with
/// `#[inline(always)]`.
pub(super) trait Task {
    fn run<S: Simd>(self, simd: S);
}

/// The instruction sets that kernels are compiled for. What a variant holds proves that the
/// machine has it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    Plain,
}

impl Isa {
    /// The widest that the machine has.
    pub(super) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(simd) = Avx512::detect() {
                return Self::Avx512(simd);
            }
            if let Some(simd) = Avx2::detect() {
                return Self::Avx2(simd);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(simd) = Neon::detect() {
            return Self::Neon(simd);
        }
        Self::Plain
    }

    /// All that the machine has.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        let mut all = vec![Self::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::detect().map(Self::Avx2));
            all.extend(Avx512::detect().map(Self::Avx512));
        }
        #[cfg(target_arch = "aarch64")]
        all.extend(Neon::detect().map(Self::Neon));
        all
    }

    /// Runs a task compiled for this instruction set.
    pub(super) fn run<T: Task>(self, task: T) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(task),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(simd) => simd.run(task),
            Self::Plain => task.run(Plain),
        }
    }
}
