//! Order of supply, pins, policies, refusals.

use candle_paged_attn::Error;
use candle_paged_attn::block::{
    BlockAllocator, BlockId, Candidate, Counts, Event, EvictionPolicy, Namespace,
};

use super::{found, register, release, take};

const NONE: fn() -> Namespace = Namespace::default;

/// Stores one-token prompts, a block each, and lets them become idle in that order.
fn store(blocks: &mut BlockAllocator, tokens: &[u32]) -> Vec<BlockId> {
    let table = take(blocks, tokens.len());
    for (token, &block) in tokens.iter().zip(&table) {
        register(blocks, &NONE(), &[*token], &[block]);
        blocks.release(block).unwrap();
    }
    table
}

#[test]
fn a_salt_is_not_printed() {
    let salted = NONE().with_adapter("sql", 3).with_salt("tenant 7");
    let printed = format!("{salted:?}");
    assert!(
        printed.contains("sql") && printed.contains("salt: Some("),
        "{printed}"
    );
    let bytes = format!("{:?}", b"tenant 7");
    for secret in ["tenant", bytes.trim_matches(['[', ']'])] {
        assert!(!printed.contains(secret), "{printed}");
    }
    assert_ne!(
        format!("{:?}", NONE()),
        format!("{:?}", NONE().with_salt(""))
    );
}

#[test]
fn free_blocks_come_first_and_in_turn() {
    let mut blocks = BlockAllocator::new(5, 1).unwrap();
    let table = take(&mut blocks, 5);
    assert_eq!(
        table.iter().map(|b| b.index()).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4]
    );
    register(&mut blocks, &NONE(), &[1], &table[..1]);
    // Block 0 has waited longest, but it is findable.
    for i in [0, 3, 1, 4] {
        blocks.release(table[i]).unwrap();
    }
    let order: Vec<usize> = take(&mut blocks, 4).iter().map(|b| b.index()).collect();
    assert_eq!(order, [3, 1, 4, 0]);
    assert_eq!(blocks.stats().evictions, 1);
}

#[test]
fn least_recently_used_goes_first() {
    let mut blocks = BlockAllocator::new(3, 1).unwrap();
    let table = store(&mut blocks, &[10, 11, 12]);
    // A lookup alone is no use; a sequence is.
    found(&blocks, &NONE(), &[11]);
    blocks.acquire(&table[..1], 0, &mut Vec::new()).unwrap();
    release(&mut blocks, &table[..1]);
    assert_eq!(take(&mut blocks, 3), [table[1], table[2], table[0]]);
}

#[test]
fn a_parent_takes_its_own_place_in_the_queue() {
    // The parent 1 of 1, 2 is used again after 3 and before 4. When 2 is gone, 3 is older.
    let mut blocks = BlockAllocator::new(4, 1).unwrap();
    let chain = take(&mut blocks, 2);
    register(&mut blocks, &NONE(), &[1, 2], &chain);
    release(&mut blocks, &chain);
    let three = store(&mut blocks, &[3]);
    blocks.acquire(&chain[..1], 0, &mut Vec::new()).unwrap();
    release(&mut blocks, &chain[..1]);
    let four = store(&mut blocks, &[4]);
    let order = [chain[1], three[0], chain[0], four[0]];
    assert_eq!(take(&mut blocks, 4), order);
}

/// Keeps what was hit most often.
#[derive(Debug)]
struct FewestHits;

impl EvictionPolicy for FewestHits {
    fn choose(&mut self, candidates: &mut dyn Iterator<Item = Candidate>) -> Option<BlockId> {
        let fewest = candidates.min_by_key(|c| (c.hits, c.last_use));
        fewest.map(|candidate| candidate.block)
    }
}

#[test]
fn another_policy_decides() {
    let mut blocks = BlockAllocator::with_policy(3, 1, Box::new(FewestHits)).unwrap();
    let table = store(&mut blocks, &[10, 11, 12]);
    for (block, hits) in [(0, 2), (2, 1)] {
        for _ in 0..hits {
            let hit = &table[block..block + 1];
            blocks.acquire(hit, 0, &mut Vec::new()).unwrap();
            release(&mut blocks, hit);
        }
    }
    // LRU would take 1, 0, 2.
    assert_eq!(take(&mut blocks, 3), [table[1], table[2], table[0]]);
}

/// Notes what it is offered and answers something else.
#[derive(Debug)]
struct Useless(BlockId, std::sync::mpsc::Sender<Vec<Candidate>>);

