//! Random operations against a naive model.
//!
//! The model knows content as a namespace and *all* tokens from the start of the prompt to the
//! end of the block. It has no nodes, links, queues or hashes: everything is answered by
//! searching all blocks, so it shares no mistake with the allocator.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, DefaultHasher, Hasher};

use candle_paged_attn::Error;
use candle_paged_attn::block::{
    BlockAllocator, BlockId, BlockTable, Counts, Lru, Namespace, NodeId,
};
use proptest::prelude::*;

#[path = "compare.rs"]
mod compare;

/// SipHash with all but some bits cut off.
#[derive(Debug, Clone, Copy)]
pub struct Masked(pub u64);

pub struct MaskedHasher(DefaultHasher, u64);

impl BuildHasher for Masked {
    type Hasher = MaskedHasher;
    fn build_hasher(&self) -> MaskedHasher {
        MaskedHasher(DefaultHasher::new(), self.0)
    }
}

impl Hasher for MaskedHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }
    fn finish(&self) -> u64 {
        self.0.finish() & self.1
    }
}

type Path = (usize, Vec<u32>);

#[derive(Debug, Clone)]
enum Op {
    Allocate(usize),
    /// Look up, acquire hits and fresh blocks, register the full ones: a sequence.
    Run {
        ns: usize,
        tokens: Vec<u32>,
        max_hits: usize,
        fresh_more: usize,
    },
    /// Ends a sequence, releasing last first or first first.
    End {
        sequence: usize,
        backwards: bool,
    },
    /// Releases the first block that a sequence still holds.
    Slide(usize),
    /// Adds a reference to every block of a sequence: a second sequence.
    Fork(usize),
    AcquireAny {
        blocks: Vec<usize>,
        fresh: usize,
    },
    Retain(usize),
    Release(usize),
    Register {
        ns: usize,
        parent: Option<usize>,
        tokens: Vec<u32>,
        block: usize,
    },
    Pin(usize),
    Unpin(usize),
    Clear,
}

const NAMESPACES: usize = 2;
const MAX_BLOCKS: usize = 9;

fn op() -> impl Strategy<Value = Op> {
    let tokens = || prop::collection::vec(0..2u32, 0..12);
    let any = || 0..64usize;
    prop_oneof![
        2 => (0..4usize).prop_map(Op::Allocate),
        8 => (0..NAMESPACES, tokens(), 0..6usize, 0..2usize).prop_map(
            |(ns, tokens, max_hits, fresh_more)| Op::Run { ns, tokens, max_hits, fresh_more }
        ),
        6 => (any(), prop::bool::weighted(0.8)).prop_map(
            |(sequence, backwards)| Op::End { sequence, backwards }
        ),
        4 => any().prop_map(Op::Slide),
        1 => any().prop_map(Op::Fork),
        1 => (prop::collection::vec(0..MAX_BLOCKS + 1, 0..5), 0..4usize).prop_map(
            |(blocks, fresh)| Op::AcquireAny { blocks, fresh }
        ),
        1 => (0..MAX_BLOCKS + 1).prop_map(Op::Retain),
        2 => (0..MAX_BLOCKS + 1).prop_map(Op::Release),
        3 => (0..NAMESPACES, prop::option::of(any()), tokens(), 0..MAX_BLOCKS + 1).prop_map(
            |(ns, parent, tokens, block)| Op::Register { ns, parent, tokens, block }
        ),
        1 => any().prop_map(Op::Pin),
        1 => any().prop_map(Op::Unpin),
        1 => prop::bool::weighted(0.1).prop_map(|yes| if yes { Op::Clear } else { Op::Slide(0) }),
    ]
}

/// The allocator under test beside the model of what it should be.
struct Twin {
    real: BlockAllocator<Masked>,
    block_size: usize,
    namespaces: Vec<Namespace>,
    /// Every id, from a pool large enough to have it.
    ids: Vec<BlockId>,
    refs: Vec<u32>,
    key: Vec<Option<Path>>,
    /// What the K/V rows of a block were computed from; nothing for a block just handed out.
    memory: Vec<Option<Path>>,
    idle_since: Vec<usize>,
    clock: usize,
    evictions: u64,
    /// Every node id ever seen, and what it stood for.
    nodes: Vec<(NodeId, Path)>,
    findable: BTreeMap<NodeId, Path>,
    /// The same, as a listener to events knows it.
    heard: BTreeMap<NodeId, Path>,
    own_pins: BTreeMap<NodeId, u32>,
    sequences: Vec<BlockTable>,
    /// How often each block was registered.
    registered: Vec<usize>,
    stamps: BTreeMap<u64, (usize, usize, Option<Path>)>,
}

