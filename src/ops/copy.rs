//! `copy_blocks`: whole blocks to other places of the same cache.

use std::collections::HashSet;

use candle_core::{CpuStorage, InplaceOp1, Layout, Tensor};

use super::device::has_kernels;
use super::{check, cpu, portable};
use crate::error::Result;

/// Copies whole blocks, `(from, to)`, within each of the given cache tensors: the K and V
/// tensors of every layer of a group, say, for copy-on-write.
///
/// All reads happen before all writes: with `(0, 1), (1, 2)` block 2 gets what block 1 held
/// before the call.
///
/// `caches`: each `[num_blocks, block_size, kv_heads, dim]`, F32, F16 or BF16, any stride
/// between blocks; shapes and dtypes may differ from cache to cache. Cost: one copy of each
/// block, plus a buffer for sources that an earlier pair overwrites.
///
/// # Errors
/// Typed errors for a wrong rank or dtype, an id outside one of the caches, or two pairs with
/// one target; on error nothing has changed. A tensor that is given twice is copied twice.
pub fn copy_blocks(caches: &[&Tensor], pairs: &[(u32, u32)]) -> Result<()> {
    const OP: &str = "copy_blocks";
    for cache in caches {
        let shape = check::cache(OP, "cache", cache)?;
        check::copy_pairs(OP, shape.num_blocks, pairs)?;
        if !has_kernels(cache.device()) {
            check::contiguous(OP, "cache", cache)?;
        }
    }
    let mut written = HashSet::new();
    let late: Vec<bool> = pairs
        .iter()
        .map(|&(from, to)| {
            let late = written.contains(&from);
            written.insert(to);
            late
        })
        .collect();
    for cache in caches {
        if has_kernels(cache.device()) {
            cache.inplace_op1(&CopyBlocks { pairs, late: &late })?;
        } else {
            portable::copy_pairs(cache, pairs)?;
        }
    }
    Ok(())
}

struct CopyBlocks<'a> {
    pairs: &'a [(u32, u32)],
    /// Whether an earlier pair overwrites the source of this one.
    late: &'a [bool],
}

impl InplaceOp1 for CopyBlocks<'_> {
    fn name(&self) -> &'static str {
        "copy_blocks"
    }

    fn cpu_fwd(&self, cache: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        cpu::copy_blocks(cache, layout, self.pairs, self.late)?;
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        cache: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        super::cuda::copy_blocks((cache, layout), self.pairs)?;
        Ok(())
    }
}
