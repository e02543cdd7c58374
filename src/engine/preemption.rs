//! How a sequence gives way and comes back: its K/V are computed again, or wait in host memory.

use std::time::{Duration, Instant};

use super::config::Preemption;
use super::scheduler::Scheduler;
use super::sequence::SeqKey;
use crate::cache::SequenceId;
use crate::error::{Error, Result};

/// What preemption costs on this machine, as measured.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Costs {
    /// Seconds per token of a prompt, which computing again is like; 0 until one has run.
    per_token: f64,
    /// Seconds per block, one way; 0 until one has been moved, so that there is a first time.
    per_block: f64,
}

impl Costs {
    /// Share of a new measurement in the estimate.
    const NEW: f64 = 0.1;

    /// A step of `tokens` of some sequences. One that mostly decodes says nothing: its tokens
    /// cost many times those of a prompt.
    pub(super) fn computed(&mut self, tokens: usize, sequences: usize, took: Duration) {
        if tokens > 4 * sequences {
            Self::note(&mut self.per_token, tokens, took);
        }
    }

    fn moved(&mut self, blocks: u64, took: Duration) {
        Self::note(&mut self.per_block, blocks as usize, took);
    }

    fn note(estimate: &mut f64, units: usize, took: Duration) {
        let measured = took.as_secs_f64() / units.max(1) as f64;
        *estimate = if *estimate == 0.0 {
            measured
        } else {
            *estimate + Self::NEW * (measured - *estimate)
        };
    }
}

impl Scheduler {
    /// Takes the blocks of a running sequence. It waits, before its equals.
    pub(super) fn preempt(&mut self, key: SeqKey) -> Result<()> {
        let step = self.step;
        let Some(id) = self.get(key)?.held else {
            return Ok(());
        };
        let swapped = self.swap_out(key, id)?;
        if !swapped {
            self.cache.remove(id)?;
            self.get_mut(key)?.computed = 0;
        }
        self.running.retain(|&other| other != key);
        let sequence = self.get_mut(key)?;
        sequence.held = None;
        sequence.preempted = true;
        sequence.since = step;
        // A parked beam has nothing to compute before its search goes on.
        let rank = (!sequence.parked).then(|| sequence.rank());
        self.waiting.extend(rank);
        self.counts.preemptions += 1;
        self.gave_way.push(key.request);
        tracing::debug!(
            request = key.request.0,
            branch = key.branch,
            swapped,
            "preempted"
        );
        Ok(())
    }

    /// Moves a sequence to host memory if that is wanted, worth it and possible.
    fn swap_out(&mut self, key: SeqKey, id: SequenceId) -> Result<bool> {
        let computed = self.get(key)?.computed;
        let cheaper = || {
            let moves = 2 * computed.div_ceil(self.block_size);
            moves as f64 * self.costs.per_block < computed as f64 * self.costs.per_token
        };
        let wanted = match self.config.preemption {
            Preemption::Recompute => false,
            Preemption::Swap => true,
            Preemption::Cheaper => cheaper(),
        };
        if !wanted || !self.has_host || computed == 0 {
            return Ok(false);
        }
        let (before, start) = (self.cache.counters().blocks_to_host, Instant::now());
        match self.cache.swap_out(id) {
            Ok(swap) => {
                let blocks = self.cache.counters().blocks_to_host - before;
                // A block that is in host memory already costs nothing.
                if blocks > 0 {
                    self.costs.moved(blocks, start.elapsed());
                }
                self.get_mut(key)?.swapped = Some(swap);
                self.counts.swaps += 1;
                Ok(true)
            }
            Err(Error::OutOfBlocks { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Brings a sequence back from host memory. `None` if it does not fit: with nobody else
    /// running it is given up there, and its tokens are to be computed again.
    pub(super) fn swap_in(&mut self, key: SeqKey, alone: bool) -> Result<Option<SequenceId>> {
        let Some(swap) = self.get(key)?.swapped else {
            return Ok(None);
        };
        match self.cache.swap_in(swap) {
            Ok(id) => {
                self.get_mut(key)?.swapped = None;
                Ok(Some(id))
            }
            Err(Error::OutOfBlocks { .. }) => {
                if alone {
                    self.cache.discard_swap(swap)?;
                    let sequence = self.get_mut(key)?;
                    sequence.swapped = None;
                    sequence.computed = 0;
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
