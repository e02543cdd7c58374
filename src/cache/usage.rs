//! What a cache tells about itself.

use super::cache::{CacheEvent, PagedKvCache};
use super::pool::{LayerKv, block_bytes};
use super::sequence::Query;
use crate::block::Stats;
use crate::error::{Error, Result};

/// How full one group is.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct GroupUsage {
    /// Blocks of the pool.
    pub blocks_total: usize,
    /// Blocks that sequences, pins or a live plan hold, shared ones counted once.
    pub blocks_used: usize,
    /// Unused blocks that can still be found by their prefix.
    pub blocks_cached: usize,
    /// Unused blocks without content.
    pub blocks_free: usize,
    /// Bytes of one block, K and V of all layers of the group.
    pub bytes_per_block: u64,
    /// Tokens stored in the used blocks, shared ones counted once.
    pub tokens: usize,
    /// `tokens` over the rows of the used blocks, 0 to 1; 1 if none is used.
    pub utilization: f64,
    /// Blocks of the host pool, 0 without one.
    pub host_blocks_total: usize,
    /// Blocks of the host pool that swapped sequences hold, shared ones counted once.
    pub host_blocks_used: usize,
}

/// Monotone counters of a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Prompts whose first step was committed: one that is added, does not fit, is removed
    /// and added again counts once. Recomputed ones do not count here.
    pub prompts: u64,
    /// Tokens of those prompts.
    pub prompt_tokens: u64,
    /// Tokens of those prompts that were found in the prefix index.
    pub cached_tokens: u64,
    /// Prompts added [as recomputed](super::AddOptions::recomputed), counted as `prompts` are.
    pub recomputed: u64,
    /// Tokens of those prompts.
    pub recomputed_tokens: u64,
    /// Tokens of those prompts that were found in the prefix index.
    pub recomputed_cached_tokens: u64,
    /// Steps committed.
    pub steps: u64,
    /// Tokens committed.
    pub committed_tokens: u64,
    /// Steps dropped without commit.
    pub rollbacks: u64,
    /// Blocks copied on write.
    pub copies: u64,
    /// Prompts added of which rows inside a block were reused, by copying the block.
    pub partial_hits: u64,
    /// Blocks given back because equal ones were findable.
    pub deduplicated: u64,
    /// Tokens whose K/V a [cascade](super::CacheConfig::with_cascade) did not read again, in
    /// each layer of their group; all groups together.
    pub cascade_tokens: u64,
    /// Sequences swapped out.
    pub swapped_out: u64,
    /// Sequences swapped in.
    pub swapped_in: u64,
    /// Blocks copied to host memory, in all groups.
    pub blocks_to_host: u64,
    /// Blocks copied back from host memory, in all groups.
    pub blocks_from_host: u64,
}

impl Counters {
    /// Counts a prompt whose first step is committed.
    pub(super) fn count(&mut self, query: Query) {
        let (prompts, tokens, cached) = if query.recompute {
            (
                &mut self.recomputed,
                &mut self.recomputed_tokens,
                &mut self.recomputed_cached_tokens,
            )
        } else {
            (
                &mut self.prompts,
                &mut self.prompt_tokens,
                &mut self.cached_tokens,
            )
        };
        *prompts += 1;
        *tokens += query.tokens as u64;
        *cached += query.cached as u64;
    }
}

impl PagedKvCache {
    /// How full each group is. Costs a walk over the block tables.
    pub fn usage(&self) -> Vec<GroupUsage> {
        let state = self.inner.state();
        let usage = state.groups.iter().enumerate().map(|(g, group)| {
            let counts = group.allocator.counts();
            let tokens = state.tokens_stored(g);
            let rows = counts.referenced * state.block_size;
            let host = state.host.as_ref().map_or((0, 0), |host| host.usage(g));
            GroupUsage {
                blocks_total: group.allocator.num_blocks(),
                blocks_used: counts.referenced,
                blocks_cached: counts.idle,
                blocks_free: counts.free,
                bytes_per_block: block_bytes(&group.spec, state.block_size).unwrap_or(u64::MAX),
                tokens,
                utilization: if rows == 0 {
                    1.0
                } else {
                    tokens as f64 / rows as f64
                },
                host_blocks_total: host.0,
                host_blocks_used: host.1,
            }
        });
        usage.collect()
    }

    /// Blocks that a plan could take now, per group: free, or cached and unused.
    pub fn available_blocks(&self) -> Vec<usize> {
        let state = self.inner.state();
        let groups = state.groups.iter();
        groups.map(|group| group.allocator.available()).collect()
    }

    /// Tokens that each group can hold.
    pub fn capacity_tokens(&self) -> Vec<usize> {
        let state = self.inner.state();
        state
            .groups
            .iter()
            .map(|group| group.allocator.num_blocks() * state.block_size)
            .collect()
    }

    /// Counters since the cache was made.
    pub fn counters(&self) -> Counters {
        self.inner.state().counters
    }

    /// Look-ups, hits and evictions of each group's prefix index since the cache was made.
    pub fn index_stats(&self) -> Vec<Stats> {
        let state = self.inner.state();
        state
            .groups
            .iter()
            .map(|group| group.allocator.stats())
            .collect()
    }

    /// Events recorded since the last call, if
    /// [`CacheConfig::with_events`](super::CacheConfig::with_events) asked for them.
    pub fn take_events(&self) -> Vec<CacheEvent> {
        self.inner.state().take_events()
    }

    /// Checks the accounting identity of every pool, and that every reference count equals
    /// its holders. For tests: costs a walk over everything.
    ///
    /// # Errors
    /// [`Error::Invariant`] names the first rule that does not hold.
    pub fn check_invariants(&self) -> Result<()> {
        self.inner.state().check_invariants()
    }

    /// The K/V memory of a layer, for tests and tools that look at the pool itself.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such layer.
    pub fn layer_kv(&self, layer: usize) -> Result<&LayerKv> {
        self.inner
            .layers
            .kv
            .get(layer)
            .ok_or_else(|| Error::InvalidArgument {
                op: "layer_kv",
                what: "layer".into(),
                expected: format!("a layer below {}", self.inner.layers.kv.len()),
                got: layer.to_string(),
            })
    }
}
