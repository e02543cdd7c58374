//! The host pool: which of its blocks hold what for which swapped sequence. Integers only.

use std::collections::HashMap;

use super::sequence::{Sequence, unique};
use super::swap::SwapId;
use crate::block::{BlockAllocator, BlockId};
use crate::error::{Error, Result};

/// A sequence that is swapped out. Its block tables are empty and begin where they began.
#[derive(Debug)]
pub(super) struct Swapped {
    pub sequence: Sequence,
    /// The host block of each block that it held, per group.
    pub blocks: Vec<Vec<BlockId>>,
}

/// Host memory and the sequences that are there.
#[derive(Debug)]
pub(super) struct HostPool {
    pub groups: Vec<HostGroup>,
    pub swapped: HashMap<SwapId, Swapped>,
}

impl HostPool {
    /// A pool of `blocks[group]` blocks.
    pub(super) fn new(blocks: &[usize], block_size: usize) -> Result<Self> {
        let group = |&blocks: &usize| {
            Ok(HostGroup {
                allocator: BlockAllocator::new(blocks, block_size)?,
                homes: vec![None; blocks],
                copies: HashMap::new(),
            })
        };
        Ok(Self {
            groups: blocks.iter().map(group).collect::<Result<_>>()?,
            swapped: HashMap::new(),
        })
    }

    /// Keeps a sequence under a handle that was never used before.
    pub(super) fn insert(&mut self, swapped: Swapped) -> SwapId {
        let id = SwapId(unique());
        self.swapped.insert(id, swapped);
        id
    }

    /// Gives back the blocks of one swapped sequence.
    pub(super) fn release(&mut self, blocks: &[Vec<BlockId>]) -> Result<()> {
        for (group, blocks) in self.groups.iter_mut().zip(blocks) {
            for &block in blocks {
                group.release(block)?;
            }
        }
        Ok(())
    }

    /// Forgets every swapped sequence.
    pub(super) fn clear(&mut self) {
        self.swapped.clear();
        for group in &mut self.groups {
            group.allocator.clear();
            group.homes.fill(None);
            group.copies.clear();
        }
    }

    /// Blocks of a group, and how many of them are in use.
    pub(super) fn usage(&self, group: usize) -> (usize, usize) {
        self.groups.get(group).map_or((0, 0), |group| {
            let total = group.allocator.num_blocks();
            (total, group.allocator.counts().referenced)
        })
    }

    /// Checks that every reference is one that a swapped sequence holds, and that homes and
    /// copies agree.
    pub(super) fn check_invariants(&self) -> Result<()> {
        for (g, group) in self.groups.iter().enumerate() {
            group.allocator.check_invariants()?;
            let mut holders: HashMap<BlockId, u32> = HashMap::new();
            for swapped in self.swapped.values() {
                let first = swapped.sequence.groups[g].table.first_block();
                let end = first + swapped.blocks[g].len();
                let size = group.allocator.block_size();
                if end != swapped.sequence.tokens.len().div_ceil(size) {
                    return broken(g, format!("a swapped sequence ends at block {end}"));
                }
                for &block in &swapped.blocks[g] {
                    *holders.entry(block).or_default() += 1;
                }
            }
            for (index, home) in group.homes.iter().enumerate() {
                let block = BlockId::new(index as u32);
                let held = holders.get(&block).copied().unwrap_or(0);
                let count = group.allocator.ref_count(block);
                if count != held {
                    return broken(g, format!("block {block} counts {count}, {held} hold it"));
                }
                let copy = home.map(|home| group.copies.get(&home.stamp));
                if copy.is_some_and(|copy| held == 0 || copy != Some(&block)) {
                    return broken(g, format!("block {block} is not found by its home"));
                }
            }
            if group.homes.iter().flatten().count() != group.copies.len() {
                return broken(g, "a copy has no home".into());
            }
        }
        Ok(())
    }
}

fn broken(group: usize, what: String) -> Result<()> {
    Err(Error::Invariant {
        op: "check_invariants",
        what: format!("host pool, group {group}: {what}"),
    })
}

/// The host blocks of one layer group.
///
/// A host block remembers its *home*, the findable device block that holds the same bytes. By
/// it sequences that share blocks share them here too, and a block that is still at home when
/// its sequence comes back need not be copied.
#[derive(Debug)]
pub(super) struct HostGroup {
    pub allocator: BlockAllocator,
    homes: Vec<Option<Home>>,
    /// The host block that is a copy of what has a stamp.
    copies: HashMap<u64, BlockId>,
}

/// A device block, and the stamp it has as long as its bytes are the same.
#[derive(Debug, Clone, Copy)]
struct Home {
    block: BlockId,
    stamp: u64,
}

impl HostGroup {
    /// The host block that holds the bytes of a device block.
    pub(super) fn copy_of(&self, device: &BlockAllocator, block: BlockId) -> Option<BlockId> {
        self.copies.get(&device.stamp(block)?).copied()
    }

    /// The device block that still holds the bytes of a host block.
    pub(super) fn at_home(&self, device: &BlockAllocator, host: BlockId) -> Option<BlockId> {
        let home = (*self.homes.get(host.index())?)?;
        (device.stamp(home.block) == Some(home.stamp)).then_some(home.block)
    }

    /// Records that a device block holds the bytes of a host block in use; forgets the home it
    /// had if that block cannot be found.
    pub(super) fn settle(&mut self, device: &BlockAllocator, host: BlockId, block: BlockId) {
        self.leave_home(host);
        if let Some(stamp) = device.stamp(block) {
            self.homes[host.index()] = Some(Home { block, stamp });
            self.copies.insert(stamp, host);
        }
    }

    /// Gives back a reference to a host block.
    pub(super) fn release(&mut self, host: BlockId) -> Result<()> {
        self.allocator.release(host)?;
        if self.allocator.ref_count(host) == 0 {
            self.leave_home(host);
        }
        Ok(())
    }

    fn leave_home(&mut self, host: BlockId) {
        if let Some(home) = self.homes[host.index()].take() {
            self.copies.remove(&home.stamp);
        }
    }
}
