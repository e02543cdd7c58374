//! The argument checks of every op, in one place, so that no kernel trusts a number that
//! another kernel checks.

use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp2, Layout, MetalStorage, Tensor};

use super::{AttentionOptions, Mask, PageTable};
use crate::error::{Error, Result};

/// Largest head dimension that the kernels take.
pub(crate) const MAX_DIM: usize = 512;

/// The dimensions of a cache tensor `[num_blocks, block_size, kv_heads, dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheShape {
    pub num_blocks: usize,
    pub block_size: usize,
    pub kv_heads: usize,
    pub dim: usize,
}

fn invalid(op: &'static str, what: &str, expected: impl Into<String>, got: String) -> Error {
    Error::InvalidArgument {
        op,
        what: what.into(),
        expected: expected.into(),
        got,
    }
}

/// The dimensions of a tensor that must have exactly three.
fn dims3(
    op: &'static str,
    name: &str,
    tensor: &Tensor,
    expected: &str,
) -> Result<(usize, usize, usize)> {
    tensor.dims3().map_err(|_| Error::Shape {
        op,
        tensor: name.into(),
        expected: expected.into(),
        got: tensor.dims().to_vec(),
    })
}

fn dtype(op: &'static str, name: &'static str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        got => Err(Error::Dtype {
            op,
            tensor: name,
            expected: "F32, F16 or BF16".into(),
            got,
        }),
    }
}

fn same_device(
    op: &'static str,
    name: &'static str,
    tensor: &Tensor,
    reference: &Tensor,
) -> Result<()> {
    let (expected, got) = (reference.device().location(), tensor.device().location());
    if expected == got {
        return Ok(());
    }
    Err(Error::Device {
        op,
        tensor: name,
        expected,
        got,
    })
}

/// A cache tensor: rank, dtype, dims, and rows of a block that lie one after the other. The
/// stride between blocks is free as long as blocks do not overlap.
pub(crate) fn cache(op: &'static str, name: &'static str, tensor: &Tensor) -> Result<CacheShape> {
    let Ok((num_blocks, block_size, kv_heads, dim)) = tensor.dims4() else {
        return Err(Error::Shape {
            op,
            tensor: name.into(),
            expected: "[num_blocks, block_size, kv_heads, dim]".into(),
            got: tensor.dims().to_vec(),
        });
    };
    dtype(op, name, tensor)?;
    crate::block::check_block_size(op, block_size)?;
    if kv_heads == 0 {
        return Err(invalid(op, "kv_heads", "at least 1", "0".into()));
    }
    if dim == 0 || dim % 8 != 0 || dim > MAX_DIM {
        return Err(invalid(
            op,
            &format!("head dimension of {name}"),
            format!("a multiple of 8 from 8 to {MAX_DIM}"),
            dim.to_string(),
        ));
    }
    let block_len = block_size * kv_heads * dim;
    let strides = tensor.stride();
    // The stride of a dimension of size 1 names no second element and may be anything.
    let packed = |axis: usize, size: usize, want: usize| size == 1 || strides[axis] == want;
    if !(packed(1, block_size, kv_heads * dim) && packed(2, kv_heads, dim) && packed(3, dim, 1)) {
        return Err(invalid(
            op,
            &format!("strides of {name}"),
            format!(
                "rows of a block contiguous: [_, {}, {dim}, 1]",
                kv_heads * dim
            ),
            format!("{strides:?}"),
        ));
    }
    if num_blocks > 1 && strides[0] < block_len {
        return Err(invalid(
            op,
            &format!("block stride of {name}"),
            format!("at least {block_len} (blocks do not overlap)"),
            strides[0].to_string(),
        ));
    }
    Ok(CacheShape {
        num_blocks,
        block_size,
        kv_heads,
        dim,
    })
}

/// The K and V cache of one layer: equal in everything but the head dimension.
pub(crate) fn caches(
    op: &'static str,
    k_cache: &Tensor,
    v_cache: &Tensor,
) -> Result<(CacheShape, CacheShape)> {
    let k = cache(op, "k_cache", k_cache)?;
    let v = cache(op, "v_cache", v_cache)?;
    if (CacheShape { dim: k.dim, ..v }) != k {
        return Err(Error::Shape {
            op,
            tensor: "v_cache".into(),
            expected: format!(
                "[{}, {}, {}, v_dim] as k_cache",
                k.num_blocks, k.block_size, k.kv_heads
            ),
            got: v_cache.dims().to_vec(),
        });
    }
    if v_cache.dtype() != k_cache.dtype() {
        return Err(Error::Dtype {
            op,
            tensor: "v_cache",
            expected: format!("{:?} as k_cache", k_cache.dtype()),
            got: v_cache.dtype(),
        });
    }
    same_device(op, "v_cache", v_cache, k_cache)?;
    Ok((k, v))
}

