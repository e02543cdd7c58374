//! Faults that other systems shipped: each test is named after its case.

use std::collections::HashMap;

use candle_paged_attn::Error;
use candle_paged_attn::block::{
    BlockAllocator, BlockId, BlockTable, Counts, Event, Lru, Namespace,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::model::Masked;
use super::{found, register, release, take};

const NONE: fn() -> Namespace = Namespace::default;

#[test]
fn a2_reused_block_serves_nothing_old() {
    let mut blocks = BlockAllocator::new(1, 4).unwrap();
    let first = take(&mut blocks, 1);
    register(&mut blocks, &NONE(), &[1, 2, 3, 4], &first);
    release(&mut blocks, &first);
    let second = take(&mut blocks, 1);
    assert_eq!(second, first, "the pool has one block");
    register(&mut blocks, &NONE(), &[5, 6, 7, 8], &second);
    release(&mut blocks, &second);
    assert_eq!(found(&blocks, &NONE(), &[1, 2, 3, 4, 9]), []);
    assert_eq!(found(&blocks, &NONE(), &[5, 6, 7, 8, 9]), second);
}

#[test]
fn a2_evicting_the_older_copy_leaves_the_newer() {
    let mut blocks = BlockAllocator::new(2, 4).unwrap();
    let copies = take(&mut blocks, 2);
    let older = register(&mut blocks, &NONE(), &[1, 2, 3, 4], &copies[..1]);
    let newer = register(&mut blocks, &NONE(), &[1, 2, 3, 4], &copies[1..]);
    assert_eq!(older, newer, "equal content is one node");
    blocks.release(copies[0]).unwrap();
    blocks.release(copies[1]).unwrap();
    assert_eq!(take(&mut blocks, 1), copies[..1]);
    assert_eq!(found(&blocks, &NONE(), &[1, 2, 3, 4]), copies[1..]);
    blocks.check_invariants().unwrap();
}

/// 6 hits, 3 of them idle, and 2 free blocks.
fn a4_pool() -> (BlockAllocator, Vec<BlockId>) {
    let mut blocks = BlockAllocator::new(8, 1).unwrap();
    let table = take(&mut blocks, 6);
    register(&mut blocks, &NONE(), &[0, 1, 2, 3, 4, 5], &table);
    for &block in &table[..3] {
        blocks.retain(block).unwrap();
    }
    // Turns the two free blocks round, so that their order is not that of their ids.
    let rest = take(&mut blocks, 2);
    release(&mut blocks, &rest);
    release(&mut blocks, &table);
    (blocks, table)
}

#[test]
fn a4_idle_hits_are_not_available() {
    let (mut blocks, table) = a4_pool();
    let (mut twin, _) = a4_pool();
    let before = Counts {
        free: 2,
        idle: 3,
        referenced: 3,
    };
    assert_eq!(blocks.counts(), before);
    let hits = found(&blocks, &NONE(), &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(hits, table);

    let mut out = Vec::new();
    let error = blocks.acquire(&hits, 3, &mut out).unwrap_err();
    assert!(matches!(
        error,
        Error::OutOfBlocks {
            needed: 3,
            free: 2,
            ..
        }
    ));
    assert_eq!(out, []);
    assert_eq!(blocks.counts(), before);
    let refs: Vec<u32> = table.iter().map(|&b| blocks.ref_count(b)).collect();
    assert_eq!(refs, [1, 1, 1, 0, 0, 0]);
    assert_eq!(found(&blocks, &NONE(), &[0, 1, 2, 3, 4, 5]), table);
    blocks.check_invariants().unwrap();

    // Queues as in a pool where nobody tried: same blocks in the same order.
    let error = blocks.allocate(6, &mut out).unwrap_err();
    assert!(matches!(
        error,
        Error::OutOfBlocks {
            needed: 6,
            free: 5,
            ..
        }
    ));
    assert_eq!(take(&mut blocks, 5), take(&mut twin, 5));

    let (mut blocks, _) = a4_pool();
    blocks.acquire(&hits, 2, &mut out).unwrap();
    let all = Counts {
        free: 0,
        idle: 0,
        referenced: 8,
    };
    assert_eq!(blocks.counts(), all);
    assert_eq!(blocks.ref_count(table[0]), 2);
    assert_eq!(blocks.ref_count(table[5]), 1);
}

#[test]
fn a6_hash_collisions_serve_nothing_foreign() {
    for mask in [0, 1] {
        let lru = Box::new(Lru);
        let mut blocks = BlockAllocator::with_policy_and_hasher(400, 2, lru, Masked(mask)).unwrap();
        let mut rng = StdRng::seed_from_u64(6);
        let mut memory: HashMap<BlockId, Vec<u32>> = HashMap::new();
        let mut prompts = Vec::new();
        for _ in 0..50 {
            let len = rng.random_range(2..16);
            let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(0..3)).collect();
            // Before it is stored, a prompt hits exactly as far as an earlier one agrees.
            let hits = blocks.lookup(&NONE(), &tokens, usize::MAX);
            let agree = |other: &Vec<u32>| {
                let pairs = tokens.chunks_exact(2).zip(other.chunks_exact(2));
                pairs.take_while(|(a, b)| a == b).count()
            };
            let expected = prompts.iter().map(agree).max().unwrap_or(0);
            assert_eq!(hits.len(), expected);
            for (i, hit) in hits.iter().enumerate() {
                assert_eq!(memory[&hit.block], tokens[..2 * (i + 1)]);
            }
            let table = take(&mut blocks, len / 2);
            register(&mut blocks, &NONE(), &tokens, &table);
            for (i, &block) in table.iter().enumerate() {
                memory.insert(block, tokens[..2 * (i + 1)].to_vec());
            }
            prompts.push(tokens);
        }
        blocks.check_invariants().unwrap();
        for tokens in &prompts {
            let hits = found(&blocks, &NONE(), tokens);
            assert_eq!(hits.len(), tokens.len() / 2);
            for (i, block) in hits.iter().enumerate() {
                assert_eq!(memory[block], tokens[..2 * (i + 1)]);
            }
        }
    }
}

#[test]
fn a7_namespaces_do_not_meet() {
    let namespaces = [
        NONE(),
        NONE().with_adapter("X", 0),
        NONE().with_salt("X"),
        NONE().with_adapter("X", 0).with_salt("X"),
        NONE().with_adapter("a", 0).with_salt("bc"),
        NONE().with_adapter("ab", 0).with_salt("c"),
        NONE().with_salt(""),
        NONE().with_content(0),
        NONE().with_content(1),
    ];
    let mut blocks = BlockAllocator::new(2 * namespaces.len(), 2).unwrap();
    let prompt = [1, 2, 3, 4];
    let mut tables = Vec::new();
    for ns in &namespaces {
        assert_eq!(found(&blocks, ns, &prompt), []);
        let table = take(&mut blocks, 2);
        register(&mut blocks, ns, &prompt, &table);
        tables.push(table);
    }
    for (ns, table) in namespaces.iter().zip(&tables) {
        assert_eq!(found(&blocks, &ns.clone(), &prompt), *table);
    }
    // The order of the builder's calls is no part of the key.
    let turned = NONE().with_salt("X").with_adapter("X", 0);
    assert_eq!(found(&blocks, &turned, &prompt), tables[3]);
}

#[test]
fn a8_new_adapter_version_misses() {
    let mut blocks = BlockAllocator::new(4, 2).unwrap();
    let table = take(&mut blocks, 1);
    let version = |v| NONE().with_adapter("lora", v);
    register(&mut blocks, &version(1), &[1, 2], &table);
    assert_eq!(found(&blocks, &version(2), &[1, 2]), []);
    assert_eq!(found(&blocks, &version(1), &[1, 2]), table);
}

#[test]
fn a11_removed_is_told_at_the_last_copy() {
    let mut blocks = BlockAllocator::new(2, 2).unwrap();
    blocks.record_events(true);
    let a = take(&mut blocks, 1);
    let b = take(&mut blocks, 1);
    let node = register(&mut blocks, &NONE(), &[7, 8], &a)[0];
    register(&mut blocks, &NONE(), &[7, 8], &b);
    let stored = Event::Stored {
        node,
        parent: None,
        namespace: NONE(),
        tokens: vec![7, 8],
    };
    assert_eq!(blocks.take_events(), [stored], "one content, told once");

    release(&mut blocks, &a);
    assert_eq!(take(&mut blocks, 1), a);
    assert_eq!(blocks.take_events(), [], "b still holds it");
    assert_eq!(found(&blocks, &NONE(), &[7, 8]), b);

    release(&mut blocks, &b);
    assert_eq!(take(&mut blocks, 1), b);
    assert_eq!(blocks.take_events(), [Event::Removed { node }]);
    assert_eq!(found(&blocks, &NONE(), &[7, 8]), []);
}

#[test]
fn a12_part_of_a_block_matches_nothing() {
    let mut blocks = BlockAllocator::new(2, 4).unwrap();
    assert_eq!(found(&blocks, &NONE(), &[1, 2, 3]), []);
    let table = take(&mut blocks, 2);
    for part in [&[][..], &[1, 2, 3], &[1, 2, 3, 4, 5]] {
        let error = blocks.register(&NONE(), None, part, table[0]).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    assert!(!blocks.is_keyed(table[0]), "no empty node");
    let node = register(&mut blocks, &NONE(), &[1, 2, 3, 4], &table)[0];
    assert_eq!(found(&blocks, &NONE(), &[1, 2, 3]), []);
    assert_eq!(found(&blocks, &NONE(), &[1, 2, 3, 4, 5, 6, 7]), table[..1]);
    assert_eq!(blocks.child(&NONE(), Some(node), &[]), None);

    let mut blocks = BlockAllocator::new(1, 64).unwrap();
    let table = take(&mut blocks, 1);
    let prompt: Vec<u32> = (0..64).collect();
    register(&mut blocks, &NONE(), &prompt, &table);
    assert_eq!(found(&blocks, &NONE(), &prompt[..63]), []);
    assert_eq!(found(&blocks, &NONE(), &prompt), table, "no split");
}

#[test]
fn a13_shared_parents_count_once() {
    let mut blocks = BlockAllocator::new(8, 1).unwrap();
    let a = take(&mut blocks, 4);
    register(&mut blocks, &NONE(), &[1, 2, 3, 4], &a);
    let shared = blocks.lookup(&NONE(), &[1, 2, 5, 6], 3);
    assert_eq!(shared.len(), 2);
    let mut b: Vec<BlockId> = shared.iter().map(|hit| hit.block).collect();
    let mut fresh = Vec::new();
    blocks.acquire(&b, 2, &mut fresh).unwrap();
    let mut parent = Some(shared[1].node);
    for (token, &block) in [5, 6].iter().zip(&fresh) {
        parent = blocks.register(&NONE(), parent, &[*token], block).unwrap();
    }
    b.extend(fresh);
    let step = |blocks: &BlockAllocator, free, idle, referenced| {
        let counts = Counts {
            free,
            idle,
            referenced,
        };
        assert_eq!(blocks.counts(), counts);
        assert_eq!(blocks.available(), free + idle);
        blocks.check_invariants().unwrap();
    };
    step(&blocks, 2, 0, 6);
    release(&mut blocks, &a);
    step(&blocks, 2, 2, 4);
    release(&mut blocks, &b);
    step(&blocks, 2, 6, 0);
    take(&mut blocks, 8);
    step(&blocks, 0, 0, 8);
    assert_eq!(found(&blocks, &NONE(), &[1]), []);
}

/// A sequence with a window, as the cache drives it: one token after another, copy-on-write,
/// release behind the window.
#[derive(Clone, Default)]
struct Windowed {
    table: BlockTable,
    len: usize,
}

impl Windowed {
    const BLOCK: usize = 4;
    const WINDOW: usize = 8;

    fn append(&mut self, blocks: &mut BlockAllocator) {
        let logical = self.len / Self::BLOCK;
        match self.table.get(logical) {
            None => self.table.push(take(blocks, 1)[0]),
            Some(shared) if blocks.ref_count(shared) > 1 => {
                let copy = take(blocks, 1)[0];
                assert_eq!(self.table.replace(logical, copy), Some(shared));
                blocks.release(shared).unwrap();
            }
            Some(_) => {}
        }
        self.len += 1;
        // The next query stands at `len` and sees `WINDOW` keys, itself included.
        let first_seen = (self.len + 1).saturating_sub(Self::WINDOW);
        for &block in self.table.release_front(first_seen / Self::BLOCK) {
            blocks.release(block).unwrap();
        }
        blocks.check_invariants().unwrap();
    }

    fn fork(&self, blocks: &mut BlockAllocator) -> Self {
        for &block in self.table.blocks() {
            blocks.retain(block).unwrap();
        }
        self.clone()
    }

    fn remove(mut self, blocks: &mut BlockAllocator) {
        for block in self.table.truncate_to(0) {
            blocks.release(block).unwrap();
        }
        blocks.check_invariants().unwrap();
    }
}

#[test]
fn a16_window_fork_append_remove_leaks_nothing() {
    let mut blocks = BlockAllocator::new(16, 4).unwrap();
    let mut parent = Windowed::default();
    (0..10).for_each(|_| parent.append(&mut blocks));
    assert_eq!(
        parent.table.first_block(),
        0,
        "position 10 sees keys 3..=10"
    );
    assert_eq!(parent.table.len(), 3);
    let mut child = parent.fork(&mut blocks);
    let last = parent.table.get(2).unwrap();
    assert_eq!(blocks.ref_count(last), 2);
    parent.append(&mut blocks);
    assert_eq!(blocks.ref_count(last), 1, "the parent wrote into its copy");
    child.append(&mut blocks);
    assert_eq!(
        child.table.get(2),
        Some(last),
        "the last owner does not copy"
    );
    for _ in 11..17 {
        parent.append(&mut blocks);
        child.append(&mut blocks);
    }
    for sequence in [&parent, &child] {
        assert_eq!(
            sequence.table.first_block(),
            2,
            "position 17 sees keys 10..=17"
        );
        assert_eq!(sequence.table.end(), 5);
    }
    assert_eq!(blocks.counts().referenced, 6);
    parent.remove(&mut blocks);
    child.remove(&mut blocks);
    let counts = Counts {
        free: 16,
        idle: 0,
        referenced: 0,
    };
    assert_eq!(blocks.counts(), counts);
}

#[test]
fn a22_shared_prefix_of_three_blocks() {
    let mut blocks = BlockAllocator::new(10, 16).unwrap();
    let first: Vec<u32> = (0..55).collect();
    let table = take(&mut blocks, 55usize.div_ceil(16));
    assert_eq!(table.len(), 4);
    register(&mut blocks, &NONE(), &first, &table);
    let second: Vec<u32> = (0..48).chain(900..907).collect();
    let hits = found(&blocks, &NONE(), &second);
    assert_eq!(hits, table[..3]);
    let mut fresh = Vec::new();
    blocks.acquire(&hits, 1, &mut fresh).unwrap();
    assert_eq!(fresh.len(), 1);
    assert!(!table.contains(&fresh[0]));
    let refs: Vec<u32> = table.iter().map(|&b| blocks.ref_count(b)).collect();
    assert_eq!(refs, [2, 2, 2, 1]);
    assert_eq!(blocks.counts().referenced, 5);
}

#[test]
fn a25_no_hit_through_a_released_parent() {
    // 40 tokens in 10 blocks of 4, window 8: the next query, at 40, sees keys 33..=40, so
    // blocks 0..8 are behind the window while 8 and 9 are in use.
    let mut blocks = BlockAllocator::new(10, 4).unwrap();
    let prompt: Vec<u32> = (0..40).collect();
    let mut table = BlockTable::new();
    for block in take(&mut blocks, 10) {
        table.push(block);
    }
    let nodes = register(&mut blocks, &NONE(), &prompt, table.blocks());
    let all = table.blocks().to_vec();
    for &block in table.release_front(8) {
        blocks.release(block).unwrap();
        blocks.check_invariants().unwrap();
    }
    assert_eq!(blocks.available(), 8, "released blocks can be had");
    assert_eq!(
        found(&blocks, &NONE(), &prompt),
        all,
        "and found until then"
    );

    // Another prompt takes six of them. The deepest goes first, so what is left is a prefix.
    let other: Vec<u32> = (100..124).collect();
    let reused = take(&mut blocks, 6);
    assert!(reused.iter().all(|block| all[2..8].contains(block)));
    register(&mut blocks, &NONE(), &other, &reused);
    blocks.check_invariants().unwrap();

    assert_eq!(found(&blocks, &NONE(), &prompt), all[..2]);
    assert_eq!(found(&blocks, &NONE(), &other), reused);
    // Blocks 8 and 9 are still right for their sequence, but nobody else may find them.
    for &block in &all[8..] {
        assert_eq!(blocks.ref_count(block), 1);
        assert!(!blocks.is_keyed(block));
    }
    assert_eq!(blocks.child(&NONE(), Some(nodes[7]), &prompt[32..36]), None);
    release(&mut blocks, &reused[5..]);
    let next = take(&mut blocks, 1)[0];
    let lost = blocks.register(&NONE(), Some(nodes[9]), &[40, 41, 42, 43], next);
    assert_eq!(lost.unwrap(), None, "content that cannot be reached");
    let free = blocks.counts().free;
    release(&mut blocks, table.blocks());
    assert_eq!(blocks.counts().free, free + 2, "they return as free blocks");
}
