//! The prefix index: a forest of nodes, each found by its parent and its tokens.

use std::hash::BuildHasher;

use super::ids::NodeId;
use super::list::{Links, List, NIL};
use super::namespace::Namespace;
use super::reserved;
use crate::error::Result;

/// One findable piece of content. Vacant when `serial` is 0.
#[derive(Debug, Default)]
struct Node {
    serial: u64,
    hash: u64,
    namespace: Namespace,
    /// Slot of the parent. A node outlives its children, so no serial is needed here.
    parent: u32,
    depth: u32,
    hits: u32,
    /// Pins of this node.
    own_pins: u32,
    /// Pins of this node and of its descendants: references that they hold on `pinned`.
    pins: u32,
    /// The copy that the pins hold, while there are any.
    pinned: u32,
    /// Next node of the hash bucket, or next vacant slot.
    next: u32,
    children: List,
    copies: List,
}

/// Nodes, the tree they form, their physical copies, and the hash buckets that find them.
///
/// A hash only narrows the search: equality is that of parent, namespace and tokens, so any
/// hasher, even a constant one, gives right answers. Slots are handed out again after a node
/// is gone; serial numbers never.
#[derive(Debug)]
pub(super) struct PrefixIndex<S> {
    block_size: usize,
    nodes: Vec<Node>,
    /// Nodes without a parent, of every namespace.
    roots: List,
    siblings: Links,
    /// Tokens of the node in slot `n`: `n * block_size ..`.
    tokens: Vec<u32>,
    /// First node of each bucket; a power of two of them.
    buckets: Vec<u32>,
    hasher: S,
    vacant: u32,
    live: usize,
    serial: u64,
    /// Slot of the node that each block is a copy of.
    owner: Vec<u32>,
    /// Number of the registration that made each block a copy.
    stamps: Vec<u64>,
    last_stamp: u64,
    copies: Links,
}

/// What a node is found by.
#[derive(Clone, Copy)]
pub(super) struct Key<'a> {
    pub(super) namespace: &'a Namespace,
    /// Slot of the parent, [`NIL`] for a root.
    pub(super) parent: u32,
    pub(super) tokens: &'a [u32],
}

impl<S: BuildHasher> PrefixIndex<S> {
    /// An index for `num_blocks` blocks of `block_size` tokens. `tokens` is their product.
    pub(super) fn new(
        num_blocks: u32,
        block_size: usize,
        tokens: usize,
        hasher: S,
    ) -> Result<Self> {
        let blocks = num_blocks as usize;
        let num_buckets = blocks.next_power_of_two();
        let mut buckets = reserved(num_buckets)?;
        buckets.resize(num_buckets, NIL);
        let mut owner = reserved(blocks)?;
        owner.resize(blocks, NIL);
        let mut stamps = reserved(blocks)?;
        stamps.resize(blocks, 0);
        let mut copies = Links::with_capacity(blocks)?;
        (0..blocks).for_each(|_| copies.grow());
        Ok(Self {
            block_size,
            nodes: reserved(blocks)?,
            roots: List::default(),
            siblings: Links::with_capacity(blocks)?,
            tokens: reserved(tokens)?,
            buckets,
            hasher,
            vacant: NIL,
            live: 0,
            serial: 0,
            owner,
            stamps,
            last_stamp: 0,
            copies,
        })
    }

    fn hash(&self, key: Key<'_>) -> u64 {
        // A parent implies the namespace.
        let root = (key.parent == NIL).then_some(key.namespace);
        let parent = (key.parent != NIL).then(|| self.nodes[key.parent as usize].serial);
        self.hasher.hash_one((root, parent, key.tokens))
    }

    fn bucket(&self, hash: u64) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    /// The node of exactly this content.
    ///
    /// Most content has one continuation, and nodes that were made one after the other lie one
    /// after the other: so the oldest child is tried first, which for a long prompt reads
    /// memory in order and computes no hash.
    pub(super) fn find(&self, key: Key<'_>) -> Option<u32> {
        let oldest = match key.parent {
            NIL => NIL,
            parent => self.nodes[parent as usize].children.head(),
        };
        if oldest != NIL && self.tokens(oldest) == key.tokens {
            return (self.nodes[oldest as usize].namespace == *key.namespace).then_some(oldest);
        }
        self.find_by_hash(key)
    }

