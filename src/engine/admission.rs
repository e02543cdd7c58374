//! Which waiting sequences join a step.
//!
//! In order of rank, and nobody overtakes the first that does not fit: an endless flow of
//! small prompts cannot keep a large one waiting.

use std::ops::Bound;

use super::scheduler::{Chunk, Scheduler, Step};
use super::sequence::{SeqKey, Sequence};
use crate::cache::{AddOptions, GroupSpec, SequenceId};
use crate::error::Result;

/// What became of a waiting sequence.
enum Admission {
    Joined,
    /// It is back, alone, and fills the pool: there is no row for its next token.
    Stalled,
    /// Its prefix is being computed in this step: next step it is cached.
    Deferred,
    /// It does not fit, so nobody behind it is asked.
    Refused,
}

impl Scheduler {
    /// Lets waiting sequences into the step. Answers one that runs again but found no block.
    pub(super) fn admit(&mut self, step: &mut Step) -> Result<Option<SeqKey>> {
        let mut next = self.waiting.first().copied();
        let mut deferred = 0;
        let mut stalled = None;
        while let Some(rank) = next {
            if step.budget == 0 || deferred > self.config.max_sequences {
                break;
            }
            match self.try_admit(step, rank.key)? {
                Admission::Joined => {}
                Admission::Stalled => stalled = Some(rank.key),
                Admission::Deferred => deferred += 1,
                Admission::Refused => break,
            }
            let behind = (Bound::Excluded(rank), Bound::Unbounded);
            next = self.waiting.range(behind).next().copied();
        }
        self.counts.deferrals += deferred as u64;
        Ok(stalled)
    }

    fn try_admit(&mut self, step: &mut Step, key: SeqKey) -> Result<Admission> {
        let sequence = self.get(key)?;
        if self.slots_taken() + sequence.width > self.config.max_sequences {
            return Ok(Admission::Refused);
        }
        if sequence.swapped.is_some() {
            return self.try_return(step, key);
        }
        let options = self.options(sequence);
        let cost = self.cache.cost(&sequence.tokens, &options);
        if options.read_prefix && self.is_being_computed(step, sequence, cost.cached_tokens) {
            return Ok(Admission::Deferred);
        }
        // The whole of it has to fit, or others would soon take its blocks away again; and one
        // further block for each running sequence, or it would take theirs. With nobody else
        // there is nothing to wait for.
        let others = self.running.len();
        let spare = step.reserved + others;
        let groups = self.cache.spec().groups.iter().zip(&cost.blocks_needed);
        let mut needs = groups
            .map(|(group, &whole)| whole.min(self.most_held(group, sequence.tokens.len())))
            .zip(&cost.blocks_available);
        if others > 0 && needs.any(|(needed, available)| needed + spare > *available) {
            return Ok(Admission::Refused);
        }
        let added = self.cache.add(&sequence.tokens, options)?;
        let available = self.cache.available_blocks();
        let before = std::mem::replace(&mut step.available, available);
        let rows = (sequence.tokens.len() - added.cached_tokens)
            .min(step.budget)
            .min(self.rows_that_fit(added.cached_tokens, step.free()));
        if rows == 0 {
            self.cache.remove(added.id)?;
            step.available = before;
            return Ok(Admission::Refused);
        }
        self.joined(key, added.id, added.cached_tokens)?;
        self.push(step, Chunk { key, rows })?;
        Ok(Admission::Joined)
    }

