//! The ops from candle tensor operations alone: the same contract on any device that candle
//! knows, without a kernel of ours. The public ops use it where there is no kernel; on a CPU
//! it is the second opinion in the tests.
//!
//! Limits: cache tensors must be contiguous, and attention gathers the K/V of each sequence
//! and holds a slab of scores.

use candle_core::{DType, Device, Tensor};

use super::cascade::{self, Cascade};
use super::merge::{finite_or_zero, merge_by_tensor_ops, one_if_zero};
use super::{AttentionOptions, AttnState, PageTable, check};
use crate::error::Result;

/// Scores held at once, in elements: longer chunks of queries are cut.
const SLAB: usize = 1 << 22;

/// [`write_kv`](super::write_kv) by `slice_set`, one call per run of consecutive slots.
///
/// # Errors
/// Those of [`write_kv`](super::write_kv), and for a cache that is not contiguous.
pub fn write_kv(
    k_cache: &Tensor,
    v_cache: &Tensor,
    k: &Tensor,
    v: &Tensor,
    table: &PageTable,
) -> Result<()> {
    const OP: &str = "write_kv";
    check::write(OP, (k_cache, v_cache), (k, v), table)?;
    check::contiguous(OP, "k_cache", k_cache)?;
    check::contiguous(OP, "v_cache", v_cache)?;
    write_rows(k_cache, k, table.slots())?;
    write_rows(v_cache, v, table.slots())
}

/// [`paged_attention`](super::paged_attention) by gathering each sequence.
///
/// # Errors
/// Those of [`paged_attention`](super::paged_attention), and for a cache that is not
/// contiguous.
pub fn paged_attention(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    table: &PageTable,
    options: &AttentionOptions,
) -> Result<Tensor> {
    const OP: &str = "paged_attention";
    check::attention(OP, q, (k_cache, v_cache), table, options)?;
    let state = attend(OP, q, (k_cache, v_cache), table, options)?;
    Ok(state.out.to_dtype(q.dtype())?)
}

/// [`paged_attention_state`](super::paged_attention_state) by gathering each sequence.
///
/// # Errors
/// Those of [`paged_attention_state`](super::paged_attention_state), and for a cache that is
/// not contiguous.
pub fn paged_attention_state(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    table: &PageTable,
    options: &AttentionOptions,
) -> Result<AttnState> {
    check::state(q, (k_cache, v_cache), table, options)?;
    attend(
        "paged_attention_state",
        q,
        (k_cache, v_cache),
        table,
        options,
    )
}

/// [`cascade_attention`](super::cascade_attention) from the two ops above and
/// tensor ops.
///
/// # Errors
/// Those of [`cascade_attention`](super::cascade_attention), and for a cache that is not
/// contiguous.
pub fn cascade_attention(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    cascade: &Cascade,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let ops = (
        paged_attention as _,
        paged_attention_state as _,
        merge_by_tensor_ops as _,
    );
    cascade::compose(ops, q, (k_cache, v_cache), cascade, options)
}

/// [`copy_blocks`](super::copy_blocks) by `slice_set`.
///
/// # Errors
/// Those of [`copy_blocks`](super::copy_blocks), and for a cache that is not contiguous.
pub fn copy_blocks(caches: &[&Tensor], pairs: &[(u32, u32)]) -> Result<()> {
    const OP: &str = "copy_blocks";
    for cache in caches {
        let shape = check::cache(OP, "cache", cache)?;
        check::copy_pairs(OP, shape.num_blocks, pairs)?;
        check::contiguous(OP, "cache", cache)?;
    }
    caches
        .iter()
        .try_for_each(|cache| self::copy_pairs(cache, pairs))
}

/// [`gather_kv`](super::gather_kv) by `index_select`.
///
/// # Errors
/// Those of [`gather_kv`](super::gather_kv), and for a cache that is not contiguous.
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
    check::contiguous(OP, "k_cache", k_cache)?;
    check::contiguous(OP, "v_cache", v_cache)?;
    Ok((gather(k_cache, table, seq)?, gather(v_cache, table, seq)?))
}

