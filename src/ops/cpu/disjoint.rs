//! Parallel writes into one buffer.

use std::marker::PhantomData;
use std::ops::Range;

/// A buffer whose parts are written by several tasks at once, each part by one task.
#[derive(Clone, Copy)]
pub(super) struct Disjoint<'a, T> {
    data: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Disjoint` only gives out slices through `part`, whose callers promise that no two
// of them overlap; so sharing it between threads shares no element.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(super) fn new(buffer: &'a mut [T]) -> Self {
        Self {
            data: buffer.as_mut_ptr(),
            len: buffer.len(),
            life: PhantomData,
        }
    }

    /// The elements of a range.
    ///
    /// # Safety
    /// While the slice lives nobody else holds a slice that shares an element with it.
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion; alone by the caller's promise; the buffer is
        // borrowed mutably for 'a.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) }
    }
}
