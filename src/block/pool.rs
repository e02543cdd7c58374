//! Who uses each block, and the queues of those nobody uses.

use super::event::Counts;
use super::list::{Links, List, NIL};
use super::reserved;
use crate::error::Result;

/// Where a block is. Everything but `Held` is a queue and means: no reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Referenced.
    Held,
    /// Holds nothing that can be found.
    Free,
    /// Findable; evicting it makes no other node unfindable.
    Spare,
    /// Findable, and the last copy of a node with children: its eviction takes them along.
    Inner,
}

impl Place {
    pub(super) fn is_idle(self) -> bool {
        matches!(self, Self::Spare | Self::Inner)
    }

    /// The queue for an idle block.
    pub(super) fn idle(spare: bool) -> Self {
        if spare { Self::Spare } else { Self::Inner }
    }
}

#[derive(Debug)]
struct Block {
    refs: u32,
    place: Place,
    /// Time at which it became idle.
    last_use: u64,
}

/// Reference counts and queues of the blocks of a pool.
///
/// The free queue is first in, first out. The two idle queues are ordered by last use, oldest
/// first; a block changes between them when it gains or loses the last findable child.
#[derive(Debug)]
pub(super) struct Pool {
    blocks: Vec<Block>,
    links: Links,
    queues: Queues,
    clock: u64,
}

#[derive(Debug, Default)]
struct Queues {
    free: List,
    spare: List,
    inner: List,
}

impl Queues {
    fn of(&mut self, place: Place) -> Option<&mut List> {
        match place {
            Place::Held => None,
            Place::Free => Some(&mut self.free),
            Place::Spare => Some(&mut self.spare),
            Place::Inner => Some(&mut self.inner),
        }
    }
}

impl Pool {
    pub(super) fn new(num_blocks: u32) -> Result<Self> {
        let mut pool = Self {
            blocks: reserved(num_blocks as usize)?,
            links: Links::with_capacity(num_blocks as usize)?,
            queues: Queues::default(),
            clock: 0,
        };
        pool.fill(num_blocks);
        Ok(pool)
    }

    /// All blocks free, in the order of their ids.
    pub(super) fn reset(&mut self) {
        let num_blocks = self.blocks.len() as u32;
        self.blocks.clear();
        self.links.clear();
        self.queues = Queues::default();
        self.fill(num_blocks);
    }

    fn fill(&mut self, num_blocks: u32) {
        for block in 0..num_blocks {
            self.blocks.push(Block {
                refs: 0,
                place: Place::Free,
                last_use: 0,
            });
            self.links.grow();
            self.links.push_back(&mut self.queues.free, block);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn refs(&self, block: u32) -> u32 {
        self.blocks[block as usize].refs
    }

    pub(super) fn place(&self, block: u32) -> Place {
        self.blocks[block as usize].place
    }

    pub(super) fn last_use(&self, block: u32) -> u64 {
        self.blocks[block as usize].last_use
    }

    pub(super) fn counts(&self) -> Counts {
        let free = self.queues.free.len();
        let idle = self.queues.spare.len() + self.queues.inner.len();
        Counts {
            free,
            idle,
            referenced: self.len() - free - idle,
        }
    }

    /// Adds a reference and leaves the block in its queue; `false` when the count is full.
    pub(super) fn add_ref(&mut self, block: u32) -> bool {
        let refs = &mut self.blocks[block as usize].refs;
        match refs.checked_add(1) {
            Some(more) => *refs = more,
            None => return false,
        }
        true
    }

    /// Takes a reference away and returns how many are left.
    pub(super) fn drop_ref(&mut self, block: u32) -> u32 {
        let refs = &mut self.blocks[block as usize].refs;
        *refs -= 1;
        *refs
    }

    /// Takes a block out of its queue, if it is in one.
    pub(super) fn hold(&mut self, block: u32) {
        let place = self.place(block);
        if let Some(queue) = self.queues.of(place) {
            self.links.unlink(queue, block);
            self.blocks[block as usize].place = Place::Held;
        }
    }

    /// Puts a held block at the end of the free queue.
    pub(super) fn put_free(&mut self, block: u32) {
        self.links.push_back(&mut self.queues.free, block);
        self.blocks[block as usize].place = Place::Free;
    }

    /// Makes a held block the most recently used one of its idle queue.
    pub(super) fn put_idle(&mut self, block: u32, spare: bool) {
        self.clock += 1;
        self.blocks[block as usize].last_use = self.clock;
        self.insert_by_age(block, Place::idle(spare));
    }

    /// Moves an idle block to the queue that is right for it now; its age stays.
    pub(super) fn requeue(&mut self, block: u32, spare: bool) {
        let (now, right) = (self.place(block), Place::idle(spare));
        if now.is_idle() && now != right {
            self.hold(block);
            self.insert_by_age(block, right);
        }
    }

    /// Searches the place from both ends at once. A node mostly becomes a leaf right after
    /// its only child was evicted from the old end, and was last used right after or before
    /// that child: a step or two. A block that has just become idle is the newest: no step.
    fn insert_by_age(&mut self, block: u32, place: Place) {
        let age = self.last_use(block);
        let list = match place {
            Place::Inner => &self.queues.inner,
            _ => &self.queues.spare,
        };
        let (mut old, mut new) = (list.head(), list.tail());
        let after = loop {
            if new == NIL || self.last_use(new) < age {
                break new;
            }
            if self.last_use(old) > age {
                break self.links.prev(old);
            }
            (old, new) = (self.links.next(old), self.links.prev(new));
        };
        if let Some(queue) = self.queues.of(place) {
            self.links.insert_after(queue, after, block);
            self.blocks[block as usize].place = place;
        }
    }

    /// The free block that has waited longest.
    pub(super) fn first_free(&self) -> Option<u32> {
        some(self.queues.free.head())
    }

    /// The idle blocks whose eviction costs no other node, least recently used first.
    pub(super) fn spares(&self) -> impl Iterator<Item = u32> + '_ {
        self.links.iter(&self.queues.spare)
    }

    /// The inner idle block that was used last. Of the blocks that one sequence left behind
    /// its window this is the deepest, so its eviction keeps the longest prefix findable.
    pub(super) fn last_inner(&self) -> Option<u32> {
        some(self.queues.inner.tail())
    }

    /// The rule that the queues break, if they break one.
    pub(super) fn broken_rule(&self) -> Option<&'static str> {
        let queues = [
            (Place::Free, &self.queues.free),
            (Place::Spare, &self.queues.spare),
            (Place::Inner, &self.queues.inner),
        ];
        for (place, list) in queues {
            if !self.links.is_sound(list) {
                return Some("the links of a queue are sound");
            }
            if self.links.iter(list).any(|b| self.place(b) != place) {
                return Some("every block of a queue says that it is there");
            }
            let there = |b: &&Block| b.place == place;
            if self.blocks.iter().filter(there).count() != list.len() {
                return Some("free + idle + referenced = total");
            }
        }
        for idle in [&self.queues.spare, &self.queues.inner] {
            if !self
                .links
                .iter(idle)
                .map(|b| self.last_use(b))
                .is_sorted_by(|a, b| a < b)
            {
                return Some("idle queues are ordered by last use");
            }
        }
        let counted = |b: &Block| (b.refs > 0) == (b.place == Place::Held);
        if !self.blocks.iter().all(counted) {
            return Some("a block is held if and only if it has a reference");
        }
        None
    }
}

fn some(index: u32) -> Option<u32> {
    (index != NIL).then_some(index)
}