/// Writes checked rows into one cache tensor.
pub(super) fn write_rows(cache: &Tensor, rows: &Tensor, slots: &[i64]) -> Result<()> {
    let (blocks, block_size, heads, dim) = cache.dims4()?;
    let cache = cache.reshape((blocks * block_size, heads, dim))?;
    let mut start = 0;
    while start < slots.len() {
        if slots[start] < 0 {
            start += 1;
            continue;
        }
        let run = slots[start..]
            .iter()
            .zip(slots[start]..)
            .take_while(|(slot, next)| **slot == *next)
            .count();
        let part = rows
            .narrow(0, start, run)?
            .to_dtype(cache.dtype())?
            .contiguous()?;
        cache.slice_set(&part, 0, slots[start] as usize)?;
        start += run;
    }
    Ok(())
}

/// Copies checked pairs within one cache tensor: all reads, then all writes.
pub(super) fn copy_pairs(cache: &Tensor, pairs: &[(u32, u32)]) -> Result<()> {
    let sources = pairs
        .iter()
        .map(|&(from, _)| cache.narrow(0, from as usize, 1)?.copy())
        .collect::<candle_core::Result<Vec<_>>>()?;
    for (source, &(_, to)) in sources.iter().zip(pairs) {
        cache.slice_set(source, 0, to as usize)?;
    }
    Ok(())
}

/// The rows of the listed pages of a sequence, `[tokens, kv_heads, dim]`.
pub(super) fn gather(cache: &Tensor, table: &PageTable, seq: usize) -> Result<Tensor> {
    let (_, block_size, heads, dim) = cache.dims4()?;
    let (pages, first) = table.pages(seq);
    let tokens = (table.seq_lens()[seq] as usize).saturating_sub(first * block_size);
    if tokens == 0 {
        return Ok(Tensor::zeros(
            (0, heads, dim),
            cache.dtype(),
            cache.device(),
        )?);
    }
    let ids = Tensor::from_slice(pages, pages.len(), cache.device())?;
    Ok(cache
        .index_select(&ids, 0)?
        .reshape((pages.len() * block_size, heads, dim))?
        .narrow(0, 0, tokens)?
        .contiguous()?)
}

/// Attention of arguments that a kernel would take; `out` includes the sinks, if any, `lse`
/// does not.
fn attend(
    op: &'static str,
    q: &Tensor,
    (k_cache, v_cache): (&Tensor, &Tensor),
    table: &PageTable,
    options: &AttentionOptions,
) -> Result<AttnState> {
    check::contiguous(op, "k_cache", k_cache)?;
    check::contiguous(op, "v_cache", v_cache)?;
    let (_, heads, _) = q.dims3()?;
    let (_, block_size, _, v_dim) = v_cache.dims4()?;
    let q = q.to_dtype(DType::F32)?;
    let mut parts = Vec::new();
    for seq in 0..table.num_seqs() {
        let rows = table.rows(seq);
        let keys = Keys {
            k: gather(k_cache, table, seq)?.to_dtype(DType::F32)?,
            v: gather(v_cache, table, seq)?.to_dtype(DType::F32)?,
            first: table.first_page()[seq] as usize * block_size,
        };
        let at_once = (SLAB / (heads * keys.k.dim(0)?.max(1))).max(1);
        for start in rows.clone().step_by(at_once) {
            let count = at_once.min(rows.end - start);
            // Negative where there are more queries than tokens: such a row sees no key.
            let position = i64::from(table.seq_lens()[seq]) - (rows.end - start) as i64;
            parts.push(attend_rows(
                &q.narrow(0, start, count)?,
                &keys,
                position,
                options,
            )?);
        }
    }
    if parts.is_empty() {
        return no_keys(0, heads, v_dim, q.device());
    }
    let outs: Vec<&Tensor> = parts.iter().map(|part| &part.out).collect();
    let lses: Vec<&Tensor> = parts.iter().map(|part| &part.lse).collect();
    Ok(AttnState {
        out: Tensor::cat(&outs, 0)?,
        lse: Tensor::cat(&lses, 0)?,
    })
}

/// The gathered context of a sequence, `[tokens, kv_heads, dim]`, from position `first` on.
struct Keys {
    k: Tensor,
    v: Tensor,
    first: usize,
}

