//! Which block holds what, who uses it, and what can be found again.
//!
//! Everything here is integers: no tensor, no device, no candle. Bookkeeping that cannot
//! reach a tensor is tested by millions of random operations in seconds, so the mistakes that
//! serve one request's K/V to another are found here and not in a model's answers.
//!
//! A [`BlockAllocator`] owns the pool of one layer group: reference counts, the queues of
//! unused blocks and the prefix index, with an [`EvictionPolicy`] to choose what goes first.
//! A [`BlockTable`] lists the blocks of one sequence.

#![forbid(unsafe_code)]

mod allocator;
mod event;
mod ids;
mod index;
mod list;
mod namespace;
mod policy;
mod pool;
mod prefix;
mod table;

pub use allocator::BlockAllocator;
pub use event::{Counts, Event, Stats};
pub use ids::{BlockId, NodeId};
pub use namespace::Namespace;
pub use policy::{Candidate, EvictionPolicy, Lru};
pub use prefix::Hit;
pub use table::BlockTable;

use crate::error::{Error, Result};

/// Largest number of tokens in a block.
pub const MAX_BLOCK_SIZE: usize = 256;

/// Checks that `block_size` is a power of two from 1 to [`MAX_BLOCK_SIZE`].
pub(crate) fn check_block_size(op: &'static str, block_size: usize) -> Result<()> {
    if block_size.is_power_of_two() && block_size <= MAX_BLOCK_SIZE {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        op,
        what: "block_size".into(),
        expected: format!("a power of two from 1 to {MAX_BLOCK_SIZE}"),
        got: block_size.to_string(),
    })
}

/// An empty vector with room for `len` elements, or an error where `Vec` would abort.
fn reserved<T>(len: usize) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    match vec.try_reserve_exact(len) {
        Ok(()) => Ok(vec),
        Err(error) => Err(Error::InvalidArgument {
            op: "block_allocator",
            what: "num_blocks".into(),
            expected: "a pool whose bookkeeping fits into memory".into(),
            got: format!("{len} entries of {} bytes: {error}", size_of::<T>()),
        }),
    }
}
