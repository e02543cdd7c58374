//! Finding, registering, pinning and evicting content.

use std::hash::BuildHasher;

use super::allocator::{BlockAllocator, too_many_references};
use super::event::Event;
use super::ids::{BlockId, NodeId};
use super::index::Key;
use super::list::NIL;
use super::namespace::Namespace;
use crate::error::{Error, Result};

/// A full block of a prompt that is already computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hit {
    /// The content.
    pub node: NodeId,
    /// A copy of it, a referenced one if there is any. Not yet referenced on behalf of the
    /// finder: see [`BlockAllocator::acquire`].
    pub block: BlockId,
}

impl<S: BuildHasher> BlockAllocator<S> {
    /// The longest run of full blocks at the start of `tokens` that can be found, at most
    /// `max_blocks` of them. A last block that is not full matches nothing.
    ///
    /// Compares the tokens themselves, in the given namespace only. No side effect: neither
    /// statistics nor the order of eviction change. O(tokens).
    pub fn lookup(&self, namespace: &Namespace, tokens: &[u32], max_blocks: usize) -> Vec<Hit> {
        let mut hits = Vec::new();
        let mut parent = NIL;
        for tokens in tokens.chunks_exact(self.block_size()).take(max_blocks) {
            let Some((node, hit)) = self.find(namespace, parent, tokens) else {
                break;
            };
            hits.push(hit);
            parent = node;
        }
        hits
    }

    /// The content that follows `parent` (or starts a prompt) with exactly these tokens: one
    /// step of [`lookup`](Self::lookup), by which a newly computed block finds an equal one.
    /// `None` also when the parent is no longer findable or is of another namespace.
    pub fn child(
        &self,
        namespace: &Namespace,
        parent: Option<NodeId>,
        tokens: &[u32],
    ) -> Option<Hit> {
        let parent = match parent {
            None => NIL,
            Some(id) => self.index.resolve(id)?,
        };
        self.find(namespace, parent, tokens).map(|(_, hit)| hit)
    }

    /// The content that follows `parent` (or starts a prompt) and shares the most leading
    /// tokens with `tokens`, and how many they are: at least one, at most a block. Among
    /// equals the one that was registered first. The rows of these tokens in its block are
    /// those that `tokens` would get, the rows behind them are not.
    ///
    /// No side effect. O(children of the parent); at the start of a prompt O(findable
    /// prompts), those of other namespaces included.
    pub fn closest_child(
        &self,
        namespace: &Namespace,
        parent: Option<NodeId>,
        tokens: &[u32],
    ) -> Option<(Hit, usize)> {
        let parent = match parent {
            None => NIL,
            Some(id) => self.index.resolve(id)?,
        };
        let mut closest: Option<(u32, usize)> = None;
        for child in self.index.children(parent) {
            let content = self.index.tokens(child).iter();
            let shared = content.zip(tokens).take_while(|(a, b)| a == b).count();
            if shared > closest.map_or(0, |(_, most)| most)
                && self.index.namespace(child) == namespace
            {
                closest = Some((child, shared));
            }
        }
        let (node, shared) = closest?;
        Some((self.hit(node)?, shared))
    }

    fn hit(&self, node: u32) -> Option<Hit> {
        Some(Hit {
            node: self.index.id(node),
            block: BlockId::new(self.index.first_copy(node)?),
        })
    }

    fn find(&self, namespace: &Namespace, parent: u32, tokens: &[u32]) -> Option<(u32, Hit)> {
        let key = Key {
            namespace,
            parent,
            tokens,
        };
        let node = self.index.find(key)?;
        Some((node, self.hit(node)?))
    }