    fn find_by_hash(&self, key: Key<'_>) -> Option<u32> {
        let hash = self.hash(key);
        let mut slot = self.buckets[self.bucket(hash)];
        while slot != NIL {
            let node = &self.nodes[slot as usize];
            if node.hash == hash
                && node.parent == key.parent
                && node.namespace == *key.namespace
                && self.tokens(slot) == key.tokens
            {
                return Some(slot);
            }
            slot = node.next;
        }
        None
    }

    /// Makes a node, without a copy yet. There is none of this content, and `key.tokens` fill
    /// a block.
    pub(super) fn insert(&mut self, key: Key<'_>) -> u32 {
        let hash = self.hash(key);
        let slot = self.take_slot();
        let at = slot as usize * self.block_size;
        self.tokens[at..at + self.block_size].copy_from_slice(key.tokens);
        self.serial += 1;
        self.live += 1;
        let bucket = self.bucket(hash);
        let depth = match key.parent {
            NIL => 0,
            parent => self.nodes[parent as usize].depth + 1,
        };
        self.nodes[slot as usize] = Node {
            serial: self.serial,
            hash,
            namespace: key.namespace.clone(),
            parent: key.parent,
            depth,
            next: std::mem::replace(&mut self.buckets[bucket], slot),
            pinned: NIL,
            ..Node::default()
        };
        let siblings = match key.parent {
            NIL => &mut self.roots,
            parent => &mut self.nodes[parent as usize].children,
        };
        self.siblings.push_back(siblings, slot);
        slot
    }

    fn take_slot(&mut self) -> u32 {
        if self.vacant != NIL {
            let slot = self.vacant;
            self.vacant = self.nodes[slot as usize].next;
            return slot;
        }
        // Every node has a copy, so there are never more nodes than blocks, whose number fits.
        let slot = self.nodes.len() as u32;
        self.nodes.push(Node::default());
        self.siblings.grow();
        self.tokens.resize(self.tokens.len() + self.block_size, 0);
        slot
    }

    /// Removes a node that has neither copies nor children.
    pub(super) fn remove(&mut self, slot: u32) {
        let node = std::mem::take(&mut self.nodes[slot as usize]);
        let siblings = match node.parent {
            NIL => &mut self.roots,
            parent => &mut self.nodes[parent as usize].children,
        };
        self.siblings.unlink(siblings, slot);
        let bucket = self.bucket(node.hash);
        if self.buckets[bucket] == slot {
            self.buckets[bucket] = node.next;
        } else {
            let mut at = self.buckets[bucket];
            while at != NIL {
                let before = &mut self.nodes[at as usize];
                at = before.next;
                if at == slot {
                    before.next = node.next;
                    break;
                }
            }
        }
        self.nodes[slot as usize].next = std::mem::replace(&mut self.vacant, slot);
        self.live -= 1;
    }
}

impl<S> PrefixIndex<S> {
    /// Removes every node. Serial numbers and stamps go on, so old ones stay stale.
    pub(super) fn clear(&mut self) {
        self.nodes.clear();
        self.roots = List::default();
        self.siblings.clear();
        self.tokens.clear();
        self.buckets.fill(NIL);
        self.vacant = NIL;
        self.live = 0;
        let blocks = self.owner.len();
        self.owner.fill(NIL);
        self.copies.clear();
        (0..blocks).for_each(|_| self.copies.grow());
    }

    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// The slot of a node, unless it is gone.
    pub(super) fn resolve(&self, id: NodeId) -> Option<u32> {
        let node = self.nodes.get(id.slot() as usize)?;
        (node.serial == id.serial()).then_some(id.slot())
    }

    pub(super) fn id(&self, slot: u32) -> NodeId {
        NodeId::new(self.nodes[slot as usize].serial, slot)
    }

    pub(super) fn tokens(&self, slot: u32) -> &[u32] {
        let at = slot as usize * self.block_size;
        &self.tokens[at..at + self.block_size]
    }

