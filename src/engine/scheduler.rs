//! Who runs in the next step, and who gives way.
//!
//! Running sequences come first: those that decode, one token each, then prompts that are
//! half computed, in chunks of what is left of the token budget. What remains of the step goes
//! to waiting sequences (`admission.rs`). When the pool has no block for a running sequence,
//! the one of the last rank gives way (`preemption.rs`): it loses its blocks and waits before
//! its equals.
//!
//! The first in rank never gives way, so every step computes tokens that stay computed, and
//! every sequence is first one day.

use std::collections::{BTreeMap, BTreeSet};

use super::config::EngineConfig;
use super::preemption::Costs;
use super::request::RequestId;
use super::sequence::{Rank, SeqKey, Sequence};
use crate::cache::PagedKvCache;
use crate::error::{Error, Result};

/// Tokens of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    pub key: SeqKey,
    pub rows: usize,
}

/// What the scheduler has decided.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Run these.
    Run(Vec<Chunk>),
    /// This sequence has the pool for itself and no block left: it has to end.
    Full(SeqKey),
    /// Nothing is to be computed.
    Idle,
}

/// A step that is being put together.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub chunks: Vec<Chunk>,
    /// Tokens that may still be added.
    pub budget: usize,
    /// Blocks that can be had now, per group, without those that `chunks` need.
    pub available: Vec<usize>,
    /// Blocks that `chunks` need in each group.
    pub reserved: usize,
}

impl Step {
    pub(super) fn free(&self) -> usize {
        let least = self.available.iter().copied().min().unwrap_or(0);
        least.saturating_sub(self.reserved)
    }
}

/// What has been counted since the engine was made.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    /// Sequences preempted.
    pub preemptions: u64,
    /// Prompt tokens of requests when they first ran, and those found in the cache.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// The same for sequences that came back: tokens, and those that were still cached.
    pub resumed_tokens: u64,
    pub resumed_cached_tokens: u64,
    /// Sequences moved to host memory.
    pub swaps: u64,
    /// Admissions put off because the prefix was being computed.
    pub deferrals: u64,
}

#[derive(Debug)]
pub(super) struct Scheduler {
    pub(super) cache: PagedKvCache,
    pub(super) config: EngineConfig,
    pub(super) block_size: usize,
    pub(super) sequences: BTreeMap<SeqKey, Sequence>,
    pub(super) waiting: BTreeSet<Rank>,
    /// Sequences that hold blocks, in order of rank.
    pub(super) running: Vec<SeqKey>,
    pub(super) step: u64,
    /// How often the cache had been cleared when last looked at.
    epoch: u64,
    pub(super) counts: Counts,
    /// Requests that ran for the first time, with their cached tokens, since the last look.
    pub(super) started: Vec<(RequestId, usize)>,
    pub(super) costs: Costs,
    /// Whether the cache has host memory.
    pub(super) has_host: bool,
    /// Requests of which a sequence was preempted, since the last look.
    pub(super) gave_way: Vec<RequestId>,
}

