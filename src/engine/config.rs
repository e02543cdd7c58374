//! The limits of an engine, and what follows from them for a request.

use super::request::{OP, refuse};
use crate::cache::{CacheSpec, PagedKvCache};
use crate::error::{Error, Result};

/// What becomes of the K/V of a sequence that gives way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preemption {
    /// They are dropped, and computed again from wherever the prefix index still has them.
    Recompute,
    /// They are moved to host memory. If the cache has none, or it is full, as `Recompute`.
    Swap,
    /// `Swap` where moving the blocks out and in takes less time than computing their tokens
    /// would, by what both have taken so far (tokens in steps that were mostly prompts, which
    /// computing again is like); else `Recompute`.
    ///
    /// Both costs grow with the length of the sequence, so neither is right for every machine
    /// and model: a large model makes tokens dear, and a slow bus makes bytes dear.
    Cheaper,
}

/// How an [`Engine`](super::Engine) batches.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Sequences that run at once, samples and beams counted singly. Default 64.
    pub max_sequences: usize,
    /// Tokens of one step. Decoding sequences take one each, the rest goes to prompts, which
    /// are computed in chunks. It bounds the memory of activations and the time between two
    /// tokens of a running sequence. Default 512; at least `max_sequences`.
    pub max_batch_tokens: usize,
    /// Look prompts up in the prefix index and enter them. Default on.
    pub prefix_cache: bool,
    /// Steps after which a waiting sequence goes before every priority. Default 1024.
    pub max_wait: u64,
    /// What becomes of the K/V of a sequence that gives way. Default
    /// [`Preemption::Cheaper`]. Swapping needs a cache with host memory
    /// ([`CacheConfig::with_host`](crate::cache::CacheConfig::with_host)).
    pub preemption: Preemption,
    /// Seed of the requests that bring none. Default 0.
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_sequences: 64,
            max_batch_tokens: 512,
            prefix_cache: true,
            max_wait: 1024,
            preemption: Preemption::Cheaper,
            seed: 0,
        }
    }
}

impl EngineConfig {
    /// Sets [`EngineConfig::max_sequences`], and raises `max_batch_tokens` to it if needed.
    #[must_use]
    pub fn with_max_sequences(mut self, max_sequences: usize) -> Self {
        self.max_sequences = max_sequences;
        self.max_batch_tokens = self.max_batch_tokens.max(max_sequences);
        self
    }

    /// Sets [`EngineConfig::max_batch_tokens`].
    #[must_use]
    pub fn with_max_batch_tokens(mut self, max_batch_tokens: usize) -> Self {
        self.max_batch_tokens = max_batch_tokens;
        self
    }

    /// Switches the prefix cache off.
    #[must_use]
    pub fn without_prefix_cache(mut self) -> Self {
        self.prefix_cache = false;
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        let refuse = |what: &str, expected: &str, got: usize| {
            Err(Error::InvalidArgument {
                op: "engine",
                what: what.into(),
                expected: expected.into(),
                got: got.to_string(),
            })
        };
        if self.max_sequences == 0 {
            return refuse("max_sequences", "at least 1", 0);
        }
        // Otherwise running sequences would wait for each other in every step.
        if self.max_batch_tokens < self.max_sequences {
            let rule = "at least max_sequences";
            return refuse("max_batch_tokens", rule, self.max_batch_tokens);
        }
        Ok(())
    }
}

/// What a request is checked against: nothing that changes while the engine runs, so that any
/// thread can refuse a request without asking the engine.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    pub vocab: usize,
    pub context: usize,
    pub max_sequences: usize,
    /// Whether the engine has a tokenizer.
    pub text: bool,
    spec: CacheSpec,
    block_size: usize,
    /// Blocks of each group.
    blocks: Vec<usize>,
}

impl Limits {
    pub(super) fn new(vocab: usize, context: usize, cache: &PagedKvCache, slots: usize) -> Self {
        let block_size = cache.block_size();
        let tokens = cache.capacity_tokens();
        Self {
            vocab,
            context,
            max_sequences: slots,
            text: false,
            spec: cache.spec().clone(),
            block_size,
            blocks: tokens.iter().map(|tokens| tokens / block_size).collect(),
        }
    }

    /// Refuses a prompt that has no room for one token after it, and more sequences than run
    /// at once.
    pub(super) fn check_size(&self, prompt: usize, width: usize) -> Result<()> {
        if prompt >= self.context {
            return Err(Error::ContextLength {
                op: OP,
                len: prompt + 1,
                max: self.context,
            });
        }
        if width > self.max_sequences {
            let rule = format!("at most max_sequences, {}", self.max_sequences);
            return Err(refuse("samples or beams", rule, width));
        }
        for (group, &blocks) in self.spec.groups.iter().zip(&self.blocks) {
            let needed = group.blocks_on_the_way(prompt + 1, self.block_size);
            if needed > blocks {
                return Err(Error::OutOfBlocks {
                    op: OP,
                    needed,
                    free: blocks,
                });
            }
        }
        Ok(())
    }
}
