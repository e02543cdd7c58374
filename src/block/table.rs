//! The block table of one sequence in one layer group.

use super::ids::BlockId;

/// Which block holds which part of a sequence.
///
/// Logical block `i` holds the K/V of tokens `i * block_size .. (i + 1) * block_size`. The
/// table lists the logical blocks `first_block() .. end()` without holes; those before were
/// released behind a sliding window. It only lists: references are taken and given back at the
/// [`BlockAllocator`](super::BlockAllocator), so each method that drops blocks hands them out.
///
/// All operations are amortised O(1) per block, and allocate only when a table outgrows its
/// longest length so far.
#[derive(Clone, Debug, Default)]
pub struct BlockTable {
    /// Logical index of `blocks()[0]`.
    first: usize,
    blocks: Vec<BlockId>,
    /// Released entries at the start of `blocks`, dropped in bulk so that a release is O(1).
    dead: usize,
}

impl BlockTable {
    /// An empty table that begins at logical block 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty table that begins at logical block `first`: the blocks before it lie behind
    /// the window from the start.
    pub fn starting_at(first: usize) -> Self {
        Self {
            first,
            ..Self::default()
        }
    }

    /// Logical index of the first block held (of the next one to come, when empty).
    pub fn first_block(&self) -> usize {
        self.first
    }

    /// The blocks held, in logical order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks[self.dead..]
    }

    /// Number of blocks held.
    pub fn len(&self) -> usize {
        self.blocks.len() - self.dead
    }

    /// Whether no block is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Logical index behind the last block held.
    pub fn end(&self) -> usize {
        self.first + self.len()
    }

    /// The block at a logical index, `None` when the table does not hold it.
    pub fn get(&self, logical: usize) -> Option<BlockId> {
        let held = logical.checked_sub(self.first)?;
        self.blocks().get(held).copied()
    }

    /// Appends the block of logical index `end()`.
    pub fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// Removes the last block.
    pub fn pop(&mut self) -> Option<BlockId> {
        if self.is_empty() {
            return None;
        }
        self.blocks.pop()
    }

    /// Removes the blocks from logical index `end` on and returns them last first, the order
    /// in which to release them. Below `first_block()` the table becomes empty and begins at
    /// `end`. The blocks are gone from the table even if the iterator is dropped early.
    pub fn truncate_to(&mut self, end: usize) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        let keep = end.saturating_sub(self.first).min(self.len());
        self.first = self.first.min(end);
        self.blocks.drain(self.dead + keep..).rev()
    }

    /// Removes the blocks before logical index `upto` and returns them in logical order. The
    /// table then begins at `upto`, or at its end when that comes first.
    pub fn release_front(&mut self, upto: usize) -> &[BlockId] {
        if self.dead > self.len() {
            self.blocks.drain(..self.dead);
            self.dead = 0;
        }
        let count = upto.saturating_sub(self.first).min(self.len());
        let from = self.dead;
        self.dead += count;
        self.first += count;
        &self.blocks[from..self.dead]
    }

    /// Puts `block` in the place of the block at a logical index (copy-on-write) and returns
    /// that one; `None`, and no change, when the table does not hold the index.
    pub fn replace(&mut self, logical: usize, block: BlockId) -> Option<BlockId> {
        let held = logical.checked_sub(self.first)?;
        let place = self.blocks.get_mut(self.dead..)?.get_mut(held)?;
        Some(std::mem::replace(place, block))
    }
}

impl PartialEq for BlockTable {
    fn eq(&self, other: &Self) -> bool {
        (self.first, self.blocks()) == (other.first, other.blocks())
    }
}

impl Eq for BlockTable {}
