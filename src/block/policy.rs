//! Which idle content goes first when memory is needed.

use std::fmt::Debug;

use super::ids::{BlockId, NodeId};

/// A block that may be evicted: nobody references it, and no findable node depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Candidate {
    /// The block whose memory would be reused.
    pub block: BlockId,
    /// The content that it is a copy of.
    pub node: NodeId,
    /// When it became idle, in steps of the allocator's own clock: larger is later.
    pub last_use: u64,
    /// How many times the content was acquired as a hit.
    pub hits: u32,
    /// Blocks between the content and the start of its prompt; 0 is the first block.
    pub depth: u32,
}

/// Chooses the next block to evict.
///
/// A policy only advises. It is asked once for each block that is needed after all unkeyed
/// ones are used; whatever it answers, references, pins and the index stay intact. It is asked
/// in the middle of an allocation, under the lock of the cache: it must not panic, which would
/// lose the blocks already taken, nor call the cache, which would wait for itself.
pub trait EvictionPolicy: Send + Debug {
    /// Picks one of `candidates`, which come least recently used first and are never none.
    /// On `None`, or a block that is not a candidate, the first is taken.
    ///
    /// Each candidate drawn costs O(1); a policy that looks at all of them makes an
    /// allocation O(idle blocks).
    fn choose(&mut self, candidates: &mut dyn Iterator<Item = Candidate>) -> Option<BlockId>;
}

/// Least recently used first, O(1). When the blocks of a sequence are released last first,
/// prompts lose their tails before their heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lru;

impl EvictionPolicy for Lru {
    fn choose(&mut self, candidates: &mut dyn Iterator<Item = Candidate>) -> Option<BlockId> {
        candidates.next().map(|candidate| candidate.block)
    }
}