    pub(super) fn namespace(&self, slot: u32) -> &Namespace {
        &self.nodes[slot as usize].namespace
    }

    pub(super) fn parent(&self, slot: u32) -> u32 {
        self.nodes[slot as usize].parent
    }

    pub(super) fn first_child(&self, slot: u32) -> u32 {
        self.nodes[slot as usize].children.head()
    }

    /// The nodes that follow `parent`, oldest first; [`NIL`]: those that start a prompt, of
    /// every namespace.
    pub(super) fn children(&self, parent: u32) -> impl Iterator<Item = u32> + '_ {
        let children = match parent {
            NIL => &self.roots,
            parent => &self.nodes[parent as usize].children,
        };
        self.siblings.iter(children)
    }

    pub(super) fn depth(&self, slot: u32) -> u32 {
        self.nodes[slot as usize].depth
    }

    pub(super) fn hits(&self, slot: u32) -> u32 {
        self.nodes[slot as usize].hits
    }

    pub(super) fn count_hit(&mut self, slot: u32) {
        let hits = &mut self.nodes[slot as usize].hits;
        *hits = hits.saturating_add(1);
    }

    /// Whether a copy of the node can go without making another node unfindable.
    pub(super) fn can_spare_copy(&self, slot: u32) -> bool {
        let node = &self.nodes[slot as usize];
        node.copies.len() > 1 || node.children.is_empty()
    }

    /// The slot of the node that a block is a copy of.
    pub(super) fn owner(&self, block: u32) -> Option<u32> {
        let slot = self.owner[block as usize];
        (slot != NIL).then_some(slot)
    }

    /// The copy to use: referenced copies come first.
    pub(super) fn first_copy(&self, slot: u32) -> Option<u32> {
        let block = self.nodes[slot as usize].copies.head();
        (block != NIL).then_some(block)
    }

    /// The copy to use last: idle if any is.
    pub(super) fn last_copy(&self, slot: u32) -> Option<u32> {
        let block = self.nodes[slot as usize].copies.tail();
        (block != NIL).then_some(block)
    }

    /// Adds a referenced copy.
    pub(super) fn add_copy(&mut self, slot: u32, block: u32) {
        self.owner[block as usize] = slot;
        self.copies
            .push_front(&mut self.nodes[slot as usize].copies, block);
    }

    /// Gives a block that becomes a copy a number that no other registration has.
    pub(super) fn stamp(&mut self, block: u32) {
        self.last_stamp += 1;
        self.stamps[block as usize] = self.last_stamp;
    }

    /// The number of the registration that made a block a copy, while it is one.
    pub(super) fn stamp_of(&self, block: u32) -> Option<u64> {
        self.owner(block).map(|_| self.stamps[block as usize])
    }

    /// Removes a copy and returns the node that it was of.
    pub(super) fn remove_copy(&mut self, block: u32) -> Option<u32> {
        let slot = self.owner(block)?;
        self.owner[block as usize] = NIL;
        self.copies
            .unlink(&mut self.nodes[slot as usize].copies, block);
        Some(slot)
    }

    /// A copy has become referenced: it is now the first to use.
    pub(super) fn copy_in_use(&mut self, block: u32) {
        if let Some(slot) = self.remove_copy(block) {
            self.add_copy(slot, block);
        }
    }

    /// A copy has become idle: it is now the last to use.
    pub(super) fn copy_idle(&mut self, block: u32) {
        if let Some(slot) = self.remove_copy(block) {
            self.owner[block as usize] = slot;
            self.copies
                .push_back(&mut self.nodes[slot as usize].copies, block);
        }
    }

    pub(super) fn pins(&self, slot: u32) -> u32 {
        self.nodes[slot as usize].pins
    }

    /// The copy that the pins of a node hold.
    pub(super) fn pinned_copy(&self, slot: u32) -> Option<u32> {
        let node = &self.nodes[slot as usize];
        (node.pins > 0).then_some(node.pinned)
    }

    pub(super) fn add_pin(&mut self, slot: u32, block: u32) {
        let node = &mut self.nodes[slot as usize];
        node.pins += 1;
        node.pinned = block;
    }

    pub(super) fn add_own_pin(&mut self, slot: u32) {
        self.nodes[slot as usize].own_pins += 1;
    }

    /// `false`, and no change, when the node itself has no pin.
    pub(super) fn drop_own_pin(&mut self, slot: u32) -> bool {
        let own_pins = &mut self.nodes[slot as usize].own_pins;
        match own_pins.checked_sub(1) {
            Some(fewer) => *own_pins = fewer,
            None => return false,
        }
        true
    }

    pub(super) fn drop_pin(&mut self, slot: u32) {
        self.nodes[slot as usize].pins -= 1;
    }
}

