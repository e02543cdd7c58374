//! The physical side: how many blocks a budget buys, and the tensors that hold them.

use candle_core::{Device, Tensor};

use super::spec::{CacheSpec, GroupSpec};
use crate::block::check_block_size;
use crate::error::{Error, Result};
use crate::ops::{self, Cascade};

const OP: &str = "paged_kv_cache";

/// Block size unless the configuration says otherwise, in tokens.
pub const DEFAULT_BLOCK_SIZE: usize = 16;

/// How large a cache is.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum CacheSize {
    /// A budget for all groups together, in bytes. Groups share it so that sequences of
    /// [`CacheConfig::expected_tokens`] fill all pools at the same time.
    Bytes(u64),
    /// Blocks in each group.
    Blocks(usize),
    /// Tokens that one full-attention group must hold: `ceil(tokens / block_size)` blocks in
    /// each group. A model's context length is the usual value.
    Tokens(usize),
    /// A fraction, above 0 and at most 1, of the device memory that is free when the cache is
    /// made, divided like [`CacheSize::Bytes`]. Load the weights first and leave room for
    /// activations: 0.9 is usual. Only on CUDA; not yet run on a GPU.
    FreeMemory(f64),
}

/// Size and block size of a [`PagedKvCache`](super::PagedKvCache).
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// How large the cache is.
    pub size: CacheSize,
    /// Tokens per block: a power of two from 1 to 256.
    pub block_size: usize,
    /// Length in tokens of a typical sequence. Only used to divide a byte budget between
    /// groups with different windows.
    pub expected_tokens: usize,
    /// Record [`CacheEvent`](super::CacheEvent)s for `PagedKvCache::take_events`.
    pub record_events: bool,
    /// Host memory for swapped sequences, besides `size`; `None`: swapping is refused.
    pub host: Option<CacheSize>,
    /// Reuse the leading rows of a cached block that a prompt shares only in part.
    pub sub_block_reuse: bool,
    /// Keep one block of equal full ones.
    pub deduplicate: bool,
    /// Read blocks that sequences of a step share once for all of them, where that saves more
    /// than this many tokens for each of their rows; `None`: never.
    pub cascade: Option<usize>,
}

impl CacheConfig {
    fn new(size: CacheSize) -> Self {
        Self {
            size,
            block_size: DEFAULT_BLOCK_SIZE,
            expected_tokens: 2048,
            record_events: false,
            host: None,
            sub_block_reuse: false,
            deduplicate: false,
            cascade: None,
        }
    }

    /// As many blocks as fit into `bytes`.
    pub fn bytes(bytes: u64) -> Self {
        Self::new(CacheSize::Bytes(bytes))
    }

    /// `blocks` blocks in each group.
    pub fn blocks(blocks: usize) -> Self {
        Self::new(CacheSize::Blocks(blocks))
    }

    /// Room for `tokens` tokens in each group; with a model's `context_length()`, one
    /// sequence of full length.
    pub fn tokens(tokens: usize) -> Self {
        Self::new(CacheSize::Tokens(tokens))
    }

    /// A fraction of the free memory of a CUDA device, see [`CacheSize::FreeMemory`].
    pub fn free_memory(fraction: f64) -> Self {
        Self::new(CacheSize::FreeMemory(fraction))
    }

    /// Tokens per block: a power of two from 1 to 256 (checked when the cache is made).
    #[must_use]
    pub fn with_block_size(mut self, block_size: usize) -> Self {
        self.block_size = block_size;
        self
    }

    /// Length of a typical sequence in tokens, see [`CacheConfig::expected_tokens`].
    #[must_use]
    pub fn with_expected_tokens(mut self, tokens: usize) -> Self {
        self.expected_tokens = tokens;
        self
    }

    /// Record events.
    #[must_use]
    pub fn with_events(mut self) -> Self {
        self.record_events = true;
        self
    }

    /// Takes host memory for sequences that are [swapped out], all of it when the cache is
    /// made. A byte budget is divided between groups as that of the cache is.
    ///
    /// [swapped out]: super::PagedKvCache::swap_out
    #[must_use]
    pub fn with_host(mut self, size: CacheSize) -> Self {
        self.host = Some(size);
        self
    }

