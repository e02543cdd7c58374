//! Reuse of parts of blocks, and deduplication of full ones.

use candle_paged_attn::block::{Event, Namespace};
use candle_paged_attn::cache::{AddOptions, CacheConfig, Feed, PagedKvCache};

use super::{assert_rows, configured, full, hits, prompt, range, run, run_seeded};

fn sub_block(blocks: usize, windows: &[Option<usize>]) -> PagedKvCache {
    let config = CacheConfig::blocks(blocks).with_block_size(4);
    configured(config.with_sub_block_reuse(), windows)
}

fn deduplicating(blocks: usize) -> PagedKvCache {
    let config = CacheConfig::blocks(blocks).with_block_size(4);
    configured(config.with_deduplication(), &[None])
}

#[test]
fn a1_with_sub_block_reuse_all_but_one_token_is_cached() {
    let cache = sub_block(16, &[None]);
    for (len, cached) in [(8, 7), (4, 3)] {
        let tokens: Vec<u32> = (0..len).map(|i| i + 100 * len).collect();
        let (first, cold) = prompt(&cache, &tokens);
        assert_eq!(cold, 0);
        cache.remove(first).unwrap();
        let added = cache.add(&tokens, AddOptions::default()).unwrap();
        let (second, warm) = (added.id, added.cached_tokens);
        assert_eq!(warm, cached);
        let plan = cache.plan(&[Feed::new(second, &tokens[warm..])]).unwrap();
        assert_eq!(plan.positions(), [warm as u32]);
        drop(plan);
        run(&cache, second, &tokens[warm..]);
        assert_rows(&cache, second, 0);
        cache.remove(second).unwrap();
        // Still findable: a longer prompt finds every full block.
        let longer: Vec<u32> = tokens.iter().copied().chain([9999]).collect();
        assert_eq!(hits(&cache, &longer), len as usize);
    }
    assert_eq!(cache.counters().partial_hits, 2);
    assert_eq!(cache.counters().cached_tokens, 7 + 3);
}

#[test]
fn the_block_that_is_copied_stays_as_it_is() {
    let cache = sub_block(16, &[None]);
    let (first, _) = prompt(&cache, &range(8));
    // Six tokens in common: four of a full block and two of the next.
    let tokens = [0, 1, 2, 3, 4, 5, 60, 70, 80];
    let before = cache.block_table(first, 0).unwrap();
    let (second, cached) = prompt(&cache, &tokens);
    assert_eq!(cached, 6);
    let table = cache.block_table(second, 0).unwrap().1;
    assert_eq!(table[0], before.1[0]);
    assert_ne!(table[1], before.1[1]);
    run(&cache, second, &[81]);
    assert_rows(&cache, first, 0);
    assert_rows(&cache, second, 0);
    assert_eq!(cache.block_table(first, 0).unwrap(), before);
    // Copied once, when it was added; its first write needs no copy.
    assert_eq!(cache.counters().copies, 0);
    assert_eq!(cache.usage()[0].blocks_used, 4);
}

#[test]
fn the_block_with_the_most_equal_tokens_is_taken() {
    let cache = sub_block(32, &[None]);
    for tail in [[4, 50, 51, 52], [4, 5, 6, 53], [4, 5, 54, 55]] {
        let tokens: Vec<u32> = range(4).into_iter().chain(tail).collect();
        let (id, _) = prompt(&cache, &tokens);
        cache.remove(id).unwrap();
    }
    let salted = || AddOptions::default().with_namespace(Namespace::default().with_salt("x"));
    let added = cache.add(&range(9), salted()).unwrap();
    assert_eq!(added.cached_tokens, 0);
    run_seeded(&cache, &[(added.id, &range(9), 1)]);

    let (id, cached) = prompt(&cache, &range(9));
    assert_eq!(cached, 7);
    assert_rows(&cache, id, 0);
    let other = cache.add(&range(12), salted()).unwrap();
    assert_eq!(other.cached_tokens, 8);
    let unread = AddOptions::default().without_prefix_reads();
    assert_eq!(cache.add(&range(9), unread).unwrap().cached_tokens, 0);
    assert_eq!(hits(&cache, &[0, 1, 9, 9]), 2);
    assert_eq!(hits(&cache, &[9, 0, 1, 2]), 0);
}

#[test]
fn without_room_for_the_copy_full_blocks_are_reused() {
    for (blocks, cached) in [(2, 4), (3, 7)] {
        let cache = sub_block(blocks, &[None]);
        let (first, _) = prompt(&cache, &range(8));
        cache.remove(first).unwrap();
        let cost = cache.cost(&range(8), &AddOptions::default());
        assert_eq!(cost.cached_tokens, cached);
        assert!(cost.fits());
        let (second, got) = prompt(&cache, &range(8));
        assert_eq!(got, cached);
        assert_rows(&cache, second, 0);
    }
    // The only block that could be evicted for the copy is the one to copy from.
    let cache = sub_block(2, &[None]);
    let (first, _) = prompt(&cache, &range(4));
    let (held, _) = prompt(&cache, &[90]);
    cache.remove(first).unwrap();
    assert_eq!(hits(&cache, &range(4)), 0);
    cache.remove(held).unwrap();
    assert_eq!(hits(&cache, &range(4)), 3);
}