impl EvictionPolicy for Useless {
    fn choose(&mut self, candidates: &mut dyn Iterator<Item = Candidate>) -> Option<BlockId> {
        self.1.send(candidates.collect()).unwrap();
        Some(self.0)
    }
}

#[test]
fn a_policy_cannot_break_anything() {
    // A block outside the pool, one in use, and the parent of findable content.
    let ids = take(&mut BlockAllocator::new(9, 1).unwrap(), 9);
    for wrong in [8, 3, 0] {
        let (sender, offered) = std::sync::mpsc::channel();
        let policy = Box::new(Useless(ids[wrong], sender));
        let mut blocks = BlockAllocator::with_policy(4, 1, policy).unwrap();
        let table = take(&mut blocks, 4);
        let nodes = register(&mut blocks, &NONE(), &[5, 6, 7], &table[..3]);
        release(&mut blocks, &table[..3]);
        assert_eq!(take(&mut blocks, 1), table[2..3]);
        blocks.check_invariants().unwrap();
        assert_eq!(blocks.ref_count(table[3]), 1);
        assert_eq!(found(&blocks, &NONE(), &[5, 6, 7]), table[..2]);
        let offered = offered.try_recv().unwrap();
        assert_eq!(offered.len(), 1, "only the leaf is a candidate");
        let leaf = (
            offered[0].block,
            offered[0].node,
            offered[0].hits,
            offered[0].depth,
        );
        assert_eq!(leaf, (table[2], nodes[2], 0, 2));
    }
}

#[test]
fn pinned_prefixes_stay() {
    let mut blocks = BlockAllocator::new(4, 1).unwrap();
    let table = take(&mut blocks, 3);
    let nodes = register(&mut blocks, &NONE(), &[1, 2, 3], &table);
    release(&mut blocks, &table);
    blocks.pin(nodes[1]).unwrap();
    blocks.pin(nodes[1]).unwrap();
    blocks.pin(nodes[0]).unwrap();
    let refs = |blocks: &BlockAllocator| -> Vec<u32> {
        table.iter().map(|&b| blocks.ref_count(b)).collect()
    };
    assert_eq!(refs(&blocks), [3, 2, 0]);
    assert_eq!(blocks.pin_count(table[0]), 3);
    let taken = take(&mut blocks, 2);
    assert_eq!(found(&blocks, &NONE(), &[1, 2, 3]), table[..2]);
    let error = blocks.allocate(1, &mut Vec::new()).unwrap_err();
    assert!(matches!(
        error,
        Error::OutOfBlocks {
            needed: 1,
            free: 0,
            ..
        }
    ));

    let stale = blocks.pin(nodes[2]).unwrap_err();
    assert!(matches!(stale, Error::StaleHandle { kind: "node", .. }));
    blocks.unpin(nodes[1]).unwrap();
    blocks.unpin(nodes[0]).unwrap();
    // The third block has another owner by now.
    assert_eq!(refs(&blocks), [1, 1, 1]);
    // The root is still pinned, but on behalf of its child.
    let not_pinned = blocks.unpin(nodes[0]).unwrap_err();
    assert!(matches!(not_pinned, Error::InvalidArgument { .. }));
    blocks.unpin(nodes[1]).unwrap();
    blocks.check_invariants().unwrap();
    release(&mut blocks, &taken);
    assert_eq!(blocks.available(), 4);
}

#[test]
fn clear_forgets_everything() {
    let mut blocks = BlockAllocator::new(3, 1).unwrap();
    blocks.record_events(true);
    let table = take(&mut blocks, 2);
    let nodes = register(&mut blocks, &NONE(), &[1, 2], &table);
    blocks.pin(nodes[1]).unwrap();
    blocks.record_query(2, 0);
    blocks.take_events();
    blocks.clear();
    blocks.check_invariants().unwrap();
    assert_eq!(blocks.take_events(), [Event::Cleared]);
    let empty = Counts {
        free: 3,
        idle: 0,
        referenced: 0,
    };
    assert_eq!(blocks.counts(), empty);
    assert_eq!(blocks.stats().queried_tokens, 2, "totals go on");
    assert_eq!(found(&blocks, &NONE(), &[1, 2]), []);

    // The same content again is another node, in the same place or not.
    let again = take(&mut blocks, 2);
    assert_eq!(again, table);
    let new = register(&mut blocks, &NONE(), &[1, 2], &again);
    assert!(new.iter().all(|node| !nodes.contains(node)));
    let fresh = take(&mut blocks, 1)[0];
    let lost = blocks.register(&NONE(), Some(nodes[1]), &[3], fresh);
    assert_eq!(lost.unwrap(), None);
    let stale = blocks.unpin(nodes[1]).unwrap_err();
    assert!(matches!(stale, Error::StaleHandle { kind: "node", .. }));
}