    /// Makes a block findable as the content that follows `parent` (`None`: that starts a
    /// prompt). The block is referenced, and its K/V are computed for all of its `block_size`
    /// `tokens`. Where equal content is already findable the block becomes a further copy of
    /// it and the node is the same.
    ///
    /// `Ok(None)`, and no change, when the parent is no longer findable: content that could
    /// not be reached is not recorded.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `tokens` do not fill a block, the block is findable
    /// already, the parent is of another namespace, or the block is outside the pool;
    /// [`Error::StaleHandle`] for a block without references.
    pub fn register(
        &mut self,
        namespace: &Namespace,
        parent: Option<NodeId>,
        tokens: &[u32],
        block: BlockId,
    ) -> Result<Option<NodeId>> {
        const OP: &str = "register";
        let refuse = |what: &str, expected: String, got: String| {
            Err(Error::InvalidArgument {
                op: OP,
                what: what.into(),
                expected,
                got,
            })
        };
        let copy = self.referenced(OP, block)?;
        if tokens.len() != self.block_size() {
            let expected = format!("{} tokens", self.block_size());
            return refuse("tokens", expected, tokens.len().to_string());
        }
        if let Some(node) = self.node_of(block) {
            return refuse(
                "block",
                "a block that is not registered".into(),
                format!("block {block} of node {node}"),
            );
        }
        let above = match parent.map(|id| self.index.resolve(id)) {
            None => NIL,
            Some(None) => return Ok(None),
            Some(Some(above)) => above,
        };
        if above != NIL && self.index.namespace(above) != namespace {
            return refuse(
                "namespace",
                // Not printed: a salt may be a secret of its tenant.
                format!("that of the parent, node {}", self.index.id(above)),
                "another".into(),
            );
        }
        let key = Key {
            namespace,
            parent: above,
            tokens,
        };
        let found = self.index.find(key);
        let node = found.unwrap_or_else(|| self.index.insert(key));
        self.index.add_copy(node, copy);
        self.index.stamp(copy);
        let id = self.index.id(node);
        match found {
            Some(_) => self.requeue_copies(node),
            None => {
                self.requeue_copies(above);
                if let Some(events) = &mut self.events {
                    events.push(Event::Stored {
                        node: id,
                        parent,
                        namespace: namespace.clone(),
                        tokens: tokens.to_vec(),
                    });
                }
            }
        }
        Ok(Some(id))
    }

    /// The content that a block is a copy of, `None` if it is not findable.
    pub fn node_of(&self, block: BlockId) -> Option<NodeId> {
        let index = self.known("node_of", block).ok()?;
        self.index.owner(index).map(|node| self.index.id(node))
    }

    /// A number that names the bytes of a findable block, `None` if it is not findable.
    ///
    /// Every registration, of any block, gets another number, and a findable block is not
    /// written to: while a block has the stamp it had before it holds the bytes it held
    /// before. (Two copies of one node hold K/V of equal tokens, which may have been computed
    /// in different steps and so differ in the last bits.)
    pub fn stamp(&self, block: BlockId) -> Option<u64> {
        let index = self.known("stamp", block).ok()?;
        self.index.stamp_of(index)
    }

    /// Whether a block is findable.
    pub fn is_keyed(&self, block: BlockId) -> bool {
        self.node_of(block).is_some()
    }

    /// Keeps the prefix that ends with `node` findable until it is [unpinned](Self::unpin) as
    /// often as it was pinned.
    ///
    /// A pin is a reference like any other: each adds one to [`ref_count`](Self::ref_count) of
    /// one copy of `node` and of each of its ancestors, so pinned blocks count as referenced,
    /// not as available. [`clear`](Self::clear) ends all pins. O(depth).
    ///
    /// # Errors
    /// [`Error::StaleHandle`] when the node is no longer findable. Nothing has changed then.
    pub fn pin(&mut self, node: NodeId) -> Result<()> {
        const OP: &str = "pin";
        let last = self.resolve(OP, node)?;
        let full = self
            .path(last)
            .filter_map(|at| self.pin_target(at))
            .find(|&copy| self.pool.refs(copy) == u32::MAX);
        if let Some(full) = full {
            return Err(too_many_references(OP, BlockId::new(full)));
        }
        let mut at = last;
        while at != NIL {
            if let Some(copy) = self.pin_target(at) {
                self.retain(BlockId::new(copy))?;
                self.index.add_pin(at, copy);
            }
            at = self.index.parent(at);
        }
        self.index.add_own_pin(last);
        Ok(())
    }

