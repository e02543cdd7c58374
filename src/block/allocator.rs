//! Handing out blocks and counting who uses them.

use std::hash::{BuildHasher, RandomState};

use super::check_block_size;
use super::event::{Counts, Event, Stats};
use super::ids::BlockId;
use super::index::PrefixIndex;
use super::policy::{Candidate, EvictionPolicy, Lru};
use super::pool::{Place, Pool};
use crate::error::{Error, Result};

/// The blocks of one pool: who references them, which are unused, and which hold content that
/// can be found again.
///
/// # What an id means
/// A [`BlockId`] is a place in the K/V tensors, not its content. From
/// [`allocate`](Self::allocate) until the last [`release`](Self::release) the block belongs to
/// those who reference it. After that it is
/// - *free* if it was never registered: the next allocation may hand out the same id;
/// - *idle* if it was: it stays findable, and is handed out again, with its content forgotten,
///   only when no free block is left.
///
/// So an id may be kept exactly as long as a reference is. What outlives references is a
/// [`NodeId`](super::NodeId), which is never reused.
///
/// # Order of supply
/// Free blocks first, the one that has waited longest first. Then idle blocks that no other
/// findable content depends on, as the [`EvictionPolicy`] chooses. Last, idle blocks that do
/// have findable descendants: this happens only where blocks are released behind a window
/// while later ones are in use. Their descendants become unfindable with them.
///
/// # Cost
/// Reference counts, registering and evicting are O(1) per block, hashing the tokens
/// included, and allocate nothing once the index has grown to the number of nodes in use
/// (its memory is reserved when the allocator is made). Two exceptions to O(1): a policy may
/// look at more than one candidate, and when the last block that depends on an idle block
/// goes, that block is sorted back into its queue by age, a walk past the idle blocks used in
/// between (none, when the blocks of a sequence are released together).
///
/// Bookkeeping takes about 140 bytes and `4 * block_size` bytes for each block.
///
/// The method is vLLM's block pool (Kwon et al. 2023, *Efficient Memory Management for Large
/// Language Model Serving with PagedAttention*) with a tree of nodes, as in SGLang's
/// RadixAttention, in the place of chained hashes: equality is decided by the tokens
/// themselves.
///
/// ```
/// use candle_paged_attn::block::{BlockAllocator, Namespace};
///
/// let mut blocks = BlockAllocator::new(8, 4)?;
/// let mut table = Vec::new();
/// blocks.allocate(2, &mut table)?;
///
/// // The first block is full and computed: it can be found from now on, ...
/// let ns = Namespace::default();
/// blocks.register(&ns, None, &[1, 2, 3, 4], table[0])?;
/// for &block in table.iter().rev() {
///     blocks.release(block)?;
/// }
/// // ... even after its sequence has ended.
/// let hits = blocks.lookup(&ns, &[1, 2, 3, 4, 5], 1);
/// assert_eq!(hits[0].block, table[0]);
/// # Ok::<(), candle_paged_attn::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockAllocator<S = RandomState> {
    pub(super) pool: Pool,
    pub(super) index: PrefixIndex<S>,
    policy: Box<dyn EvictionPolicy>,
    pub(super) events: Option<Vec<Event>>,
    pub(super) stats: Stats,
}

impl BlockAllocator {
    /// A pool of `num_blocks` free blocks of `block_size` tokens, with [`Lru`] eviction.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless `num_blocks` is from 1 to `u32::MAX - 1`,
    /// `block_size` a power of two from 1 to 256, and the bookkeeping fits into memory.
    pub fn new(num_blocks: usize, block_size: usize) -> Result<Self> {
        Self::with_policy(num_blocks, block_size, Box::new(Lru))
    }

    /// [`new`](Self::new) with another eviction policy.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_policy(
        num_blocks: usize,
        block_size: usize,
        policy: Box<dyn EvictionPolicy>,
    ) -> Result<Self> {
        Self::with_policy_and_hasher(num_blocks, block_size, policy, RandomState::new())
    }
}

impl<S: BuildHasher> BlockAllocator<S> {
    /// [`new`](BlockAllocator::new) with another eviction policy and another hasher of the
    /// prefix index. A poor hasher makes the index slow, never wrong.
    ///
    /// # Errors
    /// Those of [`new`](BlockAllocator::new).
    pub fn with_policy_and_hasher(
        num_blocks: usize,
        block_size: usize,
        policy: Box<dyn EvictionPolicy>,
        hasher: S,
    ) -> Result<Self> {
        const OP: &str = "block_allocator";
        check_block_size(OP, block_size)?;
        let count = u32::try_from(num_blocks).ok().filter(|&n| n != u32::MAX);
        let tokens = num_blocks.checked_mul(block_size);
        let (Some(count @ 1..), Some(tokens)) = (count, tokens) else {
            return Err(Error::InvalidArgument {
                op: OP,
                what: "num_blocks".into(),
                expected: format!("from 1 to {}", u32::MAX - 1),
                got: num_blocks.to_string(),
            });
        };
        Ok(Self {
            pool: Pool::new(count)?,
            index: PrefixIndex::new(count, block_size, tokens, hasher)?,
            policy,
            events: None,
            stats: Stats::default(),
        })
    }

