//! Letting a prompt in: on which terms, and at what cost.

use super::sequence::SequenceId;
use crate::block::Namespace;

/// How a sequence is added.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddOptions {
    /// The key under which its blocks are shared: only prompts of an equal namespace hit.
    pub namespace: Namespace,
    /// Look the prompt up. Off, every token is computed (as a caller who wants the logits of
    /// the whole prompt needs); the blocks are still registered for others.
    pub read_prefix: bool,
    /// Register its full blocks, so that later prompts find them.
    pub indexed: bool,
    /// Count the prompt apart, see [`recomputed`](Self::recomputed).
    pub recompute: bool,
}

impl Default for AddOptions {
    fn default() -> Self {
        Self {
            namespace: Namespace::default(),
            read_prefix: true,
            indexed: true,
            recompute: false,
        }
    }
}

impl AddOptions {
    /// Shares blocks only within `namespace`.
    #[must_use]
    pub fn with_namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// Switches the look-up off.
    #[must_use]
    pub fn without_prefix_reads(mut self) -> Self {
        self.read_prefix = false;
        self
    }

    /// Keeps the sequence out of the prefix index: neither looked up nor registered.
    #[must_use]
    pub fn unindexed(mut self) -> Self {
        self.read_prefix = false;
        self.indexed = false;
        self
    }

    /// Says that the sequence was in the cache before and gave way to others: it is counted
    /// apart, so that preemption does not show as hits of the prefix cache.
    #[must_use]
    pub fn recomputed(mut self) -> Self {
        self.recompute = true;
        self
    }
}

/// Answer of [`PagedKvCache::add`](super::PagedKvCache::add).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Added {
    /// The new sequence.
    pub id: SequenceId,
    /// Leading tokens whose K/V were found; feed the prompt from here on.
    pub cached_tokens: usize,
}

/// What a prompt would cost now, see [`PagedKvCache::cost`](super::PagedKvCache::cost).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cost {
    /// Leading tokens that are cached.
    pub cached_tokens: usize,
    /// Blocks that the prompt would take from what is available, per group: cached blocks
    /// that nobody uses now, and new ones for the rest of the prompt fed in one step.
    pub blocks_needed: Vec<usize>,
    /// Blocks available now, per group.
    pub blocks_available: Vec<usize>,
}

impl Cost {
    /// Whether every group has enough blocks.
    pub fn fits(&self) -> bool {
        self.blocks_needed
            .iter()
            .zip(&self.blocks_available)
            .all(|(needed, free)| needed <= free)
    }
}
