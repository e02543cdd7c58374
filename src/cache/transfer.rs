//! Whole blocks from one cache tensor into another, which may be on another device.

use candle_core::Tensor;

use crate::error::Result;

/// Copies blocks, `(from, to)`, bit by bit. Both tensors are contiguous
/// `[num_blocks, block_size, kv_heads, dim]` and differ at most in `num_blocks` and device; no
/// target is named twice.
///
/// The blocks are gathered on the device they are on before they cross: one transfer, of
/// these blocks alone. Cost: two copies of them.
pub(super) fn swap_blocks(from: &Tensor, to: &Tensor, pairs: &[(u32, u32)]) -> Result<()> {
    let sources: Vec<u32> = pairs.iter().map(|&(from, _)| from).collect();
    let sources = Tensor::new(sources.as_slice(), from.device())?;
    let blocks = from.index_select(&sources, 0)?.to_device(to.device())?;
    let mut start = 0;
    while let Some(&(_, first)) = pairs.get(start) {
        let run = pairs[start..]
            .iter()
            .zip(first..)
            .take_while(|((_, to), next)| to == next)
            .count();
        to.slice_set(&blocks.narrow(0, start, run)?, 0, first as usize)?;
        start += run;
    }
    Ok(())
}
