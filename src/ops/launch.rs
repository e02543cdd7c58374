//! What a CUDA call launches: kernel, grid, block, shared memory and arguments.
//!
//! Pure arithmetic on shapes, strides and capacities, without candle and without a device, so
//! that two executors share it: the device, and the emulator that runs the same kernels on a
//! CPU (`kernels/emulator`). Nothing here reads a sequence length: lengths are in device
//! buffers, grids come from the capacity ([`Batch`]), so a captured graph stays valid while
//! the batch changes within it.
//!
//! How attention is cut (`kernels/problem.cuh` has the same rules on the device side). A
//! *pair* is one query row and one query head; the pairs of a sequence and a KV head are
//! numbered `row * group + head % group`, so that one read of K/V serves a whole group.
//! - A sequence with 1 row, or with at most [`STREAM_PAIRS`] pairs per KV head, is *streamed*:
//!   its visible keys are cut into chunks ([`chunk_keys`]), one block each, and `reduce` merges
//!   the chunks. Chunks of sequence `s` have the slots from `indptr[s] * block_size / 256 + s`
//!   on: a bound that needs no scan, so the workspace is proportional to the listed pages.
//! - Any other sequence is cut into tiles of pairs, one block each, which pass over all keys.
//!
//! Both choices depend on the sequence alone, so its result does not depend on its batch mates.

/// Streamed sequences have one row, or at most this many pairs per KV head.
pub const STREAM_PAIRS: usize = 16;

/// Keys of the smallest context chunk.
pub const CHUNK: usize = 256;

/// Threads of a block of the kernels that take any number.
const THREADS: u32 = 128;

/// Keys per chunk of a streamed sequence in which `keys` keys are visible.
pub fn chunk_keys(keys: usize) -> usize {
    if keys < 4096 { CHUNK } else { 2 * CHUNK }
}

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
}

impl Element {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// As it appears in kernel names.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// As kernels receive it.
    fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::BF16 => 2,
        }
    }
}

/// The buffer an argument points into. The executor knows the storage of each; `Arg::Buffer`
/// adds the byte offset of the tensor's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Slot {
    /// Output of an op. Attention with state: F32, rows first, then the log-sum-exps.
    Out,
    /// Scratch of at least the bytes that the plan of launches states.
    Workspace,
    /// Query rows.
    Q,
    /// K cache of a layer.
    KCache,
    /// V cache of a layer.
    VCache,
    /// The one cache tensor that `write_kv` or `copy_blocks` changes.
    Cache,
    /// New K or V rows of `write_kv`.
    Rows,
    /// `PageTable::slots`, i64.
    Slots,
    /// `PageTable::indptr`, u32.
    Indptr,
    /// `PageTable::indices`, u32.
    Indices,
    /// `PageTable::first_page`, u32.
    FirstPage,
    /// `PageTable::seq_lens`, u32.
    SeqLens,
    /// `PageTable::query_offsets`, u32.
    QueryOffsets,
    /// ALiBi slopes, f32 `[heads]`.
    Slopes,
    /// Sink logits, f32 `[heads]`.
    Sinks,
    /// [`CopyPlan::pairs`], u32.
    Pairs,
    /// `out` of the first state of `merge_states`.
    AOut,
    /// `lse` of the first state.
    ALse,
    /// `out` of the second state.
    BOut,
    /// `lse` of the second state.
    BLse,
}

/// One kernel argument, in the order of the kernel's parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// A 64-bit pointer: the start of the buffer plus this many *bytes*.
    Buffer(Slot, usize),
    /// A null pointer: the feature is off.
    Null,
    /// A `u32`.
    U32(u32),
    /// An `i64`.
    I64(i64),
    /// An `f32`.
    F32(f32),
}

impl Arg {
    /// Bytes of the parameter.
    pub fn size(&self) -> usize {
        match self {
            Self::Buffer(..) | Self::Null | Self::I64(_) => 8,
            Self::U32(_) | Self::F32(_) => 4,
        }
    }
}

/// One kernel launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Entry point in `kernels/paged_attn.cu`.
    pub kernel: String,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, in x.
    pub block: u32,
    /// Bytes of dynamic shared memory. Above 48 KiB the function needs the attribute
    /// `MAX_DYNAMIC_SHARED_SIZE_BYTES`.
    pub shared: u32,
    /// Arguments in order.
    pub args: Vec<Arg>,
}

/// Launches of an op, to run in order on one stream.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    /// The launches; empty if there is nothing to do.
    pub launches: Vec<Launch>,
    /// Bytes of [`Slot::Workspace`]; 0 if none is used. Never needs to be cleared.
    pub workspace: usize,
}

