//! `paged_attention` and `paged_attention_state`: attention of new rows over paged K/V.

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};

use super::device::has_kernels;
use super::{AttentionOptions, PageTable, check, cpu, portable};
use crate::error::Result;

/// Attention over some of the keys, in a form that [`merge_states`](super::merge_states)
/// combines with attention over others.
#[derive(Debug, Clone)]
pub struct AttnState {
    /// The normalised output, F32 `[rows, heads, v_dim]`; 0 for a row without keys.
    pub out: Tensor,
    /// Natural logarithm of the sum of `e^score` over the keys seen, F32 `[rows, heads]`;
    /// −inf for a row without keys. Never includes a sink.
    pub lse: Tensor,
}

impl AttnState {
    /// A custom op has one output: the output rows, then the log-sum-exps.
    pub(super) fn split(flat: &Tensor, (rows, heads, dim): (usize, usize, usize)) -> Result<Self> {
        let split = rows * heads * dim;
        Ok(Self {
            out: flat.narrow(0, 0, split)?.reshape((rows, heads, dim))?,
            lse: flat
                .narrow(0, split, rows * heads)?
                .reshape((rows, heads))?,
        })
    }
}

/// Attention of every query row of a batch over the cached keys of its sequence.
///
/// - `q`: `[rows, heads, k_dim]`, in the dtype of the cache, or F32; any strides (copied only
///   if the last dimension is not contiguous). `rows` are those of the table: any mix of
///   prompts, chunks of prompts, single decode rows and verification rows.
/// - `k_cache`, `v_cache`: `[num_blocks, block_size, kv_heads, dim]`, F32, F16 or BF16; any
///   stride between blocks. `heads` is a multiple of `kv_heads`; query head `h` reads KV head
///   `h / (heads / kv_heads)`. Dims: multiples of 8 up to 512, and may differ.
/// - The K/V of the new rows must have been written before
///   ([`write_kv`](super::write_kv)).
///
/// Returns `[rows, heads, v_dim]` in the dtype of `q`. Row `i` of the `n` rows of a sequence
/// stands at position `seq_len − n + i` and sees keys up to its own; a row without keys gives
/// 0. Softmax and sums are F32. The result of a sequence does not depend, to the bit, on what
/// else is in the batch or on which blocks hold its keys.
///
/// On a CPU, decode reads each K/V row once for all query heads of its group; longer chunks
/// are tiled matrix products with an online softmax (FlashAttention, Dao et al. 2022). Work
/// is split over rayon's current pool. Memory: the output, and a workspace kept per thread.
/// On CUDA (not yet run on a GPU) the table keeps its arrays and a workspace on the device;
/// they are copied by the first op that uses the table after a change.
///
/// # Errors
/// Typed errors for a wrong rank, shape, dtype or device, options that do not fit the heads, a
/// table that does not fit the cache or does not list a page that the mask can see.
pub fn paged_attention(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    table: &PageTable,
    options: &AttentionOptions,
) -> Result<Tensor> {
    if !has_kernels(q.device()) {
        return portable::paged_attention(q, k_cache, v_cache, table, options);
    }
    check::attention("paged_attention", q, (k_cache, v_cache), table, options)?;
    let op = PagedAttention {
        table,
        options,
        state: false,
    };
    Ok(with_packed_heads(q)?.apply_op3_no_bwd(k_cache, v_cache, &op)?)
}

/// As [`paged_attention`], but returns F32 output together with the log-sum-exp of every row
/// and head, so that attention over parts of a context can be merged.
///
/// # Errors
/// Those of [`paged_attention`]; and sinks are refused, because they enter once, when the
/// merged state is normalised, and not once per part.
pub fn paged_attention_state(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    table: &PageTable,
    options: &AttentionOptions,
) -> Result<AttnState> {
    if !has_kernels(q.device()) {
        return portable::paged_attention_state(q, k_cache, v_cache, table, options);
    }
    check::state(q, (k_cache, v_cache), table, options)?;
    let op = PagedAttention {
        table,
        options,
        state: true,
    };
    let flat = with_packed_heads(q)?.apply_op3_no_bwd(k_cache, v_cache, &op)?;
    AttnState::split(&flat, (q.dim(0)?, q.dim(1)?, v_cache.dim(3)?))
}

/// `q` itself unless the elements of a head are scattered.
fn with_packed_heads(q: &Tensor) -> Result<Tensor> {
    match q.stride() {
        [.., 1] => Ok(q.clone()),
        _ => Ok(q.contiguous()?),
    }
}

struct PagedAttention<'a> {
    table: &'a PageTable,
    options: &'a AttentionOptions,
    state: bool,
}

impl PagedAttention<'_> {
    fn shape(&self, q: &Layout, v: &Layout) -> Result<Shape> {
        let (rows, heads, _) = q.shape().dims3()?;
        let dim = v.shape().dims4()?.3;
        Ok(if self.state {
            Shape::from(rows * heads * (dim + 1))
        } else {
            Shape::from((rows, heads, dim))
        })
    }
}

impl CustomOp3 for PagedAttention<'_> {
    fn name(&self) -> &'static str {
        "paged_attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let out = cpu::attention(
            (q, q_layout),
            (k, k_layout),
            (v, v_layout),
            self.table,
            self.options,
            self.state,
        )?;
        Ok((out, self.shape(q_layout, v_layout)?))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_layout: &Layout,
        k: &candle_core::CudaStorage,
        k_layout: &Layout,
        v: &candle_core::CudaStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let out = super::cuda::attention(
            (q, q_layout),
            (k, k_layout),
            (v, v_layout),
            self.table,
            self.options,
            self.state,
        )?;
        Ok((out, self.shape(q_layout, v_layout)?))
    }
}
