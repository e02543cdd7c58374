//! Blocks.
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