/// A cache tensor `[num_blocks, block_size, kv_heads, dim]` whose blocks are contiguous
/// inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheView {
    /// Element type.
    pub element: Element,
    /// First element of the view in its storage.
    pub start: usize,
    /// Elements from one block to the next.
    pub block_stride: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// Tokens per block, a power of two.
    pub block_size: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl CacheView {
    /// Whether every head row starts at a multiple of 16 bytes (storages do).
    fn aligned(&self) -> bool {
        let unit = 16 / self.element.size();
        self.start.is_multiple_of(unit) && self.block_stride.is_multiple_of(unit)
    }

    fn block_shift(&self) -> u32 {
        self.block_size.trailing_zeros()
    }

    fn arg(&self, slot: Slot) -> Arg {
        Arg::Buffer(slot, self.start * self.element.size())
    }
}

/// A tensor `[rows, heads, dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsView {
    /// Element type.
    pub element: Element,
    /// First element of the view in its storage.
    pub start: usize,
    /// Elements from one row, head and element to the next.
    pub strides: [usize; 3],
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl RowsView {
    fn aligned(&self) -> bool {
        let unit = 16 / self.element.size();
        [self.start, self.strides[0], self.strides[1]]
            .iter()
            .all(|n| n.is_multiple_of(unit))
    }

    fn arg(&self, slot: Slot) -> Arg {
        Arg::Buffer(slot, self.start * self.element.size())
    }
}

/// Capacity of a batch. A batch may be smaller; then the arrays in the device buffers are
/// padded up to the capacity: `indptr` and `query_offsets` by repeating their last value,
/// `seq_lens` and `first_page` by 0, `slots` by −1. Rows past the last sequence's are not
/// written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Sequences.
    pub seqs: usize,
    /// Query rows of all sequences.
    pub rows: usize,
    /// Listed pages of all sequences.
    pub pages: usize,
    /// Smallest number of rows of a sequence that has any; 1 if unknown. If no sequence can be
    /// streamed, the launches for streaming are left out.
    pub min_rows: usize,
    /// Largest number of rows of a sequence. 1: a decode step.
    pub max_rows: usize,
    /// Largest context length; if it cannot be split, `reduce` is left out.
    pub max_len: usize,
}

/// What one layer's attention computes, and where its optional inputs are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scores {
    /// Factor of `q·k`.
    pub scale: f32,
    /// Soft cap, if any.
    pub softcap: Option<f32>,
    /// Keys a query sees, itself included, if limited.
    pub window: Option<usize>,
    /// Whether [`Slot::Slopes`] is given.
    pub slopes: bool,
    /// Whether [`Slot::Sinks`] is given.
    pub sinks: bool,
}

/// `write_kv` for one cache tensor: `rows` new rows, whose slots are in [`Slot::Slots`].
/// Slots are distinct (the caller keeps the last of equal ones and turns the others into −1);
/// a slot that is negative or outside the cache writes nothing.
pub fn write_kv(cache: &CacheView, new: &RowsView, rows: usize) -> Plan {
    if rows == 0 {
        return Plan::default();
    }
    let chunks = (cache.kv_heads * cache.dim / 8) as u32;
    let launch = Launch {
        kernel: format!("write_kv_{}_{}", new.element.name(), cache.element.name()),
        grid: [rows as u32, 1, 1],
        block: chunks.next_multiple_of(32).min(256),
        shared: 0,
        args: vec![
            cache.arg(Slot::Cache),
            new.arg(Slot::Rows),
            Arg::Buffer(Slot::Slots, 0),
            Arg::I64(new.strides[0] as i64),
            Arg::I64(new.strides[1] as i64),
            Arg::I64(new.strides[2] as i64),
            Arg::I64(cache.block_stride as i64),
            Arg::I64((cache.num_blocks * cache.block_size) as i64),
            Arg::U32(cache.kv_heads as u32),
            Arg::U32(cache.dim as u32),
            Arg::U32(cache.block_shift()),
        ],
    };
    Plan {
        launches: vec![launch],
        workspace: 0,
    }
}

/// The launches of `copy_blocks` and the pairs they read.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CopyPlan {
    /// Content of [`Slot::Pairs`]: `from, to, from, to, ...`.
    pub pairs: Vec<u32>,
    /// What to launch.
    pub plan: Plan,
}