    /// Appends `n` blocks to `out`, each with one reference and with undefined content.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] when fewer are available; nothing has changed then.
    pub fn allocate(&mut self, n: usize, out: &mut Vec<BlockId>) -> Result<()> {
        self.supply("allocate", n, out)
    }

    /// Takes a reference to every block of `hits` and appends `fresh` further blocks, as
    /// [`allocate`](Self::allocate) does, to `out` (the hits are not appended): all or
    /// nothing.
    ///
    /// An idle hit is no longer available to the fresh blocks, so a prompt fits if and only if
    /// `fresh` blocks are available besides its idle hits. The hits are those of a
    /// [`lookup`](Self::lookup) with no other operation in between; a block may be listed
    /// more than once.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; [`Error::StaleHandle`] for a hit that is free,
    /// [`Error::InvalidArgument`] for one outside the pool. Nothing has changed then.
    pub fn acquire(
        &mut self,
        hits: &[BlockId],
        fresh: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<()> {
        const OP: &str = "acquire";
        for &hit in hits {
            self.in_use(OP, hit)?;
        }
        // Counting references first and leaving the queues alone until all is known to fit
        // finds the distinct idle hits, and can be undone exactly.
        let mut idle = 0;
        for (done, &hit) in hits.iter().enumerate() {
            let first = self.pool.refs(hit.raw()) == 0;
            if !self.pool.add_ref(hit.raw()) {
                self.drop_refs(&hits[..done]);
                return Err(too_many_references(OP, hit));
            }
            idle += usize::from(first);
        }
        let free = self.available() - idle;
        if fresh > free {
            self.drop_refs(hits);
            return Err(Error::OutOfBlocks {
                op: OP,
                needed: fresh,
                free,
            });
        }
        for &hit in hits {
            self.leave_idle(hit.raw());
            if let Some(node) = self.index.owner(hit.raw()) {
                self.index.count_hit(node);
            }
        }
        self.supply(OP, fresh, out)
    }

    fn drop_refs(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            self.pool.drop_ref(block.raw());
        }
    }

    /// Takes one more reference to a referenced or idle block.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] for a free block, [`Error::InvalidArgument`] for one outside the
    /// pool.
    pub fn retain(&mut self, block: BlockId) -> Result<()> {
        const OP: &str = "retain";
        let index = self.in_use(OP, block)?;
        if !self.pool.add_ref(index) {
            return Err(too_many_references(OP, block));
        }
        self.leave_idle(index);
        Ok(())
    }

    /// Gives a reference back. With the last one the block becomes idle if it is findable, and
    /// free if not.
    ///
    /// Release the blocks of a sequence last first: of two idle blocks the one released
    /// earlier gives way earlier, and a tail without its head is of no use.
    /// Blocks that fall behind a window are released first first: of those with content that
    /// depends on them the one released last gives way first, and takes the least along when
    /// it is the deepest.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] for a block without references, [`Error::InvalidArgument`] for
    /// one outside the pool.
    pub fn release(&mut self, block: BlockId) -> Result<()> {
        let index = self.referenced("release", block)?;
        if self.pool.drop_ref(index) > 0 {
            return Ok(());
        }
        match self.index.owner(index) {
            None => self.pool.put_free(index),
            Some(node) => {
                self.pool.put_idle(index, self.index.can_spare_copy(node));
                self.index.copy_idle(index);
            }
        }
        Ok(())
    }

