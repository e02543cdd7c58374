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
//! numbered `row * group + head % group`, so that one read of K/V serves all heads of a group
//! (up to 32; more heads take more blocks side by side).
//! - A sequence with 1 row, or with at most [`STREAM_PAIRS`] pairs per KV head, is *streamed*:
//!   its visible keys are cut into chunks ([`chunk_keys`]), one block each, and `reduce` merges
//!   the chunks. Chunks of sequence `s` have the slots from `indptr[s] * block_size / 256 + s`
//!   on: a bound that needs no scan, so the workspace is proportional to the listed pages.
//!   Without causality ([`Mask::Full`]: a prefix under the rows of many sequences) up to
//!   [`STREAM_PAIRS_FULL`] pairs are streamed, in blocks of 32 side by side: one tile of them
//!   would pass over the whole prefix in one block per KV head, and leave the GPU idle.
//! - Any other sequence is cut into tiles of pairs, one block each, which pass over all keys.
//!
//! Both choices depend on the sequence alone, so its result does not depend on its batch mates.

mod attention;
mod moves;
#[cfg(test)]
mod tests;

use super::Mask;
pub use attention::attention;

pub use moves::{CopyPlan, copy_blocks, merge_states, write_kv};

/// Streamed sequences have one row, or at most this many pairs per KV head.
pub const STREAM_PAIRS: usize = 16;

/// The same under [`Mask::Full`].
pub const STREAM_PAIRS_FULL: usize = 128;

/// Keys of the smallest context chunk.
pub const CHUNK: usize = 256;

/// Threads of a block of the kernels that take any number.
const THREADS: u32 = 128;

/// Keys per chunk of a streamed sequence in which `keys` keys are visible.
pub fn chunk_keys(keys: usize) -> usize {
    if keys <= 8192 { CHUNK } else { 2 * CHUNK }
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
    /// Which keys a query sees.
    pub mask: Mask,
    /// Whether [`Slot::Slopes`] is given.
    pub slopes: bool,
    /// Whether [`Slot::Sinks`] is given.
    pub sinks: bool,
}

/// Every entry point that a plan can name, for checks of the compiled kernels.
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
            names.extend([64, 128, 256].map(|d| format!("decode_mma_wide_{name}_d{d}")));
        }
    }
    names
}