impl Twin {
    fn new(num_blocks: usize, block_size: usize, mask: u64) -> Self {
        let lru = Box::new(Lru);
        let mut real =
            BlockAllocator::with_policy_and_hasher(num_blocks, block_size, lru, Masked(mask))
                .unwrap();
        real.record_events(true);
        let mut ids = Vec::new();
        BlockAllocator::new(MAX_BLOCKS + 1, 1)
            .unwrap()
            .allocate(MAX_BLOCKS + 1, &mut ids)
            .unwrap();
        Self {
            real,
            block_size,
            namespaces: vec![
                Namespace::default(),
                Namespace::default().with_adapter("a", 1),
            ],
            ids,
            refs: vec![0; num_blocks],
            key: vec![None; num_blocks],
            memory: vec![None; num_blocks],
            idle_since: vec![0; num_blocks],
            clock: 0,
            evictions: 0,
            nodes: Vec::new(),
            findable: BTreeMap::new(),
            heard: BTreeMap::new(),
            own_pins: BTreeMap::new(),
            sequences: Vec::new(),
            registered: vec![0; num_blocks],
            stamps: BTreeMap::new(),
        }
    }

    fn copies(&self, path: &Path) -> Vec<usize> {
        let is_copy = |b: &usize| self.key[*b].as_ref() == Some(path);
        (0..self.key.len()).filter(is_copy).collect()
    }

    fn is_free(&self, block: usize) -> bool {
        self.refs[block] == 0 && self.key[block].is_none()
    }

    fn is_idle(&self, block: usize) -> bool {
        self.refs[block] == 0 && self.key[block].is_some()
    }

    fn counts(&self) -> Counts {
        let count = |f: &dyn Fn(usize) -> bool| (0..self.refs.len()).filter(|&b| f(b)).count();
        Counts {
            free: count(&|b| self.is_free(b)),
            idle: count(&|b| self.is_idle(b)),
            referenced: count(&|b| self.refs[b] > 0),
        }
    }

    fn extends(longer: &Path, path: &Path) -> bool {
        longer.0 == path.0 && longer.1.len() > path.1.len() && longer.1.starts_with(&path.1)
    }

    /// The idle block to give way: oldest of those that nothing depends on, or else the
    /// youngest.
    fn victim(&self) -> usize {
        let idle: Vec<usize> = (0..self.refs.len()).filter(|&b| self.is_idle(b)).collect();
        let spare = |b: &&usize| {
            let path = self.key[**b].as_ref().unwrap();
            let mut keys = self.key.iter().flatten();
            self.copies(path).len() > 1 || !keys.any(|key| Self::extends(key, path))
        };
        let oldest = idle
            .iter()
            .filter(spare)
            .min_by_key(|b| self.idle_since[**b]);
        let youngest = || idle.iter().max_by_key(|b| self.idle_since[**b]);
        *oldest.or_else(youngest).unwrap()
    }

    fn evict(&mut self, block: usize) {
        let path = self.key[block].take().unwrap();
        self.evictions += 1;
        if !self.copies(&path).is_empty() {
            return;
        }
        for key in &mut self.key {
            if key.as_ref().is_some_and(|key| Self::extends(key, &path)) {
                *key = None;
                self.evictions += 1;
            }
        }
        let gone = |p: &Path| *p == path || Self::extends(p, &path);
        self.findable.retain(|_, p| !gone(p));
    }