impl Scheduler {
    pub(super) fn new(cache: PagedKvCache, config: EngineConfig) -> Self {
        Self {
            block_size: cache.block_size(),
            has_host: cache
                .usage()
                .iter()
                .any(|usage| usage.host_blocks_total > 0),
            epoch: cache.epoch(),
            cache,
            config,
            sequences: BTreeMap::new(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            step: 0,
            counts: Counts::default(),
            started: Vec::new(),
            gave_way: Vec::new(),
            costs: Costs::default(),
        }
    }

    /// Queues a sequence.
    pub(super) fn add(&mut self, mut sequence: Sequence) {
        sequence.since = self.step;
        self.waiting.insert(sequence.rank());
        self.sequences.insert(sequence.key, sequence);
    }

    pub(super) fn get(&self, key: SeqKey) -> Result<&Sequence> {
        self.sequences.get(&key).ok_or_else(|| unknown(key))
    }

    pub(super) fn get_mut(&mut self, key: SeqKey) -> Result<&mut Sequence> {
        self.sequences.get_mut(&key).ok_or_else(|| unknown(key))
    }

    /// Branches of a request that have not ended.
    pub(super) fn branches(&self, request: RequestId) -> Vec<SeqKey> {
        let [first, last] = [0, u32::MAX].map(|branch| SeqKey { request, branch });
        self.sequences
            .range(first..=last)
            .map(|(&key, _)| key)
            .collect()
    }

    /// Chooses the next step. `admit` lets waiting sequences in.
    pub(super) fn schedule(&mut self, mut admit: bool) -> Result<Decision> {
        self.step += 1;
        self.find_cleared();
        self.find_overdue();
        loop {
            let mut step = Step {
                budget: self.config.max_batch_tokens,
                available: self.cache.available_blocks(),
                ..Step::default()
            };
            let mut stalled = self.feed_running(&mut step)?;
            if admit && stalled.is_none() {
                stalled = self.admit(&mut step)?;
            }
            if !step.chunks.is_empty() {
                return Ok(Decision::Run(step.chunks));
            }
            if !std::mem::replace(&mut admit, true) {
                continue;
            }
            // Nothing fits, so that nothing would ever change: somebody who holds blocks
            // without a use for them now (a beam that waits for another) gives way.
            let Some(stuck) = stalled.or_else(|| self.waiting.first().map(|rank| rank.key)) else {
                return Ok(Decision::Idle);
            };
            match self.running.iter().rev().copied().find(|&key| key != stuck) {
                Some(victim) => self.preempt(victim)?,
                None => return Ok(Decision::Full(stuck)),
            }
        }
    }

    /// The planned step does not fit, because shared blocks have to be copied: the last one
    /// gives way. Answers the sequence that has to end if there is only one.
    pub(super) fn give_way(&mut self) -> Result<Option<SeqKey>> {
        match self.running[..] {
            [] => Ok(None),
            [only] => Ok(Some(only)),
            [.., last] => self.preempt(last).map(|()| None),
        }
    }

    /// Adds running sequences to the step. Answers the first that found no block although
    /// nobody of a lower rank is left to give way; admissions wait for it.
    fn feed_running(&mut self, step: &mut Step) -> Result<Option<SeqKey>> {
        let pending = |key: &&SeqKey| self.sequences.get(key).map_or(0, Sequence::pending);
        let decodes = self.running.iter().filter(|key| pending(key) == 1);
        let prompts = self.running.iter().filter(|key| pending(key) > 1);
        let order: Vec<SeqKey> = decodes.chain(prompts).copied().collect();
        let mut stalled: Option<SeqKey> = None;
        for key in order {
            if step.budget == 0 {
                break;
            }
            // It may have given way in this very step.
            if self.get(key)?.held.is_some() && !self.feed(step, key)? {
                let rank = self.get(key)?.running_rank();
                let earlier = match stalled {
                    Some(other) => rank < self.get(other)?.running_rank(),
                    None => true,
                };
                if earlier {
                    stalled = Some(key);
                }
            }
        }
        Ok(stalled)
    }

    /// Adds one running sequence to the step; those of a lower rank give way if they must.
    fn feed(&mut self, step: &mut Step, key: SeqKey) -> Result<bool> {
        loop {
            let sequence = self.get(key)?;
            let rows = sequence.pending().min(step.budget);
            let rows = rows.min(self.rows_that_fit(sequence.computed, step.free()));
            if rows > 0 {
                self.push(step, Chunk { key, rows })?;
                return Ok(true);
            }
            match self.running.last().copied() {
                Some(last) if last != key => self.preempt_in(step, last)?,
                _ => return Ok(false),
            }
        }
    }

    pub(super) fn push(&self, step: &mut Step, chunk: Chunk) -> Result<()> {
        step.budget -= chunk.rows;
        step.reserved += self.new_blocks(chunk)?;
        step.chunks.push(chunk);
        Ok(())
    }

    /// Preempts a sequence that may be part of the step already: its tokens, the blocks kept
    /// for them and its share of the budget come back into the step.
    fn preempt_in(&mut self, step: &mut Step, key: SeqKey) -> Result<()> {
        if let Some(at) = step.chunks.iter().position(|chunk| chunk.key == key) {
            let chunk = step.chunks.remove(at);
            step.budget += chunk.rows;
            step.reserved -= self.new_blocks(chunk)?;
        }
        self.preempt(key)?;
        step.available = self.cache.available_blocks();
        Ok(())
    }

    /// Blocks that a chunk needs beyond those its sequence holds, the same in every group.
    fn new_blocks(&self, chunk: Chunk) -> Result<usize> {
        let computed = self.get(chunk.key)?.computed;
        Ok((computed + chunk.rows).div_ceil(self.block_size) - computed.div_ceil(self.block_size))
    }

    /// Rows that a sequence can take with `free` further blocks.
    pub(super) fn rows_that_fit(&self, computed: usize, free: usize) -> usize {
        (computed.div_ceil(self.block_size) + free) * self.block_size - computed
    }

    /// A second sequence with the same tokens and blocks.
    pub(super) fn fork(&mut self, parent: SeqKey, branch: u32) -> Result<SeqKey> {
        let key = SeqKey { branch, ..parent };
        let parent = self.get(parent)?;
        let mut child = Sequence {
            key,
            width: 1,
            swapped: None,
            ..parent.clone()
        };
        child.held = parent.held.map(|id| self.cache.fork(id)).transpose()?;
        if child.held.is_none() {
            child.computed = 0;
        }
        if child.held.is_some() {
            self.insert_running(child.running_rank());
        } else if !child.parked {
            self.waiting.insert(child.rank());
        }
        self.sequences.insert(key, child);
        Ok(key)
    }

    /// Appends a chosen token: the sequence has something to compute again.
    pub(super) fn extend(&mut self, key: SeqKey, token: u32) -> Result<()> {
        let sequence = self.get_mut(key)?;
        sequence.tokens.push(token);
        sequence.width = 1;
        sequence.parked = false;
        let rank = sequence.held.is_none().then(|| sequence.rank());
        self.waiting.extend(rank);
        Ok(())
    }

    /// Forgets a sequence, if there is one; its blocks return, at the latest when a plan that
    /// somebody else holds has ended.
    pub(super) fn remove(&mut self, key: SeqKey) {
        let Some(sequence) = self.sequences.remove(&key) else {
            return;
        };
        self.waiting.remove(&sequence.rank());
        self.running.retain(|&other| other != key);
        self.give_back(&sequence);
    }

    fn give_back(&self, sequence: &Sequence) {
        if let Some(id) = sequence.held {
            self.cache.discard(id);
        }
        if let Some(swap) = sequence.swapped {
            self.cache.abandon_swap(swap);
        }
    }

    /// Somebody may have cleared the cache: then every sequence is to be computed anew.
    fn find_cleared(&mut self) {
        let epoch = self.cache.epoch();
        if std::mem::replace(&mut self.epoch, epoch) == epoch {
            return;
        }
        self.running.clear();
        for sequence in self.sequences.values_mut() {
            self.waiting.remove(&sequence.rank());
            sequence.preempted |= sequence.held.is_some() || sequence.swapped.is_some();
            (sequence.held, sequence.swapped) = (None, None);
            sequence.computed = 0;
            // A parked beam has nothing to compute before its search goes on.
            let rank = (!sequence.parked).then(|| sequence.rank());
            self.waiting.extend(rank);
        }
    }

    pub(super) fn insert_running(&mut self, rank: Rank) {
        let at = self.running.partition_point(|key| {
            self.sequences
                .get(key)
                .is_some_and(|other| other.running_rank() < rank)
        });
        self.running.insert(at, rank.key);
    }

    /// Marks those that have waited too long. Looked for now and then only: it walks over all
    /// that wait.
    fn find_overdue(&mut self) {
        const EVERY: u64 = 16;
        if !self.step.is_multiple_of(EVERY) || self.waiting.is_empty() {
            return;
        }
        let (step, limit) = (self.step, self.config.max_wait);
        for sequence in self.sequences.values_mut() {
            let rank = sequence.rank();
            let late = !sequence.overdue && step - sequence.since > limit;
            if late && self.waiting.remove(&rank) {
                sequence.overdue = true;
                self.waiting.insert(sequence.rank());
            }
        }
    }
}

/// Nobody else knows the sequences.
impl Drop for Scheduler {
    fn drop(&mut self) {
        for sequence in self.sequences.values() {
            self.give_back(sequence);
        }
    }
}

fn unknown(key: SeqKey) -> Error {
    Error::StaleHandle {
        op: "engine",
        kind: "request",
        id: format!("{}, branch {}", key.request, key.branch),
    }
}