    /// A sequence in host memory comes back, on the same terms.
    fn try_return(&mut self, step: &mut Step, key: SeqKey) -> Result<Admission> {
        let computed = self.get(key)?.computed;
        let others = self.running.len();
        let spare = step.reserved + 1 + others;
        let groups = self.cache.spec().groups.iter().zip(&step.available);
        let mut needs =
            groups.map(|(group, free)| (group.blocks_held(computed, self.block_size), free));
        if others > 0 && needs.any(|(held, free)| held + spare > *free) {
            return Ok(Admission::Refused);
        }
        let Some(id) = self.swap_in(key, others == 0)? else {
            return match self.get(key)?.swapped {
                Some(_) => Ok(Admission::Refused),
                None => self.try_admit(step, key),
            };
        };
        step.available = self.cache.available_blocks();
        let sequence = self.get_mut(key)?;
        let rank = sequence.rank();
        sequence.held = Some(id);
        let (pending, running) = (sequence.pending(), sequence.running_rank());
        self.waiting.remove(&rank);
        self.insert_running(running);
        let fitting = self.rows_that_fit(computed, step.free());
        let rows = pending.min(step.budget).min(fitting);
        if rows == 0 {
            return Ok(Admission::Stalled);
        }
        self.push(step, Chunk { key, rows })?;
        Ok(Admission::Joined)
    }

    /// Blocks of a group that a prompt of `tokens` holds at most while it is computed in chunks:
    /// all, or those of its window and of a chunk.
    fn most_held(&self, group: &GroupSpec, tokens: usize) -> usize {
        let held = group.blocks_held(tokens, self.block_size);
        match group.window {
            // One more, since neither ends where a block does.
            Some(_) => {
                let chunk = self.config.max_batch_tokens.div_ceil(self.block_size);
                held.saturating_add(chunk).saturating_add(1)
            }
            None => held,
        }
    }

    /// Sequences that run, with those that forks of a prompt will add.
    fn slots_taken(&self) -> usize {
        let widths = self
            .running
            .iter()
            .filter_map(|key| self.sequences.get(key));
        widths.map(|sequence| sequence.width).sum()
    }

    pub(super) fn options(&self, sequence: &Sequence) -> AddOptions {
        let options = AddOptions::default().with_namespace(sequence.namespace.clone());
        let options = if sequence.preempted {
            options.recomputed()
        } else {
            options
        };
        if !self.config.prefix_cache {
            options.unindexed()
        // A cached row has no logits.
        } else if sequence.prompt_logits || !(sequence.read_prefix || sequence.preempted) {
            options.without_prefix_reads()
        } else {
            options
        }
    }

    /// Whether the step computes blocks that `sequence` could use from the next step on.
    fn is_being_computed(&self, step: &Step, sequence: &Sequence, cached: usize) -> bool {
        let leaders = step
            .chunks
            .iter()
            .filter(|chunk| chunk.rows > 1 || self.block_size == 1)
            .filter_map(|chunk| self.sequences.get(&chunk.key))
            .filter(|leader| leader.namespace == sequence.namespace);
        let usable = sequence.tokens.len() - 1;
        leaders
            .map(|leader| {
                let both = leader.tokens.iter().zip(&sequence.tokens);
                let common = both.take_while(|(a, b)| a == b).count().min(usable);
                (common / self.block_size * self.block_size, leader.computed)
            })
            .any(|(common, computed)| common > cached && common > computed)
    }

    fn joined(&mut self, key: SeqKey, id: SequenceId, cached: usize) -> Result<()> {
        let sequence = self.get_mut(key)?;
        let rank = sequence.rank();
        sequence.held = Some(id);
        sequence.computed = cached;
        let (tokens, resumed) = (sequence.tokens.len() as u64, sequence.preempted);
        let running = sequence.running_rank();
        self.waiting.remove(&rank);
        self.insert_running(running);
        // A request's prompt counts once in the hit rate, however often it has to come back.
        if resumed {
            self.counts.resumed_tokens += tokens;
            self.counts.resumed_cached_tokens += cached as u64;
        } else {
            self.counts.prompt_tokens += tokens;
            self.counts.cached_tokens += cached as u64;
            self.started.push((key.request, cached));
        }
        tracing::debug!(
            request = key.request.0,
            branch = key.branch,
            cached,
            "admitted"
        );
        Ok(())
    }
}