    /// Reuses parts of blocks: where the prompt of an added sequence leaves the cached full
    /// blocks, the cached block that goes on with the most equal tokens is copied, and its
    /// matching rows count as cached. Such an [`add`] takes a block at once, in each group;
    /// where there is none for the copy only full blocks are reused. Looking for the block
    /// costs O(blocks that follow the last hit).
    ///
    /// [`add`]: super::PagedKvCache::add
    #[must_use]
    pub fn with_sub_block_reuse(mut self) -> Self {
        self.sub_block_reuse = true;
        self
    }

    /// Keeps one of equal full blocks: a sequence that fills a block whose content can be
    /// found already takes the block that is there and gives its own back, at commit.
    ///
    /// The sequence goes on with K/V of the same tokens that another step computed, and that
    /// may differ in the last bits from its own.
    #[must_use]
    pub fn with_deduplication(mut self) -> Self {
        self.deduplicate = true;
        self
    }

    /// Lets attention read the leading blocks that sequences of a step share once for all of
    /// them ([`cascade_attention`](crate::ops::cascade_attention)): for many sequences behind
    /// one long prompt, whose decode steps otherwise read that prompt once each. Used in the
    /// steps, and for the prefixes, where it saves more than it costs: see [`Cascade`]. The
    /// field [`cascade`](Self::cascade) has the threshold.
    ///
    /// Off by default, because the sums then have another order: within tolerance the answers
    /// are the same, but their last bits depend on who shares. Windowed layers share as long
    /// as whole contexts are within the window. On every device; on CUDA not yet run on a GPU.
    #[must_use]
    pub fn with_cascade(mut self) -> Self {
        self.cascade = Some(Cascade::ROW_COST);
        self
    }

    /// Blocks of each group of `spec` on `device`.
    pub(super) fn blocks_per_group(&self, spec: &CacheSpec, device: &Device) -> Result<Vec<usize>> {
        self.blocks_of("size", self.size, spec, device)
    }

    /// Host blocks of each group of `spec`, if there are to be any.
    pub(super) fn host_blocks_per_group(&self, spec: &CacheSpec) -> Result<Option<Vec<usize>>> {
        self.host
            .map(|size| self.blocks_of("host", size, spec, &Device::Cpu))
            .transpose()
    }

    fn blocks_of(
        &self,
        what: &str,
        size: CacheSize,
        spec: &CacheSpec,
        device: &Device,
    ) -> Result<Vec<usize>> {
        check_block_size(OP, self.block_size)?;
        let blocks = match size {
            CacheSize::Blocks(blocks) => vec![blocks; spec.groups.len()],
            CacheSize::Tokens(tokens) => vec![tokens.div_ceil(self.block_size); spec.groups.len()],
            CacheSize::Bytes(budget) => self.divide(spec, budget)?,
            CacheSize::FreeMemory(fraction) => {
                self.divide(spec, part_of_free_memory(fraction, device)?)?
            }
        };
        let given = || format!("{size:?} with blocks of {} tokens", self.block_size);
        if blocks.contains(&0) {
            return Err(Error::InvalidArgument {
                op: OP,
                what: what.into(),
                expected: "at least one block in each group".into(),
                got: given(),
            });
        }
        // Slots are i64, and block ids u32 with one value kept as "none".
        let fits = |&n: &usize| n < u32::MAX as usize && n.checked_mul(self.block_size).is_some();
        if !blocks.iter().all(fits) {
            return Err(Error::InvalidArgument {
                op: OP,
                what: what.into(),
                expected: "less than 2^32 - 1 blocks in each group".into(),
                got: given(),
            });
        }
        Ok(blocks)
    }

    /// Divides a byte budget: `share` sequences of the expected length need
    /// `share * blocks` blocks of each group, and together exactly the budget.
    fn divide(&self, spec: &CacheSpec, budget: u64) -> Result<Vec<usize>> {
        let expected = self.expected_tokens.max(1);
        let mut per_sequence: u64 = 0;
        let mut wanted = Vec::with_capacity(spec.groups.len());
        for group in &spec.groups {
            let blocks = group.blocks_held(expected, self.block_size) as u64;
            let bytes = block_bytes(group, self.block_size)?;
            wanted.push(blocks);
            per_sequence = blocks
                .checked_mul(bytes)
                .and_then(|b| per_sequence.checked_add(b))
                .ok_or_else(too_large)?;
        }
        let blocks = wanted.iter().map(|&blocks| {
            let n = u128::from(blocks) * u128::from(budget) / u128::from(per_sequence.max(1));
            usize::try_from(n).map_err(|_| too_large())
        });
        blocks.collect()
    }
}

