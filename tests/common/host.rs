//! Host memory in the place of a GPU's, for the bookkeeping of what is resident there.

use std::cell::Cell;

use candle_paged_attn::Result;
use candle_paged_attn::ops::launch::Slot;
use candle_paged_attn::ops::resident::{Filled, Memory};

/// Host memory, 16-byte aligned, whose buffers never move; counts what is asked of it.
#[derive(Default)]
pub struct Host {
    pub allocations: Cell<usize>,
    pub copies: Cell<usize>,
}

pub struct Bytes(Vec<u128>);

impl Memory for Host {
    type Buffer = Bytes;

    fn allocate(&self, bytes: usize) -> Result<Bytes> {
        self.allocations.set(self.allocations.get() + 1);
        Ok(Bytes(vec![u128::MAX; bytes.div_ceil(16)]))
    }

    fn write(&self, buffer: &mut Bytes, bytes: &[u8]) -> Result<()> {
        self.copies.set(self.copies.get() + 1);
        assert!(bytes.len() <= buffer.0.len() * 16, "a copy past the end");
        for (word, chunk) in buffer.0.iter_mut().zip(bytes.chunks(16)) {
            let mut full = word.to_le_bytes();
            full[..chunk.len()].copy_from_slice(chunk);
            *word = u128::from_le_bytes(full);
        }
        Ok(())
    }

    fn address(&self, buffer: &Bytes) -> u64 {
        buffer.0.as_ptr() as u64
    }
}

/// The first `len` elements of an array that `Host` holds, which must be live and that long.
#[allow(unsafe_code)]
pub fn at<T: Copy>(filled: &Filled, slot: Slot, len: usize) -> Vec<T> {
    let address = |(s, address): &(Slot, u64)| (*s == slot).then_some(*address);
    let address = filled.addresses().iter().find_map(address).unwrap();
    assert_eq!(address % 16, 0, "{slot:?}");
    // SAFETY: `Host` made the address from a live buffer, which `fill` wrote up to `len`.
    unsafe { std::slice::from_raw_parts(address as *const T, len) }.to_vec()
}