impl<S: BuildHasher> PrefixIndex<S> {
    /// The rule that the nodes break, if they break one.
    pub(super) fn broken_rule(&self) -> Option<String> {
        let (mut live, mut copies, mut children, mut roots) = (0, 0, 0, 0);
        if !self.siblings.is_sound(&self.roots) {
            return Some("the roots are linked".into());
        }
        for (slot, node) in (0..).zip(&self.nodes) {
            if node.serial == 0 {
                continue;
            }
            let broken = |rule: &str| Some(format!("node {}: {rule}", self.id(slot)));
            if !self.copies.is_sound(&node.copies) || node.copies.is_empty() {
                return broken("its copies are linked, and there is one");
            }
            if self
                .copies
                .iter(&node.copies)
                .any(|block| self.owner(block) != Some(slot))
            {
                return broken("every copy names it as owner");
            }
            if !self.siblings.is_sound(&node.children) {
                return broken("its children are linked");
            }
            if self
                .siblings
                .iter(&node.children)
                .any(|child| self.nodes[child as usize].parent != slot)
            {
                return broken("every child names it as parent");
            }
            let pins = self.siblings.iter(&node.children).map(|c| self.pins(c));
            if pins.sum::<u32>() + node.own_pins != node.pins {
                return broken("its pins are its own and those of its children");
            }
            let pinned = self.pinned_copy(slot);
            if pinned.is_some_and(|block| self.owner(block) != Some(slot)) {
                return broken("the pinned block is a copy");
            }
            if let Some(parent) = self.nodes.get(node.parent as usize) {
                children += 1;
                // Serials that fall towards the root rule out a cycle.
                if parent.serial == 0 || parent.serial >= node.serial {
                    return broken("its parent is findable and older");
                }
                if parent.depth + 1 != node.depth || parent.namespace != node.namespace {
                    return broken("depth and namespace follow from the parent");
                }
            } else if node.parent != NIL || node.depth != 0 {
                return broken("it has a parent or is a root");
            } else {
                roots += 1;
            }
            let key = Key {
                namespace: &node.namespace,
                parent: node.parent,
                tokens: self.tokens(slot),
            };
            if self.find_by_hash(key) != Some(slot) {
                return broken("it is found by its namespace, parent and tokens");
            }
            live += 1;
            copies += node.copies.len();
        }
        let nodes = self.nodes.iter().filter(|node| node.serial != 0);
        if nodes.map(|n| n.children.len()).sum::<usize>() != children {
            return Some("every child list holds findable nodes".into());
        }
        let is_root = |&slot: &u32| {
            let node = &self.nodes[slot as usize];
            node.serial != 0 && node.parent == NIL
        };
        if self.roots.len() != roots || !self.siblings.iter(&self.roots).all(|slot| is_root(&slot))
        {
            return Some("the root list holds every root".into());
        }
        if self.owner.iter().filter(|&&slot| slot != NIL).count() != copies {
            return Some("every keyed block is a copy of a findable node".into());
        }
        if live != self.live || self.vacant_slots() + live != self.nodes.len() {
            return Some("every slot is findable or vacant".into());
        }
        None
    }

    fn vacant_slots(&self) -> usize {
        let (mut slot, mut count) = (self.vacant, 0);
        while slot != NIL && count < self.nodes.len() {
            (slot, count) = (self.nodes[slot as usize].next, count + 1);
        }
        count
    }
}