    /// Takes one pin back from the prefix that ends with `node`.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] when the node is no longer findable (its pins ended with
    /// [`clear`](Self::clear)), [`Error::InvalidArgument`] when it was not pinned itself.
    /// Nothing has changed then.
    pub fn unpin(&mut self, node: NodeId) -> Result<()> {
        const OP: &str = "unpin";
        let mut at = self.resolve(OP, node)?;
        if !self.index.drop_own_pin(at) {
            return Err(Error::InvalidArgument {
                op: OP,
                what: "node".into(),
                expected: "one that was pinned itself".into(),
                got: format!("node {node} without a pin"),
            });
        }
        while at != NIL {
            if let Some(copy) = self.index.pinned_copy(at) {
                self.index.drop_pin(at);
                self.release(BlockId::new(copy))?;
            }
            at = self.index.parent(at);
        }
        Ok(())
    }

    /// Number of references that pins hold on a block.
    pub fn pin_count(&self, block: BlockId) -> u32 {
        self.known("pin_count", block)
            .map_or(0, |index| self.pins_on(index))
    }

    pub(super) fn pins_on(&self, block: u32) -> u32 {
        match self.index.owner(block) {
            Some(node) if self.index.pinned_copy(node) == Some(block) => self.index.pins(node),
            _ => 0,
        }
    }

    /// The copy that a pin of the node holds: all pins of a node hold the same.
    fn pin_target(&self, node: u32) -> Option<u32> {
        let pinned = self.index.pinned_copy(node);
        pinned.or_else(|| self.index.first_copy(node))
    }

    /// A node and its ancestors, the root last.
    fn path(&self, node: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |node: u32| (node != NIL).then_some(node);
        std::iter::successors(some(node), move |&at| some(self.index.parent(at)))
    }

    fn resolve(&self, op: &'static str, node: NodeId) -> Result<u32> {
        self.index.resolve(node).ok_or_else(|| Error::StaleHandle {
            op,
            kind: "node",
            id: node.to_string(),
        })
    }

    /// Forgets the content of an idle block and leaves the block in the free queue. When it
    /// was the last copy, everything that is found through it becomes unfindable too.
    pub(super) fn evict(&mut self, block: u32) {
        let Some(node) = self.forget(block) else {
            return;
        };
        if self.index.first_copy(node).is_none() {
            self.remove_subtree(node);
        } else {
            self.requeue_copies(node);
        }
    }

    /// Ends a block's being a copy. An idle block becomes free; a referenced one stays with
    /// its holders and becomes free when they release it.
    fn forget(&mut self, block: u32) -> Option<u32> {
        let node = self.index.remove_copy(block)?;
        self.stats.evictions += 1;
        if self.pool.place(block).is_idle() {
            self.pool.hold(block);
            self.pool.put_free(block);
        }
        Some(node)
    }

    /// Removes a node and its descendants, children before parents.
    fn remove_subtree(&mut self, top: u32) {
        let above = self.index.parent(top);
        let mut at = top;
        while at != above {
            let child = self.index.first_child(at);
            if child != NIL {
                at = child;
                continue;
            }
            while let Some(copy) = self.index.first_copy(at) {
                self.forget(copy);
            }
            if let Some(events) = &mut self.events {
                let node = self.index.id(at);
                events.push(Event::Removed { node });
            }
            let parent = self.index.parent(at);
            self.index.remove(at);
            at = parent;
        }
        self.requeue_copies(above);
    }

    /// Moves the idle copies of a node to the right queue after its copies or children have
    /// changed. Only a node with one copy, or with two of which one is new, has any to move.
    fn requeue_copies(&mut self, node: u32) {
        if node == NIL {
            return;
        }
        let spare = self.index.can_spare_copy(node);
        let ends = [self.index.first_copy(node), self.index.last_copy(node)];
        for copy in ends.into_iter().flatten() {
            self.pool.requeue(copy, spare);
        }
    }
}