/// The table against the cache it is used with: O(1).
pub(crate) fn table(op: &'static str, table: &PageTable, cache: CacheShape) -> Result<()> {
    let rule = |rule: &'static str, got: String| Error::PageTable { op, rule, got };
    if table.block_size() != cache.block_size {
        return Err(rule(
            "its block size is the cache's",
            format!(
                "{} for a cache with blocks of {}",
                table.block_size(),
                cache.block_size
            ),
        ));
    }
    if let Some(page) = table.max_page().filter(|&p| p as usize >= cache.num_blocks) {
        return Err(rule(
            "page ids are less than num_blocks",
            format!("page {page} in a cache of {} blocks", cache.num_blocks),
        ));
    }
    Ok(())
}

/// Arguments of `write_kv`.
pub(crate) fn write(
    op: &'static str,
    (k_cache, v_cache): (&Tensor, &Tensor),
    (k, v): (&Tensor, &Tensor),
    page_table: &PageTable,
) -> Result<()> {
    let (k_shape, v_shape) = caches(op, k_cache, v_cache)?;
    table(op, page_table, k_shape)?;
    for (name, tensor, shape) in [("k", k, k_shape), ("v", v, v_shape)] {
        let want = (page_table.num_rows(), shape.kv_heads, shape.dim);
        let expected = format!("[{}, {}, {}]", want.0, want.1, want.2);
        if dims3(op, name, tensor, &expected)? != want {
            return Err(Error::Shape {
                op,
                tensor: name.into(),
                expected,
                got: tensor.dims().to_vec(),
            });
        }
        dtype(op, name, tensor)?;
        same_device(op, name, tensor, k_cache)?;
    }
    let rows = k_shape.num_blocks as u64 * k_shape.block_size as u64;
    if page_table.max_slot() >= 0 && page_table.max_slot() as u64 >= rows {
        return Err(Error::PageTable {
            op,
            rule: "slots are less than num_blocks * block_size",
            got: format!("slot {} in a cache of {rows} rows", page_table.max_slot()),
        });
    }
    for (name, source) in [("k", k), ("v", v)] {
        for cache in [k_cache, v_cache] {
            no_alias(op, name, source, cache)?;
        }
    }
    Ok(())
}

/// Arguments of the attention ops.
pub(crate) fn attention(
    op: &'static str,
    q: &Tensor,
    caches: (&Tensor, &Tensor),
    page_table: &PageTable,
    options: &AttentionOptions,
) -> Result<()> {
    let shape = queries(op, q, caches, page_table.num_rows(), options)?;
    table(op, page_table, shape)?;
    visible_pages(op, page_table, options.mask)
}

/// Arguments of `paged_attention_state`. Sinks enter once, at the final normalisation: a partial
/// state must not contain them.
pub(crate) fn state(
    q: &Tensor,
    caches: (&Tensor, &Tensor),
    page_table: &PageTable,
    options: &AttentionOptions,
) -> Result<()> {
    const OP: &str = "paged_attention_state";
    attention(OP, q, caches, page_table, options)?;
    match &options.sinks {
        None => Ok(()),
        Some(sinks) => Err(invalid(
            OP,
            "sinks",
            "none: a partial state is normalised without them",
            format!("{} sinks", sinks.len()),
        )),
    }
}

/// What attention of `rows` queries demands whatever the table. Answers the shape of the K
/// cache.
pub(crate) fn queries(
    op: &'static str,
    q: &Tensor,
    (k_cache, v_cache): (&Tensor, &Tensor),
    rows: usize,
    options: &AttentionOptions,
) -> Result<CacheShape> {
    let (k_shape, _) = caches(op, k_cache, v_cache)?;
    let expected = format!("[{rows}, heads, {}]", k_shape.dim);
    let (q_rows, heads, dim) = dims3(op, "q", q, &expected)?;
    if q_rows != rows || dim != k_shape.dim {
        return Err(Error::Shape {
            op,
            tensor: "q".into(),
            expected,
            got: q.dims().to_vec(),
        });
    }
    if heads == 0 || heads % k_shape.kv_heads != 0 {
        return Err(invalid(
            op,
            "query heads",
            format!("a multiple of the {} KV heads", k_shape.kv_heads),
            heads.to_string(),
        ));
    }
    if q.dtype() != k_cache.dtype() && q.dtype() != DType::F32 {
        return Err(Error::Dtype {
            op,
            tensor: "q",
            expected: format!("{:?} as the cache, or F32", k_cache.dtype()),
            got: q.dtype(),
        });
    }
    same_device(op, "q", q, k_cache)?;
    self::options(op, options, heads)?;
    Ok(k_shape)
}

