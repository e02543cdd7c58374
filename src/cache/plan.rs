//! A reserved step: what a model's forward pass needs to know of the cache.

use std::sync::{Arc, Weak};

use candle_core::Tensor;

use super::cache::Inner;
use super::epoch::{Epoch, InUse};
use super::pool::LayerKv;
use super::sequence::SequenceId;
use crate::error::{Error, Result};
use crate::ops::{Cascade, PageTable};

/// Which rows of a feed the caller wants logits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Logits {
    /// The last row: the next token.
    #[default]
    Last,
    /// Every row: prompt log-probabilities, verification of drafts.
    All,
    /// None: a chunk of a prompt that goes on.
    None,
}

impl Logits {
    /// Wanted rows of a feed whose rows are `first..first + rows`.
    pub(super) fn rows(self, first: u32, rows: u32) -> std::ops::Range<u32> {
        let end = first + rows;
        match self {
            Self::Last => end - 1..end,
            Self::All => first..end,
            Self::None => end..end,
        }
    }
}

/// New tokens of one sequence in one step.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Feed<'a> {
    /// The sequence they extend.
    pub sequence: SequenceId,
    /// Token ids, at least one.
    pub tokens: &'a [u32],
    /// Rows whose logits are wanted.
    pub logits: Logits,
    /// Rope positions, one per token; `None` counts on from the length of the sequence.
    pub positions: Option<&'a [u32]>,
}

impl<'a> Feed<'a> {
    /// Whether the positions are those that a sequence of `start` tokens goes on with.
    pub(super) fn in_order(&self, start: usize) -> bool {
        let given = self.positions.unwrap_or(&[]);
        given
            .iter()
            .zip(start..)
            .all(|(&given, next)| given as usize == next)
    }

    /// Feeds `tokens` to `sequence`, with logits for the last of them.
    pub fn new(sequence: SequenceId, tokens: &'a [u32]) -> Self {
        Self {
            sequence,
            tokens,
            logits: Logits::Last,
            positions: None,
        }
    }

    /// Chooses the rows whose logits are wanted.
    #[must_use]
    pub fn with_logits(mut self, logits: Logits) -> Self {
        self.logits = logits;
        self
    }

    /// Gives explicit rope positions. Slots and masks still follow the order of the tokens.
    ///
    /// Positions are not part of what a prompt is found by: unless they are the default ones,
    /// the sequence stays out of the prefix index from this step on.
    #[must_use]
    pub fn with_positions(mut self, positions: &'a [u32]) -> Self {
        self.positions = Some(positions);
        self
    }
}

/// The arrays of a step. The cache takes them back when the plan ends, so that a step in
/// steady state allocates nothing that grows with the context.
#[derive(Debug, Default)]
pub(super) struct StepBuffers {
    pub tables: Vec<PageTable>,
    pub cascades: Vec<Cascade>,
    pub copies: Vec<Vec<(u32, u32)>>,
    pub token_ids: Vec<u32>,
    pub positions: Vec<u32>,
    pub logit_rows: Vec<u32>,
    /// Scratch of one sequence.
    pub pages: Vec<u32>,
    pub slots: Vec<i64>,
}

impl StepBuffers {
    /// Buffers for groups of `blocks` blocks, with room for each block once.
    pub(super) fn new(blocks: impl Iterator<Item = usize>, block_size: usize) -> Result<Self> {
        let mut buffers = Self::default();
        for blocks in blocks {
            let mut table = PageTable::new(block_size)?;
            table.reserve(0, blocks, 0);
            buffers.tables.push(table);
            buffers.cascades.push(Cascade::default());
            buffers.copies.push(Vec::new());
        }
        Ok(buffers)
    }

    pub(super) fn clear(&mut self) {
        self.tables.iter_mut().for_each(PageTable::clear);
        self.copies.iter_mut().for_each(Vec::clear);
        self.token_ids.clear();
        self.positions.clear();
        self.logit_rows.clear();
    }
}

/// A step that has been reserved by [`PagedKvCache::plan`](super::PagedKvCache::plan).
///
/// Rows are the fed tokens, feed after feed. Pass the plan to every layer's
/// [`PagedAttention::forward`](crate::PagedAttention::forward), then [`commit`](Self::commit)
/// it. Dropping it instead puts every sequence back as it was. The plan is `Send`, keeps the
/// layer tensors alive and holds the cache only weakly.
#[derive(Debug)]
pub struct StepPlan {
    pub(super) cache: Weak<Inner>,
    pub(super) layers: Arc<Layers>,
    pub(super) epoch: u64,
    /// Number of the step, unique in the cache.
    pub(super) step: u64,
    pub(super) buffers: StepBuffers,
    pub(super) tokens: Tensor,
    /// Rows of each feed, if all have the same number.
    pub(super) rows_per_feed: Option<usize>,
}

/// The layer tensors of a cache and what a plan checks without taking the lock.
#[derive(Debug)]
pub(super) struct Layers {
    pub kv: Vec<LayerKv>,
    /// Group of each layer.
    pub group: Vec<usize>,
    pub window: Vec<Option<usize>>,
    pub epoch: Epoch,
}

/// A layer of a [`StepPlan`]: the arguments of the ops.
#[derive(Debug)]
#[non_exhaustive]
pub struct LayerStep<'a> {
    /// The K/V memory of the layer.
    pub kv: &'a LayerKv,
    /// Pages, queries and slots of the step.
    pub table: &'a PageTable,
    /// What sequences of the step share, if the cache looks for it and something was found:
    /// then [`cascade_attention`](crate::ops::cascade_attention) is the op to call.
    pub cascade: Option<&'a Cascade>,
    /// Keys a query sees, itself included; `None` sees the whole context.
    pub window: Option<usize>,
    _in_use: InUse<'a>,
}

