//! The allocator beside the naive model: what both must agree in after every operation.

use candle_paged_attn::block::{Event, NodeId};

use super::{Path, Twin};

impl Twin {
    fn hear(&mut self) {
        for event in self.real.take_events() {
            match event {
                Event::Stored {
                    node,
                    parent,
                    namespace,
                    tokens,
                } => {
                    let ns = self.namespaces.iter().position(|n| *n == namespace);
                    let mut path = (ns.unwrap(), Vec::new());
                    if let Some(parent) = parent {
                        path = self.heard[&parent].clone();
                    }
                    path.1.extend(tokens);
                    assert_eq!(self.heard.insert(node, path), None);
                }
                Event::Removed { node } => assert!(self.heard.remove(&node).is_some()),
                Event::Cleared => self.heard.clear(),
                other => unreachable!("{other:?}"),
            }
        }
    }

    pub(super) fn compare(&mut self) {
        self.real.check_invariants().unwrap();
        assert_eq!(self.real.counts(), self.counts());
        assert_eq!(self.real.stats().evictions, self.evictions);
        self.hear();
        assert_eq!(self.heard, self.findable);
        for (block, &id) in self.ids[..self.refs.len()].iter().enumerate() {
            assert_eq!(self.real.ref_count(id), self.refs[block]);
            let content = self.real.node_of(id).map(|node| &self.findable[&node]);
            assert_eq!(content, self.key[block].as_ref());
        }
        for block in 0..self.refs.len() {
            self.compare_stamp(block);
        }
        for path in self.key.iter().flatten() {
            let blocks = path.1.len() / self.block_size;
            assert_eq!(self.lookup(path.0, &path.1, usize::MAX).len(), blocks);
        }
        for (node, (ns, path)) in &self.nodes {
            let Some(start) = path.len().checked_sub(self.block_size) else {
                continue;
            };
            // A node that is gone leads nowhere, whatever is asked of it.
            let next = &path[start..];
            let child = self.real.child(&self.namespaces[*ns], Some(*node), next);
            let mut longer = (*ns, path.clone());
            longer.1.extend(next);
            let expected = self.findable.contains_key(node) && !self.copies(&longer).is_empty();
            assert_eq!(child.is_some(), expected);
            for parent in [None, Some(*node)] {
                self.compare_closest(*ns, parent, path);
                self.compare_closest(*ns, parent, &[1, 1, 0, 1]);
            }
        }
    }

    /// The longest common run of `tokens` with any findable content right after `parent`.
    fn compare_closest(&self, ns: usize, parent: Option<NodeId>, tokens: &[u32]) {
        let before = match parent {
            None => Some(Vec::new()),
            Some(node) => self.findable.get(&node).map(|path| path.1.clone()),
        };
        let shared = |path: &Path| {
            let before = before.as_ref()?;
            let after = path.1.strip_prefix(before.as_slice())?;
            let is_child = path.0 == ns && after.len() == self.block_size;
            let run = after.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            (is_child && run > 0).then_some(run)
        };
        let expected = self.findable.values().filter_map(shared).max();
        let got = self
            .real
            .closest_child(&self.namespaces[ns], parent, tokens);
        assert_eq!(got.map(|(_, run)| run), expected);
        if let Some((hit, run)) = got {
            let path = &self.findable[&hit.node];
            assert_eq!(shared(path), Some(run));
            assert_eq!(self.memory[hit.block.index()].as_ref(), Some(path));
        }
    }

    /// A block keeps its stamp as long as it stays the copy it is; no stamp comes back.
    fn compare_stamp(&mut self, block: usize) {
        let stamp = self.real.stamp(self.ids[block]);
        assert_eq!(stamp.is_some(), self.key[block].is_some());
        let Some(stamp) = stamp else { return };
        let (registration, content) = (self.registered[block], self.memory[block].clone());
        let named = (block, registration, content);
        let known = self.stamps.entry(stamp).or_insert_with(|| named.clone());
        assert_eq!(*known, named, "one stamp names one content of one block");
    }
}