    /// Number of references to a block; 0 if it is free, idle or outside the pool.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        if block.index() < self.pool.len() {
            self.pool.refs(block.raw())
        } else {
            0
        }
    }

    /// Number of blocks that [`allocate`](Self::allocate) can supply: free and idle ones.
    pub fn available(&self) -> usize {
        let Counts { free, idle, .. } = self.counts();
        free + idle
    }

    /// How the blocks are used. O(1).
    pub fn counts(&self) -> Counts {
        self.pool.counts()
    }

    /// Number of blocks of the pool.
    pub fn num_blocks(&self) -> usize {
        self.pool.len()
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.index.block_size()
    }

    /// Forgets every reference, pin and node: all blocks are free, in the order of their ids.
    /// Block ids handed out before must not be used again; node ids are recognised as stale.
    /// O(pool).
    pub fn clear(&mut self) {
        self.pool.reset();
        self.index.clear();
        if let Some(events) = &mut self.events {
            events.push(Event::Cleared);
        }
    }

    /// Counts one admitted prompt of `queried` tokens, of which the cache held `hit`. A lookup
    /// counts nothing by itself: a prompt may be looked up several times before it fits.
    pub fn record_query(&mut self, queried: usize, hit: usize) {
        self.stats.queries += 1;
        self.stats.queried_tokens += queried as u64;
        self.stats.hit_tokens += hit as u64;
    }

    /// The running totals.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Switches the recording of events on or off (the default). Switching it off drops what
    /// was not taken; recording grows without bound until it is.
    pub fn record_events(&mut self, on: bool) {
        match on {
            true => {
                self.events.get_or_insert_default();
            }
            false => self.events = None,
        }
    }

    /// The events since the last call, oldest first; none while they are not recorded.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Checks every rule that the bookkeeping relies on: free + idle + referenced (distinct) =
    /// total; each block in the queue that its references and its content call for; each
    /// node found by what it records, with its ancestors findable. For tests: O(pool).
    ///
    /// # Errors
    /// [`Error::Invariant`] names the first broken rule: a defect of this crate.
    pub fn check_invariants(&self) -> Result<()> {
        let misplaced = |block: &u32| {
            let owner = self.index.owner(*block);
            let spare = owner.map(|node| self.index.can_spare_copy(node));
            let place = self.pool.place(*block);
            place != Place::Held && place != spare.map_or(Place::Free, Place::idle)
        };
        let lost_pin = |block: &u32| self.pins_on(*block) > self.pool.refs(*block);
        let blocks = 0..self.pool.len() as u32;
        let broken = if let Some(rule) = self.pool.broken_rule() {
            rule.into()
        } else if let Some(rule) = self.index.broken_rule() {
            rule
        } else if let Some(block) = blocks.clone().find(misplaced) {
            format!("block {block} is in the queue that its content calls for")
        } else if let Some(block) = blocks.clone().find(lost_pin) {
            format!("block {block} has a reference for each of its pins")
        } else {
            return Ok(());
        };
        Err(Error::Invariant {
            op: "check_invariants",
            what: broken,
        })
    }

    /// Checks that `n` blocks are available, and hands them out.
    fn supply(&mut self, op: &'static str, n: usize, out: &mut Vec<BlockId>) -> Result<()> {
        let free = self.available();
        if n > free {
            return Err(Error::OutOfBlocks {
                op,
                needed: n,
                free,
            });
        }
        out.reserve(n);
        for _ in 0..n {
            let Some(block) = self.next_block() else {
                return Err(Error::Invariant {
                    op,
                    what: "as many blocks can be supplied as are counted available".into(),
                });
            };
            self.pool.hold(block);
            self.pool.add_ref(block);
            out.push(BlockId::new(block));
        }
        Ok(())
    }

    /// The next block to hand out, without content; still in its queue.
    fn next_block(&mut self) -> Option<u32> {
        if let Some(block) = self.pool.first_free() {
            return Some(block);
        }
        let block = self.victim()?;
        self.evict(block);
        Some(block)
    }

    fn victim(&mut self) -> Option<u32> {
        let (pool, index) = (&self.pool, &self.index);
        let Some(oldest) = pool.spares().next() else {
            return pool.last_inner();
        };
        let mut candidates = pool.spares().filter_map(|block| {
            let node = index.owner(block)?;
            Some(Candidate {
                block: BlockId::new(block),
                node: index.id(node),
                last_use: pool.last_use(block),
                hits: index.hits(node),
                depth: index.depth(node),
            })
        });
        let choice = self.policy.choose(&mut candidates).map(BlockId::raw);
        let is_candidate =
            |&block: &u32| (block as usize) < pool.len() && pool.place(block) == Place::Spare;
        Some(choice.filter(is_candidate).unwrap_or(oldest))
    }

    /// Takes a block whose references have grown from 0 out of the idle queue.
    fn leave_idle(&mut self, block: u32) {
        if self.pool.place(block).is_idle() {
            self.pool.hold(block);
            self.index.copy_in_use(block);
        }
    }

    /// The index of a block of the pool.
    pub(super) fn known(&self, op: &'static str, block: BlockId) -> Result<u32> {
        if block.index() < self.pool.len() {
            return Ok(block.raw());
        }
        Err(Error::InvalidArgument {
            op,
            what: "block".into(),
            expected: format!("an id below {}", self.pool.len()),
            got: block.to_string(),
        })
    }

    /// The index of a block that is not free.
    fn in_use(&self, op: &'static str, block: BlockId) -> Result<u32> {
        let index = self.known(op, block)?;
        match self.pool.place(index) {
            Place::Free => Err(stale_block(op, block)),
            _ => Ok(index),
        }
    }

    /// The index of a block that someone references.
    pub(super) fn referenced(&self, op: &'static str, block: BlockId) -> Result<u32> {
        let index = self.known(op, block)?;
        match self.pool.place(index) {
            Place::Held => Ok(index),
            _ => Err(stale_block(op, block)),
        }
    }
}

fn stale_block(op: &'static str, block: BlockId) -> Error {
    Error::StaleHandle {
        op,
        kind: "block",
        id: block.to_string(),
    }
}

pub(super) fn too_many_references(op: &'static str, block: BlockId) -> Error {
    Error::InvalidArgument {
        op,
        what: format!("references to block {block}"),
        expected: format!("at most {}", u32::MAX),
        got: "one more".into(),
    }
}
