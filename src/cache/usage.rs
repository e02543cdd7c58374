//! What a cache tells about itself.

use super::sequence::Query;

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