/// `copy_blocks` in one cache tensor, all reads before all writes: blocks that are read by one
/// pair and written by another go through the workspace.
pub fn copy_blocks(cache: &CacheView, pairs: &[(u32, u32)]) -> CopyPlan {
    let targets: std::collections::HashSet<u32> = pairs.iter().map(|&(_, to)| to).collect();
    let moving = pairs.iter().copied().filter(|(from, to)| from != to);
    let (staged, direct): (Vec<_>, Vec<_>) = moving.partition(|(from, _)| targets.contains(from));
    let block_len = cache.block_size * cache.kv_heads * cache.dim;
    let in_cache = (cache.arg(Slot::Cache), cache.block_stride);
    let in_workspace = (Arg::Buffer(Slot::Workspace, 0), block_len);
    let numbered = || staged.iter().zip(0u32..);
    let into: Vec<_> = numbered().map(|(&(from, _), i)| (from, i)).collect();
    let out_of: Vec<_> = numbered().map(|(&(_, to), i)| (i, to)).collect();

    let mut copy = CopyPlan::default();
    copy.plan.workspace = staged.len() * block_len * cache.element.size();
    for (list, (source, source_stride), (target, target_stride)) in [
        (&into, in_cache, in_workspace),
        (&direct, in_cache, in_cache),
        (&out_of, in_workspace, in_cache),
    ] {
        if list.is_empty() {
            continue;
        }
        let first = copy.pairs.len() * size_of::<u32>();
        copy.pairs
            .extend(list.iter().flat_map(|&(from, to)| [from, to]));
        copy.plan.launches.push(Launch {
            kernel: format!("copy_blocks_b{}", 8 * cache.element.size()),
            grid: [
                list.len() as u32,
                block_len.div_ceil(8 * 4 * THREADS as usize) as u32,
                1,
            ],
            block: THREADS,
            shared: 0,
            args: vec![
                target,
                source,
                Arg::Buffer(Slot::Pairs, first),
                Arg::I64(target_stride as i64),
                Arg::I64(source_stride as i64),
                Arg::I64(block_len as i64),
            ],
        });
    }
    copy
}

/// `merge_states` of `pairs` (rows times heads) contiguous F32 states of `v_dim` elements.
/// [`Slot::Out`] receives `pairs * v_dim` outputs, then `pairs` log-sum-exps.
pub fn merge_states(pairs: usize, v_dim: usize) -> Plan {
    if pairs == 0 {
        return Plan::default();
    }
    let launch = Launch {
        kernel: "merge_states".into(),
        grid: [pairs as u32, 1, 1],
        block: THREADS,
        shared: 0,
        args: vec![
            Arg::Buffer(Slot::Out, 0),
            Arg::Buffer(Slot::Out, pairs * v_dim * size_of::<f32>()),
            Arg::Buffer(Slot::AOut, 0),
            Arg::Buffer(Slot::ALse, 0),
            Arg::Buffer(Slot::BOut, 0),
            Arg::Buffer(Slot::BLse, 0),
            Arg::U32(v_dim as u32),
        ],
    };
    Plan {
        launches: vec![launch],
        workspace: 0,
    }
}

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
        shared: (16 + 2 * 2 * keys) * class * 2,
    }
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
        shared: (pairs + 2 * 2 * keys) * class * 2,
    }
}

/// Tile of `attend_simt_*`.
fn attend_simt(cache: Element, class: usize) -> Shape {
    let few_registers = cache == Element::F32 && class <= 128;
    Shape {
        pairs: if few_registers { 8 } else { 4 },
        threads: THREADS,
        shared: 0,
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
    let stream_rows = (STREAM_PAIRS / group).max(1);
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
    let window = scores
        .window
        .map_or(0, |w| u32::try_from(w).unwrap_or(u32::MAX));
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
    if batch.max_rows > 1 && batch.max_rows * group > STREAM_PAIRS {
        let (kernel, shape) = if mma {
            (
                format!("prefill_mma_{element}_d{class}"),
                prefill_mma(class),
            )
        } else {
            (
                format!("attend_simt_{element}_d{class}"),
                attend_simt(k.element, class),
            )
        };
        let tiles = batch.rows * group / shape.pairs + batch.seqs;
        launches.push(attend(kernel, tiles, shape, 0));
    }
    if streamed {
        let (kernel, shape) = if mma {
            (format!("decode_mma_{element}_d{class}"), decode_mma(class))
        } else {
            (
                format!("attend_simt_{element}_d{class}"),
                attend_simt(k.element, class),
            )
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

/// Every entry point that the functions above can name, for checks of the compiled kernels.
pub fn kernels() -> Vec<String> {
    const ALL: [Element; 3] = [Element::F32, Element::F16, Element::BF16];
    let mut names = vec!["merge_states".into(), "reduce".into()];
    names.extend([16, 32].map(|bits| format!("copy_blocks_b{bits}")));
    for cache in ALL {
        let name = cache.name();
        names.extend(ALL.map(|new| format!("write_kv_{}_{name}", new.name())));
        names.extend([64, 128, 256, 512].map(|d| format!("attend_simt_{name}_d{d}")));
        if cache != Element::F32 {
            names.extend([64, 128, 256].map(|d| format!("prefill_mma_{name}_d{d}")));
            names.extend([64, 128, 256].map(|d| format!("decode_mma_{name}_d{d}")));
        }
    }
    names
}

#[cfg(test)]
mod tests;
