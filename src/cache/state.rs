//! The bookkeeping behind a cache: which sequence holds which blocks. Integers only; tensors
//! stay in `cache.rs`, so that every rule here can be tested without running a model.

use std::collections::HashMap;

use super::host::HostPool;
use super::sequence::{Chain, SequenceId, Sequences, unique};
use super::spec::GroupSpec;
use super::usage::Counters;
use crate::block::{BlockAllocator, BlockId, BlockTable, Event, NodeId};
use crate::error::{Error, Result};

/// One layer group: its pool of blocks.
#[derive(Debug)]
pub(super) struct Group {
    pub spec: GroupSpec,
    pub allocator: BlockAllocator,
}

/// A feed of the live step: the rows it adds to its sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct LiveFeed {
    pub sequence: SequenceId,
    pub rows: usize,
    /// Whether positions follow the order of the tokens, as a prompt's do.
    pub in_order: bool,
}

/// How to take back what the live step changed in one group of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Undo {
    /// End of the block table before.
    pub end: usize,
    /// The logical block that copy-on-write replaced, and what stood there. The step holds
    /// the sequence's reference to it until it is committed.
    pub replaced: Option<(usize, BlockId)>,
}

/// The reserved step, `undo[feed * groups + group]`.
#[derive(Debug, Default)]
pub(super) struct Live {
    /// Number of the step: only its own plan ends it.
    pub id: u64,
    pub feeds: Vec<LiveFeed>,
    pub undo: Vec<Undo>,
}

/// Everything that changes, behind one lock.
#[derive(Debug)]
pub(super) struct State {
    pub epoch: u64,
    pub block_size: usize,
    pub sub_block_reuse: bool,
    pub deduplicate: bool,
    pub cascade: Option<usize>,
    pub groups: Vec<Group>,
    pub sequences: Sequences,
    /// Where swapped sequences are, if the cache was made with such a place.
    pub host: Option<HostPool>,
    /// The last pinned node of each pin, per group.
    pub pins: HashMap<u64, Vec<Option<NodeId>>>,
    pub live: Option<Live>,
    pub next_step: u64,
    pub counters: Counters,
    /// Memory of the last step, reused by the next.
    pub spare: Live,
    pub blocks: Vec<BlockId>,
    pub given_up: Vec<(BlockId, u32)>,
    pub needed: Vec<usize>,
    /// The logical block that each feed has to copy, group after group.
    pub copying: Vec<Option<usize>>,
    /// Sequences to remove once the live step has ended.
    pub doomed: Vec<SequenceId>,
}

impl State {
    /// Refuses while a step plan is alive.
    pub(super) fn idle(&self, op: &'static str) -> Result<()> {
        if self.live.is_some() {
            Err(Error::PlanOutstanding { op })
        } else {
            Ok(())
        }
    }

    /// A second sequence with the same tokens, sharing every block.
    pub(super) fn fork(&mut self, op: &'static str, id: SequenceId) -> Result<SequenceId> {
        let mut copy = self.sequences.get(op, id)?.clone();
        // One prompt, however many sequences go on from it.
        copy.query = None;
        for (group, held) in self.groups.iter_mut().zip(&copy.groups) {
            for &block in held.table.blocks() {
                group.allocator.retain(block)?;
            }
        }
        Ok(self.sequences.insert(copy))
    }

    /// Gives back every block of a sequence, the last first, so that a cached prefix is
    /// evicted from its end.
    pub(super) fn remove(&mut self, op: &'static str, id: SequenceId) -> Result<()> {
        let sequence = self.sequences.remove(op, id)?;
        for (group, held) in self.groups.iter_mut().zip(&sequence.groups) {
            for &block in held.table.blocks().iter().rev() {
                group.allocator.release(block)?;
            }
        }
        Ok(())
    }

    /// Removes a sequence now, or as soon as the live step has ended.
    pub(super) fn discard(&mut self, id: SequenceId) -> Result<()> {
        if self.live.is_some() {
            self.doomed.push(id);
            return Ok(());
        }
        self.remove("discard", id)
    }

    /// Removes what was discarded during the step that has just ended.
    pub(super) fn remove_doomed(&mut self) -> Result<()> {
        while let Some(id) = self.doomed.pop() {
            self.remove("discard", id)?;
        }
        Ok(())
    }

    /// Rewinds a sequence to its first `len` tokens.
    pub(super) fn truncate(&mut self, op: &'static str, id: SequenceId, len: usize) -> Result<()> {
        let sequence = self.sequences.get_mut(op, id)?;
        let refuse = |expected: String| Error::InvalidArgument {
            op,
            what: "len".into(),
            expected,
            got: len.to_string(),
        };
        if len > sequence.tokens.len() {
            return Err(refuse(format!(
                "at most the {} tokens of the sequence",
                sequence.tokens.len()
            )));
        }
        for (group, held) in self.groups.iter().zip(&sequence.groups) {
            let first = group.spec.first_visible(len) / self.block_size;
            if len > 0 && first < held.table.first_block() {
                return Err(refuse(format!(
                    "a length whose window of {} tokens is still held: blocks before {} were released",
                    group.spec.window.unwrap_or(0),
                    held.table.first_block()
                )));
            }
        }
        sequence.tokens.truncate(len);
        let (end, full) = (len.div_ceil(self.block_size), len / self.block_size);
        for (group, held) in self.groups.iter_mut().zip(&mut sequence.groups) {
            for block in held.table.truncate_to(end) {
                group.allocator.release(block)?;
            }
            if len == 0 {
                held.table = BlockTable::starting_at(0);
            }
            if full == 0 {
                held.chain = sequence.indexed.then(Chain::default);
            } else if held.chain.is_some_and(|chain| chain.blocks > full) {
                let hits = group
                    .allocator
                    .lookup(&sequence.namespace, &sequence.tokens, full);
                let whole = (hits.len() == full).then(|| hits.last().map(|hit| hit.node));
                held.chain = whole.map(|last| Chain { blocks: full, last });
            }
        }
        Ok(())
    }

