//! What names a block and what names a node.

use std::fmt;

/// A physical block of one pool: rows `index() * block_size ..` of every K/V tensor of its
/// layer group.
///
/// An id is only a place. It says nothing of what the place holds: when a block's content is
/// dropped, the same id comes back from [`BlockAllocator::allocate`] with another owner.
/// Whoever wants to remember *content* keeps a [`NodeId`].
///
/// [`BlockAllocator::allocate`]: super::BlockAllocator::allocate
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockId(u32);

impl BlockId {
    pub(crate) const fn new(raw: u32) -> Self {
        Self(raw)
    }

    /// The id as an index into arrays of the pool.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The id as page tables hold it.
    pub const fn raw(self) -> u32 {
        self.0
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Findable content: a namespace, a parent node and the tokens of one full block.
///
/// The serial number grows with every node that an allocator ever makes, so a node that was
/// evicted or cleared is never confused with a later one in the same place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId {
    serial: u64,
    slot: u32,
}

impl NodeId {
    pub(super) const fn new(serial: u64, slot: u32) -> Self {
        Self { serial, slot }
    }

    pub(super) const fn serial(self) -> u64 {
        self.serial
    }

    pub(super) const fn slot(self) -> u32 {
        self.slot
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.serial)
    }
}