fn options(op: &'static str, options: &AttentionOptions, heads: usize) -> Result<()> {
    if !options.scale.is_finite() {
        return Err(invalid(op, "scale", "finite", options.scale.to_string()));
    }
    if let Some(cap) = options.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
        return Err(invalid(
            op,
            "softcap",
            "finite and positive",
            cap.to_string(),
        ));
    }
    if options.mask == Mask::CausalWindow(0) {
        return Err(invalid(op, "window", "at least 1", "0".into()));
    }
    for (name, values, sound) in [
        (
            "alibi_slopes",
            &options.alibi_slopes,
            (|x| x.is_finite()) as fn(&f32) -> bool,
        ),
        // −inf is a sink that takes nothing.
        ("sinks", &options.sinks, |x| *x < f32::INFINITY),
    ] {
        let Some(values) = values else { continue };
        if values.len() != heads {
            return Err(invalid(
                op,
                name,
                format!("one value for each of {heads} query heads"),
                format!("{} values", values.len()),
            ));
        }
        if let Some(bad) = values.iter().find(|x| !sound(x)) {
            return Err(invalid(op, name, "finite numbers", bad.to_string()));
        }
    }
    Ok(())
}

/// Every key that the mask lets a query see must lie in a listed page; a table made for a
/// smaller window would otherwise give a plausible, wrong answer.
fn visible_pages(op: &'static str, table: &PageTable, mask: Mask) -> Result<()> {
    for s in 0..table.num_seqs() {
        let rows = table.rows(s).len();
        let len = table.seq_lens()[s] as usize;
        let listed = table.first_page()[s] as usize * table.block_size();
        if rows == 0 || len == 0 {
            continue;
        }
        let first = mask.keys(len.saturating_sub(rows) as i64, len).start;
        if first < listed {
            return Err(Error::PageTable {
                op,
                rule: "every page that the mask can see is listed",
                got: format!(
                    "sequence {s} lists tokens from {listed} on, its first query sees from {first}"
                ),
            });
        }
    }
    Ok(())
}

/// Refuses a source that shares its storage with a cache: one lock would wait for the other
/// forever, or the first write would change what the second one reads.
///
/// candle compares storages only inside its in-place ops, so the question is asked by one
/// that writes nothing.
fn no_alias(op: &'static str, name: &str, source: &Tensor, cache: &Tensor) -> Result<()> {
    cache.inplace_op2(source, &Probe).map_err(|_| {
        invalid(
            op,
            name,
            "a tensor with its own storage",
            "a view of the cache".into(),
        )
    })
}

struct Probe;

impl InplaceOp2 for Probe {
    fn name(&self) -> &'static str {
        "alias_probe"
    }

    fn cpu_fwd(
        &self,
        _: &mut CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<()> {
        Ok(())
    }

    fn cuda_fwd(
        &self,
        _: &mut CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<()> {
        Ok(())
    }

    fn metal_fwd(
        &self,
        _: &mut MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<()> {
        Ok(())
    }
}

/// What a portable op needs beyond the checks of its kernel twin.
pub(crate) fn contiguous(op: &'static str, name: &str, tensor: &Tensor) -> Result<()> {
    if tensor.is_contiguous() {
        return Ok(());
    }
    Err(invalid(
        op,
        &format!("strides of {name}"),
        "a contiguous cache tensor (there is no kernel for this device)",
        format!("{:?}", tensor.stride()),
    ))
}

/// Block pairs of `copy_blocks`: in range, and no block is the target of two pairs.
pub(crate) fn copy_pairs(op: &'static str, num_blocks: usize, pairs: &[(u32, u32)]) -> Result<()> {
    if let Some(pair) = pairs
        .iter()
        .find(|(from, to)| (*from).max(*to) as usize >= num_blocks)
    {
        return Err(invalid(
            op,
            "block pair",
            format!("ids below {num_blocks}"),
            format!("{pair:?}"),
        ));
    }
    let mut targets: Vec<u32> = pairs.iter().map(|&(_, to)| to).collect();
    targets.sort_unstable();
    match targets.windows(2).find(|w| w[0] == w[1]) {
        None => Ok(()),
        Some(twice) => Err(invalid(
            op,
            "block pairs",
            "each block the target of one pair",
            format!("block {} twice", twice[0]),
        )),
    }
}

/// The sequence that `gather_kv` is asked for.
pub(crate) fn sequence(op: &'static str, table: &PageTable, seq: usize) -> Result<()> {
    if seq < table.num_seqs() {
        return Ok(());
    }
    Err(invalid(
        op,
        "seq",
        format!("below the {} sequences of the table", table.num_seqs()),
        seq.to_string(),
    ))
}