#[test]
fn another_idle_block_gives_way_to_the_copy() {
    let cache = sub_block(3, &[None]);
    // The source is the least recently used: it would be evicted first if it were not held.
    for tokens in [range(4), vec![50, 51, 52, 53], vec![60, 61, 62, 63]] {
        let (id, _) = prompt(&cache, &tokens);
        cache.remove(id).unwrap();
    }
    let tokens = [0, 1, 2, 9];
    let (id, cached) = prompt(&cache, &tokens);
    assert_eq!(cached, 3);
    assert_rows(&cache, id, 0);
    assert_eq!(hits(&cache, &[0, 1, 2, 3, 4]), 4);
    assert_eq!(hits(&cache, &[50, 51, 52, 53, 54]), 0);
}

#[test]
fn every_group_serves_the_same_rows() {
    for windows in [&[None, Some(5)][..], &[Some(1), None], &[Some(3)]] {
        let cache = sub_block(16, windows);
        let (first, _) = prompt(&cache, &range(15));
        let tokens = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 78, 79];
        let added = cache.add(&tokens, AddOptions::default()).unwrap();
        assert_eq!(added.cached_tokens, 10, "{windows:?}");
        for (g, group) in cache.spec().groups.iter().enumerate() {
            let held = cache.block_table(added.id, g).unwrap().1.len();
            assert_eq!(held, group.blocks_held(10, 4));
        }
        cache.check_invariants().unwrap();
        run(&cache, added.id, &tokens[10..]);
        assert_rows(&cache, added.id, 0);
        assert_rows(&cache, first, 0);
    }
}

#[test]
fn the_group_that_has_least_decides() {
    for windows in [[None, Some(4)], [Some(4), None]] {
        let cache = sub_block(6, &windows);
        for tail in [[4, 5, 6, 7], [4, 50, 51, 52]] {
            let tokens: Vec<u32> = range(4).into_iter().chain(tail).collect();
            let (id, _) = prompt(&cache, &tokens);
            cache.remove(id).unwrap();
        }
        // 16 tokens in steps of a block: the window needs three blocks at most, the full
        // layers a fourth, which the block of 4, 5, 6, 7 gives way to.
        let unindexed = AddOptions::default().unindexed();
        let long = cache.add(&[700], unindexed).unwrap().id;
        for step in 0..4 {
            run(&cache, long, &[700 + step, 0, 0, 0]);
        }
        let removed = cache.take_events();
        let removed = removed
            .iter()
            .filter(|(_, e)| matches!(e, Event::Removed { .. }));
        let groups: Vec<usize> = removed.map(|(group, _)| *group).collect();
        let full = windows.iter().position(Option::is_none).unwrap();
        assert_eq!(groups, [full]);
        // While it lives, the full layers have no block for a copy.
        let tokens = [0, 1, 2, 3, 4, 5, 6, 9, 9];
        assert_eq!(hits(&cache, &tokens), 4, "{windows:?}");
        cache.remove(long).unwrap();
        assert_eq!(hits(&cache, &tokens), 5, "{windows:?}");
        let (id, cached) = prompt(&cache, &tokens);
        assert_eq!(cached, 5);
        assert_rows(&cache, id, 0);
    }
}

#[test]
fn a3_deduplicated_at_commit() {
    for (cache, blocks) in [(deduplicating(16), 2), (full(4, 16), 4)] {
        let tokens = range(8);
        let a = cache.add(&tokens, AddOptions::default()).unwrap();
        let b = cache.add(&tokens, AddOptions::default()).unwrap();
        assert_eq!((a.cached_tokens, b.cached_tokens), (0, 0));
        run_seeded(&cache, &[(a.id, &tokens, 0), (b.id, &tokens, 0)]);
        assert_eq!(cache.usage()[0].blocks_used, blocks);
        assert_eq!(cache.counters().deduplicated, 4 - blocks as u64);
        let stored = |(_, event): &(usize, Event)| matches!(event, Event::Stored { .. });
        assert_eq!(cache.take_events().iter().filter(|e| stored(e)).count(), 2);
        for (id, token) in [(a.id, 8), (b.id, 9)] {
            run(&cache, id, &[token]);
        }
        assert_rows(&cache, a.id, 0);
        assert_rows(&cache, b.id, 0);
        cache.remove(a.id).unwrap();
        assert_rows(&cache, b.id, 0);
        assert_eq!(prompt(&cache, &tokens).1, 4);
    }
}

#[test]
fn forks_that_write_the_same_share_again() {
    let cache = deduplicating(16);
    let (parent, _) = prompt(&cache, &range(6));
    let child = cache.fork(parent).unwrap();
    // One step: the first copies the shared block, the second writes in place, both fill it
    // with the same tokens and go on.
    run_seeded(&cache, &[(parent, &[6, 7, 8], 0), (child, &[6, 7, 9], 0)]);
    assert_eq!(cache.counters().copies, 1);
    assert_eq!(cache.counters().deduplicated, 1);
    let tables = [parent, child].map(|id| cache.block_table(id, 0).unwrap().1);
    assert_eq!(tables[0][..2], tables[1][..2]);
    assert_ne!(tables[0][2], tables[1][2]);
    assert_eq!(cache.usage()[0].blocks_used, 4);
    assert_rows(&cache, parent, 0);
    assert_rows(&cache, child, 0);
}

#[test]
fn a_rewound_sequence_takes_its_old_block_back() {
    let cache = deduplicating(16);
    let (id, _) = prompt(&cache, &range(9));
    let before = cache.block_table(id, 0).unwrap().1;
    cache.truncate(id, 5).unwrap();
    run(&cache, id, &[5, 6, 7]);
    assert_eq!(cache.block_table(id, 0).unwrap().1, before[..2]);
    assert_rows(&cache, id, 0);
    assert_eq!(cache.usage()[0].blocks_cached, 0);
}