#[test]
fn statistics_count_what_was_recorded() {
    let mut blocks = BlockAllocator::new(2, 4).unwrap();
    blocks.lookup(&NONE(), &[1, 2, 3, 4], 1);
    assert_eq!(
        blocks.stats(),
        Default::default(),
        "a lookup counts nothing"
    );
    blocks.record_query(10, 4);
    blocks.record_query(5, 0);
    let stats = blocks.stats();
    let got = (stats.queries, stats.queried_tokens, stats.hit_tokens);
    assert_eq!((got, stats.evictions), ((2, 15, 4), 0));
}

#[test]
fn events_are_recorded_only_when_switched_on() {
    let mut blocks = BlockAllocator::new(2, 1).unwrap();
    store(&mut blocks, &[1]);
    assert_eq!(blocks.take_events(), []);
    blocks.record_events(true);
    store(&mut blocks, &[2]);
    blocks.record_events(true);
    assert_eq!(
        blocks.take_events().len(),
        1,
        "switching on twice loses nothing"
    );
    blocks.record_events(false);
    take(&mut blocks, 2);
    assert_eq!(blocks.take_events(), []);
}

#[test]
fn impossible_pools_are_refused() {
    let too_many = u32::MAX as usize;
    for (num_blocks, block_size, named) in [
        (4, 0, "block_size"),
        (4, 3, "block_size"),
        (4, 512, "block_size"),
        (0, 16, "num_blocks"),
        (too_many, 16, "num_blocks"),
        (usize::MAX, 256, "num_blocks"),
    ] {
        let error = BlockAllocator::new(num_blocks, block_size).unwrap_err();
        let Error::InvalidArgument { what, got, .. } = error else {
            panic!("{error}");
        };
        let given = if named == "block_size" {
            block_size
        } else {
            num_blocks
        };
        assert_eq!((what.as_str(), got), (named, given.to_string()));
    }
}

#[test]
fn refusals_are_typed_and_change_nothing() {
    let foreign = take(&mut BlockAllocator::new(9, 1).unwrap(), 9)[8];
    let mut blocks = BlockAllocator::new(3, 2).unwrap();
    let table = take(&mut blocks, 2);
    let node = register(&mut blocks, &NONE(), &[1, 2], &table)[0];
    let before = format!("{blocks:?}");
    let free = {
        let mut other = BlockAllocator::new(3, 2).unwrap();
        take(&mut other, 3)[2]
    };
    let out = &mut Vec::new();
    let salted = NONE().with_salt("s");
    let invalid = [
        blocks.retain(foreign).unwrap_err(),
        blocks.release(foreign).unwrap_err(),
        blocks.acquire(&[table[0], foreign], 0, out).unwrap_err(),
        blocks
            .register(&NONE(), None, &[3, 4], foreign)
            .unwrap_err(),
        // Registered already.
        blocks
            .register(&NONE(), None, &[3, 4], table[0])
            .unwrap_err(),
        blocks.register(&NONE(), None, &[3], table[1]).unwrap_err(),
        blocks
            .register(&NONE(), None, &[3, 4, 5], table[1])
            .unwrap_err(),
        // The parent is of another namespace.
        blocks
            .register(&salted, Some(node), &[3, 4], table[1])
            .unwrap_err(),
        blocks.unpin(node).unwrap_err(),
    ];
    for error in invalid {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    let stale = [
        blocks.retain(free).unwrap_err(),
        blocks.release(free).unwrap_err(),
        blocks.acquire(&[table[0], free], 0, out).unwrap_err(),
        blocks.register(&NONE(), None, &[3, 4], free).unwrap_err(),
    ];
    for error in stale {
        assert!(
            matches!(&error, Error::StaleHandle { kind: "block", id, .. } if *id == free.to_string()),
            "{error}"
        );
    }
    assert_eq!(blocks.ref_count(foreign), 0);
    assert_eq!(blocks.node_of(foreign), None);
    assert_eq!(format!("{blocks:?}"), before, "nothing has changed");
    // Idle blocks can be retained, not released.
    release(&mut blocks, &table);
    assert!(matches!(
        blocks.release(table[0]),
        Err(Error::StaleHandle { .. })
    ));
    blocks.retain(table[0]).unwrap();
    assert_eq!(blocks.ref_count(table[0]), 1);
}
