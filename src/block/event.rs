//! What an allocator tells about itself.

use super::ids::NodeId;
use super::namespace::Namespace;

/// A change of what can be found, for routers that follow the content of many caches.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// Content has become findable: its first copy was registered.
    Stored {
        /// The new node.
        node: NodeId,
        /// The node of the block before it, `None` at the start of a prompt.
        parent: Option<NodeId>,
        /// The namespace it is found in.
        namespace: Namespace,
        /// Its `block_size` tokens.
        tokens: Vec<u32>,
    },
    /// Content is no longer findable: its last copy, or an ancestor's, was evicted.
    /// Descendants are reported before their ancestors.
    Removed {
        /// The node that is gone.
        node: NodeId,
    },
    /// Nothing is findable any more.
    Cleared,
}

/// How the blocks of a pool are used: the three add up to all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Blocks that hold nothing of use.
    pub free: usize,
    /// Findable blocks without a reference, which give way when memory is needed.
    pub idle: usize,
    /// Blocks with at least one reference, each counted once.
    pub referenced: usize,
}

/// Running totals since the allocator was made; [`clear`](super::BlockAllocator::clear)
/// keeps them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Prompts reported by [`record_query`](super::BlockAllocator::record_query).
    pub queries: u64,
    /// Tokens of those prompts.
    pub queried_tokens: u64,
    /// Tokens of those prompts that the cache held.
    pub hit_tokens: u64,
    /// Blocks that stopped being findable because memory was needed: the evicted ones and
    /// those of their descendants.
    pub evictions: u64,
}