impl StepPlan {
    /// Token ids of all rows, u32 `[rows]`, on the device of the cache.
    pub fn tokens(&self) -> &Tensor {
        &self.tokens
    }

    /// The same token ids on the host.
    pub fn token_ids(&self) -> &[u32] {
        &self.buffers.token_ids
    }

    /// Rope position of each row.
    pub fn positions(&self) -> &[u32] {
        &self.buffers.positions
    }

    /// Rows whose logits the feeds want, ascending.
    pub fn logit_rows(&self) -> &[u32] {
        &self.buffers.logit_rows
    }

    /// Rows of the step, all feeds together.
    pub fn num_rows(&self) -> usize {
        self.buffers.token_ids.len()
    }

    /// Sequences that are fed.
    pub fn num_feeds(&self) -> usize {
        self.buffers.tables.first().map_or(0, PageTable::num_seqs)
    }

    /// Rows of each feed if all have the same number, which is what candle's
    /// `[batch, heads, seq, dim]` shapes need.
    pub fn rows_per_feed(&self) -> Option<usize> {
        self.rows_per_feed
    }

    /// Tokens whose K/V are not read again, in each layer of their group, because a
    /// [cascade](super::CacheConfig::with_cascade) reads them once for several sequences; all
    /// groups together.
    pub fn tokens_saved(&self) -> usize {
        self.buffers
            .cascades
            .iter()
            .map(Cascade::tokens_saved)
            .sum()
    }

    /// What an op needs to work on `layer`. While the answer lives a
    /// [`clear`](super::PagedKvCache::clear) waits, so what is written through it belongs to
    /// this plan's epoch.
    ///
    /// # Errors
    /// [`Error::StalePlan`] if the cache was cleared after the plan was made, or is about to be,
    /// [`Error::InvalidArgument`] if there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<LayerStep<'_>> {
        const OP: &str = "step_plan";
        let in_use = self.fresh(OP)?;
        let group = self.layers.group.get(layer).copied();
        let of_group =
            group.and_then(|g| Some((self.buffers.tables.get(g)?, self.buffers.cascades.get(g)?)));
        match (self.layers.kv.get(layer), of_group) {
            (Some(kv), Some((table, cascade))) => Ok(LayerStep {
                kv,
                table,
                cascade: Some(cascade).filter(|cascade| cascade.tokens_saved() > 0),
                window: self.layers.window.get(layer).copied().flatten(),
                _in_use: in_use,
            }),
            _ => Err(Error::InvalidArgument {
                op: OP,
                what: "layer".into(),
                expected: format!("a layer below {}", self.layers.kv.len()),
                got: layer.to_string(),
            }),
        }
    }

    /// Keeps a clear waiting, if none has begun since the plan was made.
    fn fresh(&self, op: &'static str) -> Result<InUse<'_>> {
        let stale = |cache| Error::StalePlan {
            op,
            plan: self.epoch,
            cache,
        };
        self.layers.epoch.enter(self.epoch).map_err(stale)
    }

    /// Makes all rows part of their sequences. Blocks that are full now can be found by later
    /// prompts; blocks behind a window are released.
    ///
    /// The cache takes the caller's word that every layer has written its K/V: a commit without
    /// a forward would let later prompts find rows that were never computed.
    ///
    /// # Errors
    /// [`Error::StalePlan`] if the cache was cleared, [`Error::StaleHandle`] if it is gone.
    pub fn commit(self) -> Result<()> {
        self.finish(None)
    }

    /// Makes only the first `accepted[feed]` rows of each feed part of its sequence and gives
    /// the others back: the end of a step that verified draft tokens.
    ///
    /// # Errors
    /// As [`commit`](Self::commit); [`Error::InvalidArgument`] unless there is one number per
    /// feed, none above the rows of the feed. The plan is rolled back then.
    pub fn commit_accepted(self, accepted: &[usize]) -> Result<()> {
        self.finish(Some(accepted))
    }

    fn finish(self, accepted: Option<&[usize]>) -> Result<()> {
        const OP: &str = "commit";
        drop(self.fresh(OP)?);
        let gone = || Error::StaleHandle {
            op: OP,
            kind: "cache",
            id: format!("epoch {}", self.epoch),
        };
        let cache = self.cache.upgrade().ok_or_else(gone)?;
        if let Some(accepted) = accepted {
            let offsets = self
                .buffers
                .tables
                .first()
                .map_or(&[][..], PageTable::query_offsets);
            let rows = offsets.windows(2).map(|w| (w[1] - w[0]) as usize);
            if accepted.len() != rows.len()
                || accepted.iter().zip(rows.clone()).any(|(&a, r)| a > r)
            {
                return Err(Error::InvalidArgument {
                    op: OP,
                    what: "accepted".into(),
                    expected: format!(
                        "one number for each feed, at most {:?}",
                        rows.collect::<Vec<_>>()
                    ),
                    got: format!("{accepted:?}"),
                });
            }
        }
        cache.commit(&self, accepted)
    }
}

impl Drop for StepPlan {
    fn drop(&mut self) {
        if let Some(cache) = self.cache.upgrade() {
            cache.end(self.step, std::mem::take(&mut self.buffers));
        }
    }
}
