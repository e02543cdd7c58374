//! Sequences and the handles that name them.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::{BlockTable, Namespace, NodeId};
use crate::error::{Error, Result};

/// Names a sequence of one cache. A handle outlives its sequence harmlessly: its serial number
/// is never used again, in no cache of the process, so a stale or foreign handle is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    slot: u32,
    serial: u64,
}

/// A number that nothing else in the process was given: for handles.
pub(super) fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl std::fmt::Display for SequenceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.serial.fmt(f)
    }
}

/// How far the full blocks of a sequence are in the prefix index of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Chain {
    /// Full blocks that are registered, from the first block on.
    pub blocks: usize,
    /// Node of the last of them, `None` if there is none yet.
    pub last: Option<NodeId>,
}

/// What a sequence holds in one group.
#[derive(Debug, Clone)]
pub(super) struct GroupState {
    pub table: BlockTable,
    /// `None`: later blocks are not registered, because the sequence is not indexed or an
    /// ancestor was evicted, so that no prompt could reach them.
    pub chain: Option<Chain>,
}

/// A sequence: the tokens whose K/V exist, and where it lies.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    pub namespace: Namespace,
    /// Whether its full blocks enter the prefix index.
    pub indexed: bool,
    pub tokens: Vec<u32>,
    pub groups: Vec<GroupState>,
    /// Its prompt, until the first commit has counted it.
    pub query: Option<Query>,
}

/// A prompt as the statistics count it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Tokens that were looked up: all or none.
    pub looked_up: usize,
    /// Tokens that were found.
    pub cached: usize,
    /// It was in the cache before and gave way to others.
    pub recompute: bool,
}

/// All sequences, in slots that are reused under a new serial number.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    slots: Vec<(u64, Option<Sequence>)>,
    free: Vec<u32>,
}

impl Sequences {
    pub(super) fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push((0, None));
                (self.slots.len() - 1) as u32
            }
        };
        let serial = unique();
        self.slots[slot as usize] = (serial, Some(sequence));
        SequenceId { slot, serial }
    }

    pub(super) fn get(&self, op: &'static str, id: SequenceId) -> Result<&Sequence> {
        match self.slots.get(id.slot as usize) {
            Some((serial, Some(sequence))) if *serial == id.serial => Ok(sequence),
            _ => Err(stale(op, id)),
        }
    }

    pub(super) fn get_mut(&mut self, op: &'static str, id: SequenceId) -> Result<&mut Sequence> {
        match self.slots.get_mut(id.slot as usize) {
            Some((serial, Some(sequence))) if *serial == id.serial => Ok(sequence),
            _ => Err(stale(op, id)),
        }
    }

    pub(super) fn remove(&mut self, op: &'static str, id: SequenceId) -> Result<Sequence> {
        match self.slots.get_mut(id.slot as usize) {
            Some((serial, entry)) if *serial == id.serial => {
                let sequence = entry.take().ok_or_else(|| stale(op, id))?;
                self.free.push(id.slot);
                Ok(sequence)
            }
            _ => Err(stale(op, id)),
        }
    }

    /// Forgets every sequence; all handles are stale afterwards.
    pub(super) fn clear(&mut self) {
        for (slot, (_, entry)) in self.slots.iter_mut().enumerate() {
            if entry.take().is_some() {
                self.free.push(slot as u32);
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.slots
            .iter()
            .filter_map(|(_, sequence)| sequence.as_ref())
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

fn stale(op: &'static str, id: SequenceId) -> Error {
    Error::StaleHandle {
        op,
        kind: "sequence",
        id: id.to_string(),
    }
}