    /// Checks blocks that the allocator has handed out against the order of supply.
    fn supplied(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            let got = block.index();
            if (0..self.refs.len()).any(|b| self.is_free(b)) {
                assert!(
                    self.is_free(got),
                    "{got} supplied though there is a free block"
                );
            } else {
                assert_eq!(got, self.victim());
                self.evict(got);
            }
            self.refs[got] = 1;
            self.memory[got] = None;
        }
    }

    fn unref(&mut self, block: usize) {
        self.refs[block] -= 1;
        self.clock += 1;
        self.idle_since[block] = self.clock;
    }

    /// Leading full blocks of `tokens` that can be found.
    fn run_length(&self, ns: usize, tokens: &[u32]) -> usize {
        let full = tokens.len() / self.block_size;
        let found = |n: &usize| {
            let path = (ns, tokens[..n * self.block_size].to_vec());
            !self.copies(&path).is_empty()
        };
        (1..=full).take_while(found).count()
    }

    /// Looks up and compares with the model, block by block.
    fn lookup(&self, ns: usize, tokens: &[u32], max: usize) -> Vec<(NodeId, BlockId)> {
        let hits = self.real.lookup(&self.namespaces[ns], tokens, max);
        assert_eq!(hits.len(), self.run_length(ns, tokens).min(max));
        for (i, hit) in hits.iter().enumerate() {
            let path = (ns, tokens[..(i + 1) * self.block_size].to_vec());
            let block = hit.block.index();
            let copies = self.copies(&path);
            assert!(copies.contains(&block), "foreign hit");
            assert_eq!(self.memory[block].as_ref(), Some(&path), "foreign K/V");
            assert_eq!(self.findable.get(&hit.node), Some(&path));
            let used = copies.iter().any(|&copy| self.refs[copy] > 0);
            assert_eq!(self.refs[block] > 0, used, "a copy in use comes first");
        }
        hits.iter().map(|hit| (hit.node, hit.block)).collect()
    }

    fn allocate(&mut self, n: usize) -> Option<Vec<BlockId>> {
        self.acquire(&[], n, true)
    }

    /// `None` when it does not fit.
    fn acquire(&mut self, hits: &[BlockId], fresh: usize, plain: bool) -> Option<Vec<BlockId>> {
        let distinct: BTreeSet<usize> = hits.iter().map(|b| b.index()).collect();
        let counts = self.counts();
        let idle_hits = distinct.iter().filter(|&&b| self.is_idle(b)).count();
        let room = counts.free + counts.idle - idle_hits;
        let mut out = Vec::new();
        let result = if plain {
            self.real.allocate(fresh, &mut out)
        } else {
            self.real.acquire(hits, fresh, &mut out)
        };
        if fresh > room {
            assert!(matches!(
                result,
                Err(Error::OutOfBlocks { needed, free, .. }) if needed == fresh && free == room
            ));
            assert!(out.is_empty());
            return None;
        }
        result.unwrap();
        for hit in hits {
            self.refs[hit.index()] += 1;
        }
        assert_eq!(out.len(), fresh);
        self.supplied(&out);
        Some(out)
    }

    fn release(&mut self, block: BlockId) {
        self.real.release(block).unwrap();
        self.unref(block.index());
    }

    fn register(
        &mut self,
        ns: usize,
        parent: Option<NodeId>,
        tokens: &[u32],
        block: BlockId,
    ) -> Option<NodeId> {
        let got = self
            .real
            .register(&self.namespaces[ns], parent, tokens, block)
            .unwrap();
        let mut path = match parent {
            None => (ns, Vec::new()),
            Some(id) => match self.findable.get(&id) {
                Some(path) => path.clone(),
                None => {
                    assert_eq!(got, None);
                    return None;
                }
            },
        };
        path.1.extend(tokens);
        let node = got.expect("the parent is findable");
        match self.findable.iter().find(|(_, p)| **p == path) {
            Some((known, _)) => assert_eq!(node, *known, "equal content is one node"),
            None => {
                let fresh = self.nodes.iter().all(|(old, _)| *old != node);
                assert!(fresh, "node ids are never reused");
                self.findable.insert(node, path.clone());
                self.nodes.push((node, path.clone()));
            }
        }
        self.registered[block.index()] += 1;
        self.memory[block.index()] = Some(path.clone());
        self.key[block.index()] = Some(path);
        Some(node)
    }

    fn run(&mut self, ns: usize, tokens: &[u32], max_hits: usize, fresh_more: usize) {
        let hits = self.lookup(ns, tokens, max_hits);
        let blocks: Vec<BlockId> = hits.iter().map(|hit| hit.1).collect();
        let full = tokens.len() / self.block_size;
        let fresh = full - hits.len() + fresh_more;
        let Some(new) = self.acquire(&blocks, fresh, false) else {
            return;
        };
        let mut table = BlockTable::new();
        blocks.iter().for_each(|&block| table.push(block));
        let mut parent = hits.last().map(|hit| hit.0);
        let chunks = tokens.chunks_exact(self.block_size).skip(hits.len());
        for (chunk, &block) in chunks.zip(&new) {
            parent = self.register(ns, parent, chunk, block);
            assert!(parent.is_some(), "the whole prefix is referenced");
        }
        new.iter().for_each(|&block| table.push(block));
        self.sequences.push(table);
    }

    fn register_any(&mut self, ns: usize, parent: Option<usize>, tokens: &[u32], block: usize) {
        let parent = parent
            .filter(|_| !self.nodes.is_empty())
            .map(|i| self.nodes[i % self.nodes.len()].0);
        let id = self.ids[block];
        let tokens = &tokens[..tokens.len().min(self.block_size)];
        let known = block < self.refs.len();
        let of_parent = parent.and_then(|id| self.findable.get(&id));
        let foreign = of_parent.is_some_and(|path| path.0 != ns);
        let can = known && self.refs[block] > 0 && self.key[block].is_none() && !foreign;
        if can && tokens.len() == self.block_size {
            self.register(ns, parent, tokens, id);
            return;
        }
        let result = self.real.register(&self.namespaces[ns], parent, tokens, id);
        match result {
            Err(Error::StaleHandle { .. }) => assert!(known && self.refs[block] == 0),
            Err(Error::InvalidArgument { .. }) => {
                assert!(!known || self.refs[block] > 0);
            }
            other => unreachable!("{other:?}"),
        }
    }

    /// Whether a block has a reference that no sequence and no pin holds.
    fn loose(&self, block: usize) -> bool {
        let id = self.ids[block];
        let held = self.sequences.iter().flat_map(BlockTable::blocks);
        let held = held.filter(|b| **b == id).count() as u32 + self.real.pin_count(id);
        self.refs[block] > held
    }

    fn pin(&mut self, node: NodeId) {
        let Some(path) = self.findable.get(&node).cloned() else {
            assert!(matches!(
                self.real.pin(node),
                Err(Error::StaleHandle { .. })
            ));
            assert!(matches!(
                self.real.unpin(node),
                Err(Error::StaleHandle { .. })
            ));
            return;
        };
        self.real.pin(node).unwrap();
        *self.own_pins.entry(node).or_default() += 1;
        for end in (self.block_size..=path.1.len()).step_by(self.block_size) {
            let ancestor = (path.0, path.1[..end].to_vec());
            let pinned = self.pinned_copy(&ancestor);
            let copies = self.copies(&ancestor);
            let used = copies.iter().any(|&copy| self.refs[copy] > 0);
            assert_eq!(self.refs[pinned] > 0, used, "a copy in use is pinned first");
            self.refs[pinned] += 1;
        }
    }

    /// The one copy that holds the pins of a path.
    fn pinned_copy(&self, path: &Path) -> usize {
        let is_pinned = |b: &usize| self.real.pin_count(self.ids[*b]) > 0;
        let mut pinned = self.copies(path).into_iter().filter(is_pinned);
        let copy = pinned.next().unwrap();
        assert_eq!(pinned.next(), None, "pins hold one copy");
        copy
    }

    fn unpin(&mut self, node: NodeId) {
        let count = self.own_pins.get(&node).copied().unwrap_or(0);
        let Some(path) = self.findable.get(&node).cloned() else {
            assert_eq!(count, 0, "a pinned node stays findable");
            return;
        };
        if count == 0 {
            let result = self.real.unpin(node);
            assert!(matches!(result, Err(Error::InvalidArgument { .. })));
            return;
        }
        // Last first, the order in which the references go back.
        let blocks = path.1.len() / self.block_size;
        let copies: Vec<usize> = (1..=blocks)
            .rev()
            .map(|n| self.pinned_copy(&(path.0, path.1[..n * self.block_size].to_vec())))
            .collect();
        self.real.unpin(node).unwrap();
        copies.into_iter().for_each(|copy| self.unref(copy));
        self.own_pins.insert(node, count - 1);
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Allocate(n) => {
                self.allocate(*n);
            }
            Op::Run {
                ns,
                tokens,
                max_hits,
                fresh_more,
            } => self.run(*ns, tokens, *max_hits, *fresh_more),
            Op::End {
                sequence,
                backwards,
            } if !self.sequences.is_empty() => {
                let at = sequence % self.sequences.len();
                let mut table = self.sequences.swap_remove(at);
                let blocks: Vec<BlockId> = match backwards {
                    true => table.truncate_to(0).collect(),
                    false => table.release_front(usize::MAX).to_vec(),
                };
                assert!(table.is_empty());
                blocks.into_iter().for_each(|block| self.release(block));
            }
            Op::Slide(sequence) if !self.sequences.is_empty() => {
                let at = sequence % self.sequences.len();
                let table = &mut self.sequences[at];
                let behind = table.release_front(table.first_block() + 1).to_vec();
                behind.into_iter().for_each(|block| self.release(block));
            }
            Op::Fork(sequence) if !self.sequences.is_empty() => {
                let fork = self.sequences[sequence % self.sequences.len()].clone();
                for &block in fork.blocks() {
                    self.real.retain(block).unwrap();
                    self.refs[block.index()] += 1;
                }
                self.sequences.push(fork);
            }
            Op::End { .. } | Op::Slide(_) | Op::Fork(_) => {}
            Op::AcquireAny { blocks, fresh } => {
                let hits: Vec<BlockId> = blocks.iter().map(|&b| self.ids[b]).collect();
                let total = self.refs.len();
                if let Some(&bad) = blocks.iter().find(|&&b| b >= total || self.is_free(b)) {
                    let result = self.real.acquire(&hits, *fresh, &mut Vec::new());
                    match result {
                        Err(Error::InvalidArgument { .. }) => assert!(bad >= total),
                        Err(Error::StaleHandle { .. }) => assert!(bad < total),
                        other => unreachable!("{other:?}"),
                    }
                } else {
                    self.acquire(&hits, *fresh, false);
                }
            }
            Op::Retain(block) => {
                let result = self.real.retain(self.ids[*block]);
                if *block >= self.refs.len() {
                    assert!(matches!(result, Err(Error::InvalidArgument { .. })));
                } else if self.is_free(*block) {
                    assert!(matches!(result, Err(Error::StaleHandle { .. })));
                } else {
                    result.unwrap();
                    self.refs[*block] += 1;
                }
            }
            Op::Release(block) => {
                let id = self.ids[*block];
                if *block >= self.refs.len() {
                    let result = self.real.release(id);
                    assert!(matches!(result, Err(Error::InvalidArgument { .. })));
                } else if self.refs[*block] == 0 {
                    let result = self.real.release(id);
                    assert!(matches!(result, Err(Error::StaleHandle { .. })));
                } else if self.loose(*block) {
                    self.release(id);
                }
            }
            Op::Register {
                ns,
                parent,
                tokens,
                block,
            } => self.register_any(*ns, *parent, tokens, *block),
            Op::Pin(node) if !self.nodes.is_empty() => {
                self.pin(self.nodes[node % self.nodes.len()].0);
            }
            Op::Unpin(node) if !self.nodes.is_empty() => {
                self.unpin(self.nodes[node % self.nodes.len()].0);
            }
            Op::Pin(_) | Op::Unpin(_) => {}
            Op::Clear => {
                self.real.clear();
                self.refs.fill(0);
                self.key.fill(None);
                self.findable.clear();
                self.own_pins.clear();
                self.sequences.clear();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 10_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_agree_with_the_model(
        num_blocks in 1..=MAX_BLOCKS,
        block_size in prop::sample::select(vec![1usize, 2, 4]),
        mask in prop::sample::select(vec![u64::MAX, 1, 0]),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut twin = Twin::new(num_blocks, block_size, mask);
        for op in &ops {
            twin.apply(op);
            twin.compare();
        }
    }
}