/// The state of `n` rows that see no key.
fn no_keys(n: usize, heads: usize, v_dim: usize, device: &Device) -> Result<AttnState> {
    Ok(AttnState {
        out: Tensor::zeros((n, heads, v_dim), DType::F32, device)?,
        lse: Tensor::full(f32::NEG_INFINITY, (n, heads), device)?,
    })
}

/// Attention of consecutive rows of one sequence, the first of them at `position`.
fn attend_rows(
    q: &Tensor,
    keys: &Keys,
    position: i64,
    options: &AttentionOptions,
) -> Result<AttnState> {
    let (n, heads, k_dim) = q.dims3()?;
    let (tokens, kv_heads, v_dim) = keys.v.dims3()?;
    let group = heads / kv_heads;
    let device = q.device();

    // Keys that any of the rows sees. Nothing outside enters a product.
    let context = keys.first + tokens;
    let seen = |row: usize| options.mask.keys(position + row as i64, context);
    let first_row = usize::try_from(-position).unwrap_or(0).min(n - 1);
    let begin = seen(first_row).start.max(keys.first);
    let end = seen(n - 1).end;
    if end <= begin {
        return no_keys(n, heads, v_dim, device);
    }
    let len = end - begin;
    let of_head = |rows: &Tensor| -> Result<Tensor> {
        Ok(rows
            .narrow(0, begin - keys.first, len)?
            .transpose(0, 1)?
            .contiguous()?)
    };
    let (k, v) = (of_head(&keys.k)?, of_head(&keys.v)?);

    let q = (q.reshape((n, kv_heads, group, k_dim))? * f64::from(options.scale))?
        .permute((1, 0, 2, 3))?
        .contiguous()?
        .reshape((kv_heads, n * group, k_dim))?;
    let mut scores = q
        .matmul(&k.transpose(1, 2)?.contiguous()?)?
        .reshape((kv_heads, n, group, len))?;
    if let Some(cap) = options.softcap {
        let cap = f64::from(cap);
        scores = ((scores * cap.recip())?.tanh()? * cap)?;
    }
    if let Some(slopes) = &options.alibi_slopes {
        let slopes = Tensor::from_slice(slopes, (kv_heads, 1, group, 1), device)?;
        let distances = Tensor::from_vec(
            per_pair(n, len, |i, j| {
                (begin as i64 + j as i64 - position - i as i64) as f32
            }),
            (1, n, 1, len),
            device,
        )?;
        scores = scores.broadcast_add(&slopes.broadcast_mul(&distances)?)?;
    }
    let visible = Tensor::from_vec(
        per_pair(n, len, |i, j| u8::from(seen(i).contains(&(begin + j)))),
        (1, n, 1, len),
        device,
    )?
    .broadcast_as(scores.shape())?;
    let hidden = Tensor::full(f32::NEG_INFINITY, scores.shape(), device)?;
    let scores = visible.where_cond(&scores, &hidden)?;

    let base = finite_or_zero(&scores.max_keepdim(3)?)?;
    let weights = scores.broadcast_sub(&base)?.exp()?;
    let total = weights.sum_keepdim(3)?;
    let lse = (&base + total.log()?)?;
    let denominator = match &options.sinks {
        None => total,
        Some(sinks) => {
            let sinks = Tensor::from_slice(sinks, (kv_heads, 1, group, 1), device)?;
            (total + sinks.broadcast_sub(&base)?.exp()?)?
        }
    };
    let out = weights
        .reshape((kv_heads, n * group, len))?
        .matmul(&v)?
        .reshape((kv_heads, n, group, v_dim))?
        .broadcast_div(&one_if_zero(&denominator)?)?;
    let rows_first = |t: Tensor, dim: usize| t.permute((1, 0, 2, 3))?.reshape((n, heads, dim));
    Ok(AttnState {
        out: rows_first(out, v_dim)?,
        lse: rows_first(lse, 1)?.squeeze(2)?,
    })
}

/// A row-major `[n, len]` array of a function of (query, key).
fn per_pair<T>(n: usize, len: usize, f: impl Fn(usize, usize) -> T) -> Vec<T> {
    let f = &f;
    (0..n)
        .flat_map(|i| (0..len).map(move |j| f(i, j)))
        .collect()
}
