//! `gather_kv`: the K/V of one sequence, contiguous.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use super::{PageTable, check, cpu, portable};
use crate::error::Result;

/// Copies the K and V rows of sequence `seq` of the table out of the cache, in token order:
/// for debugging, and for attention code that wants contiguous tensors.
///
/// Returns `(k, v)`, `[tokens, kv_heads, dim]` in the dtype of the cache, of the tokens in the
/// listed pages: positions `first_page * block_size .. seq_len`. Cost: one copy of them.
///
/// # Errors
/// Typed errors for a wrong rank, shape or dtype, a table that does not fit the cache, or no
/// such sequence; on a GPU, for a cache that is not contiguous.
pub fn gather_kv(
    k_cache: &Tensor,
    v_cache: &Tensor,
    table: &PageTable,
    seq: usize,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "gather_kv";
    let (shape, _) = check::caches(OP, k_cache, v_cache)?;
    check::table(OP, table, shape)?;
    check::sequence(OP, table, seq)?;
    if !k_cache.device().is_cpu() {
        check::contiguous(OP, "k_cache", k_cache)?;
        check::contiguous(OP, "v_cache", v_cache)?;
        return Ok((
            portable::gather(k_cache, table, seq)?,
            portable::gather(v_cache, table, seq)?,
        ));
    }
    let (pages, first) = table.pages(seq);
    let gather = Gather {
        pages,
        tokens: (table.seq_lens()[seq] as usize).saturating_sub(first * shape.block_size),
    };
    Ok((
        k_cache.apply_op1_no_bwd(&gather)?,
        v_cache.apply_op1_no_bwd(&gather)?,
    ))
}

struct Gather<'a> {
    pages: &'a [u32],
    tokens: usize,
}

impl CustomOp1 for Gather<'_> {
    fn name(&self) -> &'static str {
        "gather_kv"
    }

    fn cpu_fwd(
        &self,
        cache: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (_, _, kv_heads, dim) = layout.shape().dims4()?;
        let out = cpu::gather(cache, layout, self.pages, self.tokens)?;
        Ok((out, Shape::from((self.tokens, kv_heads, dim))))
    }
}
