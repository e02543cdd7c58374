//! The three storage types and their conversions.

use candle_core::{CpuStorage, DType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::simd::Simd;
use crate::error::{Error, Result};

/// An element type of a cache.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    fn slice(storage: &CpuStorage) -> Option<&[Self]>;
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn storage(data: Vec<Self>) -> CpuStorage;
    /// `dst[i] = src[i]` in f32; equal lengths.
    fn widen(src: &[Self], dst: &mut [f32]);
    /// `dst[i] = src[i]` rounded to nearest even; equal lengths.
    fn narrow(src: &[f32], dst: &mut [Self]);
    fn to_f32(self) -> f32;
    /// Whether [`Self::load_pair`] gives even and odd elements.
    const EVEN_ODD: bool;
    /// `S::LANES` elements from `src` on, widened in registers.
    ///
    /// # Safety
    /// `src` points at `S::LANES` readable elements.
    unsafe fn load<S: Simd>(simd: S, src: *const Self) -> S::V;
    /// `2 * S::LANES` elements from `src` on, widened in registers: one half after the other,
    /// or the even ones and the odd ones.
    ///
    /// # Safety
    /// `src` points at `2 * S::LANES` readable elements.
    unsafe fn load_pair<S: Simd>(simd: S, src: *const Self) -> [S::V; 2];
}

impl Element for f32 {
    fn slice(storage: &CpuStorage) -> Option<&[Self]> {
        match storage {
            CpuStorage::F32(data) => Some(data),
            _ => None,
        }
    }

    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        match storage {
            CpuStorage::F32(data) => Some(data),
            _ => None,
        }
    }

    fn storage(data: Vec<Self>) -> CpuStorage {
        CpuStorage::F32(data)
    }

    #[inline(always)]
    fn widen(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    const EVEN_ODD: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, src: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f32(src) }
    }

    #[inline(always)]
    unsafe fn load_pair<S: Simd>(simd: S, src: *const Self) -> [S::V; 2] {
        // SAFETY: the caller's promise.
        unsafe { [simd.load_f32(src), simd.load_f32(src.add(S::LANES))] }
    }
}

macro_rules! half_element {
    ($t:ident, $variant:ident, $even_odd:literal, $load:ident, |$simd:ident, $src:ident| $pair:expr) => {
        impl Element for $t {
            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                match storage {
                    CpuStorage::$variant(data) => Some(data),
                    _ => None,
                }
            }

            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(data) => Some(data),
                    _ => None,
                }
            }

            fn storage(data: Vec<Self>) -> CpuStorage {
                CpuStorage::$variant(data)
            }

            fn widen(src: &[Self], dst: &mut [f32]) {
                src.convert_to_f32_slice(dst);
            }

            fn narrow(src: &[f32], dst: &mut [Self]) {
                dst.convert_from_f32_slice(src);
            }

            #[inline(always)]
            fn to_f32(self) -> f32 {
                $t::to_f32(self)
            }

            const EVEN_ODD: bool = $even_odd;

            #[inline(always)]
            unsafe fn load<S: Simd>(simd: S, src: *const Self) -> S::V {
                // SAFETY: the caller's promise.
                unsafe { simd.$load(src) }
            }

            #[inline(always)]
            unsafe fn load_pair<S: Simd>($simd: S, $src: *const Self) -> [S::V; 2] {
                // SAFETY: the caller's promise.
                unsafe { $pair }
            }
        }
    };
}

half_element!(f16, F16, false, load_f16, |simd, src| [
    simd.load_f16(src),
    simd.load_f16(src.add(S::LANES))
]);
half_element!(bf16, BF16, true, load_bf16, |simd, src| simd
    .load_bf16_pair(src));

/// A slice of a storage whose dtype the public function has checked.
pub(super) fn slice<T: Element>(storage: &CpuStorage) -> Result<&[T]> {
    T::slice(storage).ok_or_else(unexpected_dtype)
}

/// As [`slice`], mutable.
pub(super) fn slice_mut<T: Element>(storage: &mut CpuStorage) -> Result<&mut [T]> {
    T::slice_mut(storage).ok_or_else(unexpected_dtype)
}

pub(super) fn unexpected_dtype() -> Error {
    Error::Invariant {
        op: "cpu kernel",
        what: "the dtype of a tensor was checked and is another one now".into(),
    }
}

/// Calls a function generic in the element type with the type that a dtype names.
macro_rules! for_dtype {
    ($dtype:expr, $f:ident ( $($arg:expr),* $(,)? )) => {
        match $dtype {
            candle_core::DType::F32 => $f::<f32>($($arg),*),
            candle_core::DType::F16 => $f::<half::f16>($($arg),*),
            candle_core::DType::BF16 => $f::<half::bf16>($($arg),*),
            _ => Err($crate::ops::cpu::element::unexpected_dtype()),
        }
    };
}
pub(super) use for_dtype;

/// The dtype of a storage.
pub(super) fn dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}
