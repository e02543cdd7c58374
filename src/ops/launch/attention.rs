//! Launches of attention: which kernel, how it is cut, what it is given.

use super::{Arg, Batch, CHUNK, CacheView, Element, Launch, Mask, Plan, RowsView};
use super::{STREAM_PAIRS, STREAM_PAIRS_FULL, Scores, Slot, THREADS};

/// How a kernel cuts its work.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// Pairs of a block.
    pairs: usize,
    threads: u32,
    shared: usize,
}

/// Tensor cores: 16-bit queries and cache of one type, dims up to 256, rows at multiples of 16
/// bytes.
fn tensor_cores(q: &RowsView, k: &CacheView, v: &CacheView) -> bool {
    k.element != Element::F32
        && q.element == k.element
        && k.dim.max(v.dim) <= 256
        && q.aligned()
        && k.aligned()
        && v.aligned()
}

/// Smallest head-dimension class that holds both dims.
fn dim_class(k: &CacheView, v: &CacheView) -> usize {
    let dim = k.dim.max(v.dim);
    [64, 128, 256]
        .into_iter()
        .find(|&d| dim <= d)
        .unwrap_or(512)
}

/// Tile of `decode_mma_*`: 16 pairs, `keys` keys, two stages of K and V.
fn decode_mma(class: usize) -> Shape {
    let (threads, keys) = if class == 256 { (64, 32) } else { (128, 64) };
    Shape {
        pairs: 16,
        threads,
        shared: mma_shared(16, keys, class),
    }
}

/// Tile of `decode_mma_wide_*`, for groups of more than 16 heads, and without causality.
fn decode_mma_wide(class: usize) -> Shape {
    let keys = if class == 256 { 32 } else { 64 };
    Shape {
        pairs: 32,
        threads: 128,
        shared: mma_shared(32, keys, class),
    }
}

/// Bytes of the queries and two stages of K and V.
fn mma_shared(pairs: usize, keys: usize, class: usize) -> usize {
    (pairs + 2 * 2 * keys) * class * 2
}

/// Tile of `prefill_mma_*`.
fn prefill_mma(class: usize) -> Shape {
    let (pairs, keys) = match class {
        64 => (128, 64),
        128 => (128, 32),
        _ => (64, 32),
    };
    Shape {
        pairs,
        threads: 128,
        shared: mma_shared(pairs, keys, class),
    }
}

/// Tile of `attend_simt_*`.
fn attend_simt(class: usize) -> Shape {
    const PAIRS: usize = 32;
    // Two stages of 32 KB of K and V; then, in the same place, what the warps found: outputs and
    // (max, sum) of each pair.
    let (stages, found) = (2 * 32 * 1024, PAIRS * (class + 2) * size_of::<f32>());
    Shape {
        pairs: PAIRS,
        threads: 256,
        shared: stages.max(found),
    }
}

/// A mask as kernels receive it (`EVERY_KEY` in `kernels/problem.cuh`). Contexts are shorter
/// than 2^31 tokens, so that a window of more is none.
fn window(mask: Mask) -> u32 {
    match mask {
        Mask::Causal => 0,
        Mask::CausalWindow(keys) => u32::try_from(keys)
            .ok()
            .filter(|&keys| keys < 1 << 31)
            .unwrap_or(0),
        Mask::Full => u32::MAX,
    }
}

