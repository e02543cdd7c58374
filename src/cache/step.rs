//! One step on the bookkeeping: reserve, then commit or roll back.

use super::plan::{Feed, StepBuffers};
use super::sequence::Sequence;
use super::state::{Group, LiveFeed, State, Undo};
use crate::block::BlockId;
use crate::error::{Error, Result};
use crate::ops::Mask;

const PLAN: &str = "plan";
const COMMIT: &str = "commit";

impl State {
    /// Reserves the rows of `feeds` and writes the index arrays of the step into `buffers`;
    /// `buffers.copies[group]` are the blocks to copy before anything is written. All or
    /// nothing.
    pub(super) fn reserve(&mut self, feeds: &[Feed<'_>], buffers: &mut StepBuffers) -> Result<()> {
        self.check_feeds(feeds)?;
        // Counting is separate from taking, so that a step that does not fit changes nothing
        // in any group.
        self.needed.clear();
        self.copying.clear();
        for (g, group) in self.groups.iter().enumerate() {
            self.given_up.clear();
            let mut needed = 0;
            for feed in feeds {
                let sequence = self.sequences.get(PLAN, feed.sequence)?;
                let copy = must_copy(group, g, sequence, self.block_size, &mut self.given_up);
                let end = (sequence.tokens.len() + feed.tokens.len()).div_ceil(self.block_size);
                needed += end - sequence.groups[g].table.end() + usize::from(copy.is_some());
                // Taking blocks may evict an ancestor and with it the reason to copy; what is
                // done is what was counted.
                self.copying.push(copy);
            }
            let free = group.allocator.available();
            if needed > free {
                return Err(Error::OutOfBlocks {
                    op: PLAN,
                    needed,
                    free,
                });
            }
            self.needed.push(needed);
        }

        let mut live = std::mem::take(&mut self.spare);
        live.feeds.clear();
        live.undo.clear();
        live.id = self.next_step;
        self.next_step += 1;
        live.undo.resize(
            feeds.len() * self.groups.len(),
            Undo {
                end: 0,
                replaced: None,
            },
        );
        for feed in feeds {
            let start = self.sequences.get(PLAN, feed.sequence)?.tokens.len();
            live.feeds.push(LiveFeed {
                sequence: feed.sequence,
                rows: feed.tokens.len(),
                in_order: feed.in_order(start),
            });
        }
        let groups = self.groups.len();
        for (g, group) in self.groups.iter_mut().enumerate() {
            self.blocks.clear();
            group.allocator.allocate(self.needed[g], &mut self.blocks)?;
            let mut fresh = self.blocks.drain(..);
            for (f, feed) in feeds.iter().enumerate() {
                let sequence = self.sequences.get_mut(PLAN, feed.sequence)?;
                let undo = &mut live.undo[f * groups + g];
                undo.end = sequence.groups[g].table.end();
                let copy = self.copying[g * feeds.len() + f];
                let end = (sequence.tokens.len() + feed.tokens.len()).div_ceil(self.block_size);
                let table = &mut sequence.groups[g].table;
                if let Some(logical) = copy
                    && let Some(block) = fresh.next()
                    && let Some(old) = table.replace(logical, block)
                {
                    buffers.copies[g].push((old.raw(), block.raw()));
                    undo.replaced = Some((logical, old));
                }
                while table.end() < end {
                    match fresh.next() {
                        Some(block) => table.push(block),
                        None => break,
                    }
                }
            }
        }
        self.live = Some(live);
        self.fill(feeds, buffers)
    }

    fn check_feeds(&self, feeds: &[Feed<'_>]) -> Result<()> {
        if feeds.is_empty() {
            return Err(Error::Empty {
                op: PLAN,
                what: "the list of feeds",
            });
        }
        for (i, feed) in feeds.iter().enumerate() {
            self.sequences.get(PLAN, feed.sequence)?;
            if feed.tokens.is_empty() {
                return Err(Error::Empty {
                    op: PLAN,
                    what: "a feed",
                });
            }
            if let Some(positions) = feed.positions.filter(|p| p.len() != feed.tokens.len()) {
                return Err(Error::InvalidArgument {
                    op: PLAN,
                    what: "positions".into(),
                    expected: format!(
                        "one for each of the {} tokens of the feed",
                        feed.tokens.len()
                    ),
                    got: positions.len().to_string(),
                });
            }
            if feeds[..i]
                .iter()
                .any(|other| other.sequence == feed.sequence)
            {
                return Err(Error::InvalidArgument {
                    op: PLAN,
                    what: "feeds".into(),
                    expected: "each sequence at most once".into(),
                    got: format!("sequence {} twice", feed.sequence),
                });
            }
        }
        Ok(())
    }

    /// Writes the index arrays of the reserved step.
    fn fill(&self, feeds: &[Feed<'_>], buffers: &mut StepBuffers) -> Result<()> {
        for feed in feeds {
            let start = self.sequences.get(PLAN, feed.sequence)?.tokens.len();
            let row = buffers.token_ids.len() as u32;
            let rows = feed.tokens.len() as u32;
            buffers.token_ids.extend_from_slice(feed.tokens);
            match feed.positions {
                Some(positions) => buffers.positions.extend_from_slice(positions),
                None => buffers
                    .positions
                    .extend((start..start + feed.tokens.len()).map(|p| p as u32)),
            }
            buffers.logit_rows.extend(feed.logits.rows(row, rows));
        }
        for (g, group) in self.groups.iter().enumerate() {
            for feed in feeds {
                let sequence = self.sequences.get(PLAN, feed.sequence)?;
                let table = &sequence.groups[g].table;
                let start = sequence.tokens.len();
                let end = start + feed.tokens.len();
                let first =
                    (group.spec.first_visible(start) / self.block_size).max(table.first_block());
                let listed = &table.blocks()[first - table.first_block()..];
                buffers.pages.clear();
                buffers.pages.extend(listed.iter().map(|block| block.raw()));
                buffers.slots.clear();
                buffers.slots.extend((start..end).map(|position| {
                    let page = buffers.pages[position / self.block_size - first];
                    i64::from(page) * self.block_size as i64 + (position % self.block_size) as i64
                }));
                buffers.tables[g].push(&buffers.pages, first as u32, end, &buffers.slots)?;
            }
            if let Some(row_cost) = self.cascade {
                let mask = Mask::causal(group.spec.window);
                buffers.cascades[g].find(&buffers.tables[g], mask, row_cost)?;
            }
        }
        Ok(())
    }

    /// Makes the first `accepted[feed]` rows of each feed part of their sequences, registers
    /// the blocks they fill, and releases what is behind a window.
    pub(super) fn commit(
        &mut self,
        token_ids: &[u32],
        accepted: impl Fn(usize) -> usize,
    ) -> Result<()> {
        let Some(live) = self.live.take() else {
            return Err(Error::Invariant {
                op: COMMIT,
                what: "no step is live".into(),
            });
        };
        let groups = self.groups.len();
        let mut row = 0;
        for (f, feed) in live.feeds.iter().enumerate() {
            let taken = accepted(f).min(feed.rows);
            let sequence = self.sequences.get_mut(COMMIT, feed.sequence)?;
            sequence
                .tokens
                .extend_from_slice(&token_ids[row..row + taken]);
            row += feed.rows;
            if !feed.in_order && taken > 0 {
                sequence.indexed = false;
                sequence
                    .groups
                    .iter_mut()
                    .for_each(|held| held.chain = None);
            }
            self.counters.committed_tokens += taken as u64;
            if let Some(query) = sequence.query.take() {
                self.counters.count(query);
                for group in self.groups.iter_mut().filter(|_| !query.recompute) {
                    group.allocator.record_query(query.looked_up, query.cached);
                }
            }
            for (g, group) in self.groups.iter_mut().enumerate() {
                if let Some((_, old)) = live.undo[f * groups + g].replaced {
                    group.allocator.release(old)?;
                }
                let held = &mut sequence.groups[g];
                let len = sequence.tokens.len();
                for block in held.table.truncate_to(len.div_ceil(self.block_size)) {
                    group.allocator.release(block)?;
                }
                self.counters.deduplicated += group.register_full(
                    &sequence.namespace,
                    &sequence.tokens,
                    held,
                    self.deduplicate,
                )?;
                let visible = group.spec.first_visible(len) / self.block_size;
                // First block first: what is farthest behind the window is evicted first.
                for &block in held.table.release_front(visible) {
                    group.allocator.release(block)?;
                }
            }
        }
        self.counters.steps += 1;
        self.counters.copies += live
            .undo
            .iter()
            .filter(|undo| undo.replaced.is_some())
            .count() as u64;
        self.spare = live;
        self.remove_doomed()
    }

    /// Puts every sequence back as it was before the step.
    pub(super) fn rollback(&mut self) -> Result<()> {
        let Some(live) = self.live.take() else {
            return Ok(());
        };
        let groups = self.groups.len();
        for (f, feed) in live.feeds.iter().enumerate().rev() {
            let sequence = self.sequences.get_mut(PLAN, feed.sequence)?;
            for (g, group) in self.groups.iter_mut().enumerate() {
                let undo = live.undo[f * groups + g];
                let table = &mut sequence.groups[g].table;
                for block in table.truncate_to(undo.end) {
                    group.allocator.release(block)?;
                }
                if let Some((logical, old)) = undo.replaced
                    && let Some(fresh) = table.replace(logical, old)
                {
                    group.allocator.release(fresh)?;
                }
            }
        }
        self.counters.rollbacks += 1;
        self.spare = live;
        self.remove_doomed()
    }
}

/// The logical block that `sequence` has to copy before it writes its next row: its last,
/// partly filled block, if another holder shares it or it is in the prefix index (a full
/// block is immutable; a rewind can end inside one). `given_up` counts the references that
/// earlier feeds of the same step give up, so that the last owner never copies.
fn must_copy(
    group: &Group,
    g: usize,
    sequence: &Sequence,
    block_size: usize,
    given_up: &mut Vec<(BlockId, u32)>,
) -> Option<usize> {
    let len = sequence.tokens.len();
    if len.is_multiple_of(block_size) {
        return None;
    }
    let logical = len / block_size;
    let block = sequence.groups[g].table.get(logical)?;
    let gone = given_up.iter_mut().find(|(b, _)| *b == block);
    let owners = group.allocator.ref_count(block) - gone.as_ref().map_or(0, |(_, n)| *n);
    if owners <= 1 && !group.allocator.is_keyed(block) {
        return None;
    }
    match gone {
        Some((_, n)) => *n += 1,
        None => given_up.push((block, 1)),
    }
    Some(logical)
}
