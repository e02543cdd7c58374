//! `write_kv`: new K/V rows into their cache slots.

use candle_core::{CpuStorage, InplaceOp2, Layout, Tensor};

use super::device::has_kernels;
use super::{PageTable, check, cpu, portable};
use crate::error::Result;

/// Writes the new rows of a step into the cache: row `i` of `k` and `v` goes to slot
/// `table.slots()[i]`, `slot = block * block_size + offset`; a slot of −1 writes nothing.
/// Given one slot twice, the later row stays.
///
/// - `k_cache`, `v_cache`: `[num_blocks, block_size, kv_heads, dim]`, F32, F16 or BF16, one
///   dtype for both; the dims may differ. Any stride between blocks, any start offset.
/// - `k`, `v`: `[rows, kv_heads, dim]`, each F32, F16 or BF16 (converted while writing), any
///   strides and offset: slices of a fused qkv and transposed tensors are read in place.
///
/// The tensors are changed in place, through every view of them. Cost: one pass over the new
/// rows; nothing is allocated on a CPU, nor on a GPU once its buffers have grown.
///
/// # Errors
/// Typed errors for a wrong rank, shape, dtype or device, a table of another block size, a
/// slot outside the cache, or a source that is a view of a cache. All checks come before the
/// first write: on error nothing has changed.
pub fn write_kv(
    k_cache: &Tensor,
    v_cache: &Tensor,
    k: &Tensor,
    v: &Tensor,
    table: &PageTable,
) -> Result<()> {
    check::write("write_kv", (k_cache, v_cache), (k, v), table)?;
    for (cache, rows) in [(k_cache, k), (v_cache, v)] {
        if has_kernels(cache.device()) {
            cache.inplace_op2(rows, &WriteRows { table })?;
        } else {
            portable::write_rows(cache, rows, table.slots())?;
        }
    }
    Ok(())
}

struct WriteRows<'a> {
    table: &'a PageTable,
}

impl InplaceOp2 for WriteRows<'_> {
    fn name(&self) -> &'static str {
        "write_kv"
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        cache_layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
    ) -> candle_core::Result<()> {
        let slots = self.table.slots();
        cpu::write_rows(cache, cache_layout, rows, rows_layout, slots)?;
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        cache: &mut candle_core::CudaStorage,
        cache_layout: &Layout,
        rows: &candle_core::CudaStorage,
        rows_layout: &Layout,
    ) -> candle_core::Result<()> {
        super::cuda::write_rows((cache, cache_layout), (rows, rows_layout), self.table)?;
        Ok(())
    }
}