    /// Pins the findable prefix of a sequence; answers the pin and the tokens it covers.
    pub(super) fn pin(&mut self, op: &'static str, id: SequenceId) -> Result<(u64, usize)> {
        let sequence = self.sequences.get(op, id)?;
        let mut blocks = sequence.tokens.len() / self.block_size;
        let mut pinned = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let hits = group
                .allocator
                .lookup(&sequence.namespace, &sequence.tokens, blocks);
            blocks = hits.len();
            pinned.push(hits);
        }
        let mut nodes = Vec::with_capacity(self.groups.len());
        for (group, hits) in self.groups.iter_mut().zip(&pinned) {
            let last = hits[..blocks].last().map(|hit| hit.node);
            if let Some(node) = last {
                group.allocator.pin(node)?;
            }
            nodes.push(last);
        }
        let pin = unique();
        self.pins.insert(pin, nodes);
        Ok((pin, blocks * self.block_size))
    }

    /// Gives up a pin.
    pub(super) fn unpin(&mut self, op: &'static str, pin: u64) -> Result<()> {
        let stale = || Error::StaleHandle {
            op,
            kind: "pin",
            id: pin.to_string(),
        };
        let nodes = self.pins.remove(&pin).ok_or_else(stale)?;
        for (group, node) in self.groups.iter_mut().zip(&nodes) {
            if let Some(node) = *node {
                group.allocator.unpin(node)?;
            }
        }
        Ok(())
    }

    /// Forgets everything and starts a new epoch.
    pub(super) fn clear(&mut self) {
        self.epoch += 1;
        self.live = None;
        self.doomed.clear();
        self.sequences.clear();
        self.pins.clear();
        if let Some(host) = &mut self.host {
            host.clear();
        }
        for group in &mut self.groups {
            group.allocator.clear();
        }
    }

    /// Recorded events of all groups since the last call, group by group.
    pub(super) fn take_events(&mut self) -> Vec<(usize, Event)> {
        let groups = self.groups.iter_mut().enumerate();
        groups
            .flat_map(|(g, group)| {
                group
                    .allocator
                    .take_events()
                    .into_iter()
                    .map(move |e| (g, e))
            })
            .collect()
    }

    /// Rows that hold a token, over the distinct blocks in use of one group.
    pub(super) fn tokens_stored(&self, g: usize) -> usize {
        let in_use = self.groups[g].allocator.counts().referenced;
        // Every block in use is full but for the last of a sequence; forks may share that one.
        let mut partial: HashMap<BlockId, usize> = HashMap::new();
        for sequence in self.sequences.iter() {
            let table = &sequence.groups[g].table;
            for (i, &block) in table.blocks().iter().enumerate() {
                let start = (table.first_block() + i) * self.block_size;
                let rows = sequence
                    .tokens
                    .len()
                    .saturating_sub(start)
                    .min(self.block_size);
                if rows < self.block_size || partial.contains_key(&block) {
                    let most = partial.entry(block).or_default();
                    *most = rows.max(*most);
                }
            }
        }
        in_use * self.block_size
            - partial
                .values()
                .map(|rows| self.block_size - rows)
                .sum::<usize>()
    }

    /// Checks every allocator, that each reference is one that a sequence, the live step or a
    /// pin holds, and the host pool.
    pub(super) fn check_invariants(&self) -> Result<()> {
        const OP: &str = "check_invariants";
        let broken = |what: String| Err(Error::Invariant { op: OP, what });
        for (g, group) in self.groups.iter().enumerate() {
            group.allocator.check_invariants()?;
            let mut holders: HashMap<BlockId, u32> = HashMap::new();
            for sequence in self.sequences.iter() {
                let held = &sequence.groups[g];
                for &block in held.table.blocks() {
                    *holders.entry(block).or_default() += 1;
                }
                let end = sequence.tokens.len().div_ceil(self.block_size);
                if self.live.is_none() && held.table.end() != end {
                    return broken(format!(
                        "group {g}: a table ends at block {}, {} tokens need {end}",
                        held.table.end(),
                        sequence.tokens.len()
                    ));
                }
                if held
                    .chain
                    .is_some_and(|c| c.blocks > sequence.tokens.len() / self.block_size)
                {
                    return broken(format!(
                        "group {g}: more registered than full blocks: {:?}",
                        held.chain
                    ));
                }
            }
            let replaced = self
                .live
                .iter()
                .flat_map(|live| live.undo.iter().skip(g).step_by(self.groups.len()));
            for (_, block) in replaced.filter_map(|undo| undo.replaced) {
                *holders.entry(block).or_default() += 1;
            }
            for block in (0..group.allocator.num_blocks()).map(|index| BlockId::new(index as u32)) {
                let held =
                    holders.get(&block).copied().unwrap_or(0) + group.allocator.pin_count(block);
                let count = group.allocator.ref_count(block);
                if count != held {
                    return broken(format!(
                        "group {g}: block {block} counts {count}, {held} hold it"
                    ));
                }
            }
        }
        self.host
            .as_ref()
            .map_or(Ok(()), HostPool::check_invariants)
    }
}