/// `paged_attention`, or with `state` also the log-sum-exps: [`Slot::Out`] then holds F32
/// `rows * heads * v_dim` outputs of the batch's *capacity* of rows, then `rows * heads`
/// log-sum-exps; without state the outputs alone, in the element type of `q`.
///
/// `q` has contiguous head rows (`strides[2] == 1`).
pub fn attention(
    q: &RowsView,
    k: &CacheView,
    v: &CacheView,
    batch: &Batch,
    scores: &Scores,
    state: bool,
) -> Plan {
    if batch.rows == 0 || batch.seqs == 0 {
        return Plan::default();
    }
    let group = q.heads / k.kv_heads;
    let class = dim_class(k, v);
    let mma = tensor_cores(q, k, v);
    let full = scores.mask == Mask::Full;
    let stream_pairs = if full {
        STREAM_PAIRS_FULL
    } else {
        STREAM_PAIRS
    };
    let stream_rows = (stream_pairs / group).max(1);
    let streamed = batch.min_rows <= stream_rows;
    let split = streamed && batch.max_len > CHUNK;

    // One record per (chunk slot, streamed row, head): outputs, then (max, sum).
    let slots = batch.pages * k.block_size / CHUNK + batch.seqs;
    let stream_rows = stream_rows.min(batch.max_rows.max(1));
    let records = slots * stream_rows * q.heads;
    let sums = records * v.dim * size_of::<f32>();
    let workspace = if split {
        sums + records * 2 * size_of::<f32>()
    } else {
        0
    };

    let out_element = if state { Element::F32 } else { q.element };
    let in_workspace = |offset| {
        if split {
            Arg::Buffer(Slot::Workspace, offset)
        } else {
            Arg::Null
        }
    };
    let optional = |given, slot| {
        if given {
            Arg::Buffer(slot, 0)
        } else {
            Arg::Null
        }
    };
    let lse = if state {
        let first = batch.rows * q.heads * v.dim * size_of::<f32>();
        Arg::Buffer(Slot::Out, first)
    } else {
        Arg::Null
    };
    let common_head = [
        Arg::Buffer(Slot::Out, 0),
        lse,
        in_workspace(0),
        in_workspace(sums),
    ];
    let window = window(scores.mask);
    let attend = |kernel: String, grid_x: usize, shape: Shape, tiles: usize| Launch {
        kernel,
        grid: [grid_x as u32, k.kv_heads as u32, 1],
        block: shape.threads,
        shared: shape.shared as u32,
        args: [
            &common_head[..],
            &[
                q.arg(Slot::Q),
                k.arg(Slot::KCache),
                v.arg(Slot::VCache),
                Arg::Buffer(Slot::Indptr, 0),
                Arg::Buffer(Slot::Indices, 0),
                Arg::Buffer(Slot::FirstPage, 0),
                Arg::Buffer(Slot::SeqLens, 0),
                Arg::Buffer(Slot::QueryOffsets, 0),
                optional(scores.slopes, Slot::Slopes),
                optional(scores.sinks, Slot::Sinks),
                Arg::I64(q.strides[0] as i64),
                Arg::I64(q.strides[1] as i64),
                Arg::I64(k.block_stride as i64),
                Arg::I64(v.block_stride as i64),
                Arg::U32(batch.seqs as u32),
                Arg::U32(q.heads as u32),
                Arg::U32(k.kv_heads as u32),
                Arg::U32(k.dim as u32),
                Arg::U32(v.dim as u32),
                Arg::U32(k.block_shift()),
                Arg::U32(window),
                Arg::U32(q.element.code()),
                Arg::U32(out_element.code()),
                Arg::U32(stream_rows as u32),
                Arg::U32(tiles as u32),
                Arg::F32(scores.scale),
                Arg::F32(scores.softcap.unwrap_or(0.0)),
            ],
        ]
        .concat(),
    };

    let mut launches = Vec::new();
    let element = k.element.name();
    let without_tensor_cores = || {
        let kernel = format!("attend_simt_{element}_d{class}");
        (kernel, attend_simt(class))
    };
    if batch.max_rows > 1 && batch.max_rows * group > stream_pairs {
        let (kernel, shape) = if mma {
            let kernel = format!("prefill_mma_{element}_d{class}");
            (kernel, prefill_mma(class))
        } else {
            without_tensor_cores()
        };
        let tiles = batch.rows * group / shape.pairs + batch.seqs;
        launches.push(attend(kernel, tiles, shape, 0));
    }
    if streamed {
        let (kernel, shape) = if !mma {
            without_tensor_cores()
        } else if full || group > 16 {
            let kernel = format!("decode_mma_wide_{element}_d{class}");
            (kernel, decode_mma_wide(class))
        } else {
            let kernel = format!("decode_mma_{element}_d{class}");
            (kernel, decode_mma(class))
        };
        let tiles = (stream_rows * group).div_ceil(shape.pairs);
        launches.push(attend(kernel, slots * tiles, shape, tiles));
    }
    if split {
        launches.push(Launch {
            kernel: "reduce".into(),
            grid: [batch.seqs as u32, q.heads as u32, stream_rows as u32],
            block: THREADS,
            shared: 0,
            args: [
                &common_head[..],
                &[
                    Arg::Buffer(Slot::Indptr, 0),
                    Arg::Buffer(Slot::SeqLens, 0),
                    Arg::Buffer(Slot::QueryOffsets, 0),
                    optional(scores.sinks, Slot::Sinks),
                    Arg::U32(q.heads as u32),
                    Arg::U32(k.kv_heads as u32),
                    Arg::U32(v.dim as u32),
                    Arg::U32(k.block_shift()),
                    Arg::U32(window),
                    Arg::U32(out_element.code()),
                    Arg::U32(stream_rows as u32),
                ],
            ]
            .concat(),
        });
    }
    Plan {
        launches,
        workspace,
    }
}
