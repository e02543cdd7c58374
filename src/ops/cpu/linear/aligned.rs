//! Memory that starts at a cache line, so that no register of weights straddles two.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use half::{bf16, f16};

/// A plain number.
///
/// # Safety
/// Any bit pattern is a value, all zeros among them, and the size divides 64.
pub(super) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: numbers of 1, 2 and 4 bytes.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for f16 {}
// SAFETY: as above.
unsafe impl Plain for bf16 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A fixed number of elements on a 64-byte boundary.
pub(super) struct Aligned<T> {
    lines: Box<[Line]>,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Plain> Aligned<T> {
    pub(super) fn zeros(len: usize) -> Self {
        let lines = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        Self {
            lines: vec![Line([0; 64]); lines].into_boxed_slice(),
            len,
            of: PhantomData,
        }
    }
}

impl<T: Plain> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `zeros` made lines for `len` elements; any bytes are a `T` by `Plain`, and a
        // line is aligned for it.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Plain> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}