impl GroupSpec {
    /// Blocks that a sequence of `len` tokens holds between two steps: all of them, or those
    /// that the window of the next token still sees.
    pub fn blocks_held(&self, len: usize, block_size: usize) -> usize {
        let block_size = block_size.max(1);
        len.div_ceil(block_size) - self.first_visible(len) / block_size
    }

    /// Blocks without which a sequence cannot come to `len` tokens, even one by one: those that
    /// one of them sees, itself included.
    pub(crate) fn blocks_on_the_way(&self, len: usize, block_size: usize) -> usize {
        let block_size = block_size.max(1);
        // What a window holds repeats block by block.
        (len.saturating_sub(block_size)..len)
            .map(|at| (at + 1).div_ceil(block_size) - self.first_visible(at) / block_size)
            .max()
            .unwrap_or(0)
    }

    /// First position that a query at `position` sees.
    pub(super) fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |window| {
            position.saturating_add(1).saturating_sub(window)
        })
    }
}

fn part_of_free_memory(fraction: f64, device: &Device) -> Result<u64> {
    if !(fraction > 0.0 && fraction <= 1.0) {
        return Err(Error::InvalidArgument {
            op: OP,
            what: "size".into(),
            expected: "a fraction of the free memory above 0 and at most 1".into(),
            got: fraction.to_string(),
        });
    }
    let free = ops::free_memory(OP, device)?;
    Ok((free as f64 * fraction) as u64)
}

/// Bytes of one block of a group, K and V of all its layers.
pub(super) fn block_bytes(group: &GroupSpec, block_size: usize) -> Result<u64> {
    group
        .bytes_per_token()
        .and_then(|b| b.checked_mul(block_size as u64))
        .ok_or_else(too_large)
}

fn too_large() -> Error {
    Error::InvalidArgument {
        op: OP,
        what: "size".into(),
        expected: "a cache whose size in bytes fits into 64 bits".into(),
        got: "a larger one".into(),
    }
}

/// Refuses what no allocator could give, before candle's would abort the process.
pub(super) fn check_memory(spec: &CacheSpec, blocks: &[usize], block_size: usize) -> Result<()> {
    let mut total: u64 = 0;
    for (group, &blocks) in spec.groups.iter().zip(blocks) {
        total = block_bytes(group, block_size)?
            .checked_mul(blocks as u64)
            .and_then(|bytes| bytes.checked_add(total))
            .ok_or_else(too_large)?;
    }
    let refused = || Error::InvalidArgument {
        op: OP,
        what: "size".into(),
        expected: "a cache that fits into memory".into(),
        got: format!("{total} bytes"),
    };
    let bytes = usize::try_from(total).map_err(|_| refused())?;
    // Asks the system for address space only: nothing is touched, and it is given back at once.
    Vec::<u8>::new()
        .try_reserve_exact(bytes)
        .map_err(|_| refused())
}

/// The K/V memory of one layer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LayerKv {
    /// Rows as they are, in f32, f16 or bf16.
    Dense {
        /// Keys, `[num_blocks, block_size, kv_heads, k_dim]`.
        k: Tensor,
        /// Values, `[num_blocks, block_size, kv_heads, v_dim]`.
        v: Tensor,
    },
}

impl LayerKv {
    /// Zeroed memory for one layer of `group`.
    pub(super) fn new(
        group: &GroupSpec,
        blocks: usize,
        block_size: usize,
        device: &Device,
    ) -> Result<Self> {
        let tensor = |dim: usize| {
            let shape = (blocks, block_size, group.kv_heads, dim);
            Ok::<_, Error>(Tensor::zeros(shape, group.format.dtype, device)?)
        };
        Ok(Self::Dense {
            k: tensor(group.k_dim)?,
            v: tensor(group.v_dim)?,
        })
    }
}
