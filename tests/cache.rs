//! The cache, on rows that say which token and position they are of.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "cache/cases.rs"]
mod cases;
mod common;
#[path = "cache/refusals.rs"]
mod refusals;
#[path = "cache/reuse.rs"]
mod reuse;
#[path = "cache/swap.rs"]
mod swap;
#[path = "cache/windows.rs"]
mod windows;

use candle_core::{DType, Device};
use candle_paged_attn::Error;
use candle_paged_attn::block::{BlockId, Candidate, EvictionPolicy};
use candle_paged_attn::cache::{
    AddOptions, CacheConfig, CacheSpec, Feed, LayerShape, PagedKvCache, SequenceId,
};
use common::toy::{Toy, poison, stored_rows, write_step};

fn cache(block_size: usize, blocks: usize, windows: &[Option<usize>]) -> PagedKvCache {
    configured(
        CacheConfig::blocks(blocks).with_block_size(block_size),
        windows,
    )
}

fn configured(config: CacheConfig, windows: &[Option<usize>]) -> PagedKvCache {
    let shape = |&window| LayerShape {
        window,
        kv_heads: 1,
        k_dim: 8,
        v_dim: 16,
    };
    let shapes: Vec<_> = windows.iter().map(shape).collect();
    let spec = CacheSpec::from_layers(&shapes, DType::F32).unwrap();
    let cache = PagedKvCache::new(&spec, &config.with_events(), &Device::Cpu).unwrap();
    poison(&cache);
    cache
}

fn full(block_size: usize, blocks: usize) -> PagedKvCache {
    cache(block_size, blocks, &[None])
}

/// Feeds `tokens` to a sequence and commits, as a forward pass would.
fn run(cache: &PagedKvCache, id: SequenceId, tokens: &[u32]) {
    run_seeded(cache, &[(id, tokens, 0)]);
}

fn run_seeded(cache: &PagedKvCache, feeds: &[(SequenceId, &[u32], u8)]) {
    let request: Vec<_> = feeds
        .iter()
        .map(|(id, tokens, _)| Feed::new(*id, tokens))
        .collect();
    let plan = cache.plan(&request).unwrap();
    let toys: Vec<_> = feeds
        .iter()
        .map(|(id, new, seed)| {
            let mut tokens = cache.sequence_tokens(*id).unwrap();
            tokens.extend_from_slice(new);
            Toy {
                seed: *seed,
                tokens,
                new: new.len(),
            }
        })
        .collect();
    write_step(&plan, cache, &toys);
    plan.commit().unwrap();
    cache.check_invariants().unwrap();
}

/// Adds a prompt, computes what is not cached, and answers the handle and the cached tokens.
fn prompt(cache: &PagedKvCache, tokens: &[u32]) -> (SequenceId, usize) {
    let added = cache.add(tokens, AddOptions::default()).unwrap();
    run(cache, added.id, &tokens[added.cached_tokens..]);
    (added.id, added.cached_tokens)
}

/// The rows that the cache holds for a sequence are those of its tokens, in every layer.
fn assert_rows(cache: &PagedKvCache, id: SequenceId, seed: u8) {
    let tokens = cache.sequence_tokens(id).unwrap();
    let toy = Toy {
        seed,
        tokens,
        new: 0,
    };
    for (g, group) in cache.spec().groups.iter().enumerate() {
        let from = cache.block_table(id, g).unwrap().0 * cache.block_size();
        for &layer in &group.layers {
            assert_eq!(stored_rows(cache, id, layer), toy.rows(layer, from));
        }
    }
}

/// Leading tokens of a prompt that are cached.
fn hits(cache: &PagedKvCache, tokens: &[u32]) -> usize {
    cache.cost(tokens, &AddOptions::default()).cached_tokens
}

fn range(n: usize) -> Vec<u32> {
    (0..n as u32).collect()
}

#[test]
fn pinned_prefixes_survive_pressure() {
    let cache = full(4, 6);
    let (system, _) = prompt(&cache, &range(9));
    let pin = cache.pin(system).unwrap();
    assert_eq!(pin.tokens, 8);
    cache.remove(system).unwrap();
    for round in 0..5u32 {
        let tokens: Vec<u32> = (0..16).map(|i| 1000 * (round + 1) + i).collect();
        let (id, _) = prompt(&cache, &tokens);
        cache.remove(id).unwrap();
        assert_eq!(
            cache.cost(&range(9), &AddOptions::default()).cached_tokens,
            8
        );
    }
    cache.unpin(pin).unwrap();
    let (id, _) = prompt(&cache, &(0..24).map(|i| 90_000 + i).collect::<Vec<_>>());
    assert_eq!(
        cache.cost(&range(9), &AddOptions::default()).cached_tokens,
        0
    );
    cache.remove(id).unwrap();
    assert_eq!(cache.usage()[0].blocks_used, 0);
}

#[test]
fn the_eviction_policy_can_be_replaced() {
    /// Evicts what was used last: the opposite of the default.
    #[derive(Debug)]
    struct MostRecent;
    impl EvictionPolicy for MostRecent {
        fn choose(&mut self, candidates: &mut dyn Iterator<Item = Candidate>) -> Option<BlockId> {
            candidates.last().map(|candidate| candidate.block)
        }
    }
    let spec = CacheSpec::uniform(1, 1, 8, DType::F32).unwrap();
    let config = CacheConfig::blocks(2).with_block_size(4);
    let recent =
        PagedKvCache::with_policy(&spec, &config, &Device::Cpu, || Box::new(MostRecent)).unwrap();
    let default = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap();
    for (cache, kept) in [(recent, 1), (default, 2)] {
        for prompt in 1..=3u32 {
            let tokens = [100 * prompt, 1, 2, 3];
            let id = cache.add(&tokens, AddOptions::default()).unwrap().id;
            cache
                .plan(&[Feed::new(id, &tokens)])
                .unwrap()
                .commit()
                .unwrap();
            cache.remove(id).unwrap();
        }
        let hits = |prompt: u32| {
            cache
                .cost(&[100 * prompt, 1, 2, 3, 9], &AddOptions::default())
                .cached_tokens
        };
        // Three prompts, two blocks: the third one took the place of the other of 1 and 2.
        assert_eq!([hits(kept), hits(3 - kept), hits(3)], [4, 0, 4]);
        assert_eq!(cache.index_stats()[0].evictions, 1);
    }
}

#[test]
fn dropping_a_plan_puts_everything_back() {
    let cache = full(4, 8);
    let (parent, _) = prompt(&cache, &range(6));
    let child = cache.fork(parent).unwrap();
    let before = (
        cache.block_table(parent, 0).unwrap(),
        cache.block_table(child, 0).unwrap(),
        cache.usage(),
    );
    for _ in 0..3 {
        let plan = cache
            .plan(&[Feed::new(parent, &[1, 2, 3, 4]), Feed::new(child, &[5])])
            .unwrap();
        cache.check_invariants().unwrap();
        drop(plan);
        let after = (
            cache.block_table(parent, 0).unwrap(),
            cache.block_table(child, 0).unwrap(),
            cache.usage(),
        );
        assert_eq!(after, before);
        cache.check_invariants().unwrap();
    }
    assert_rows(&cache, parent, 0);
    run_seeded(&cache, &[(parent, &[1, 2, 3, 4], 0), (child, &[5], 0)]);
    assert_rows(&cache, parent, 0);
    assert_rows(&cache, child, 0);
}

#[test]
fn an_eviction_in_the_middle_of_a_reservation_loses_no_block() {
    // The window has let go of block 0, which block 1 is found through. The step needs the
    // free block and block 0: one for the copy of block 1, which stops being findable with
    // block 0, and one for position 8.
    let cache = cache(4, 3, &[Some(4)]);
    let (id, _) = prompt(&cache, &range(8));
    cache.truncate(id, 7).unwrap();
    let plan = cache.plan(&[Feed::new(id, &[70, 80])]).unwrap();
    cache.check_invariants().unwrap();
    drop(plan);
    cache.check_invariants().unwrap();
    run(&cache, id, &[70, 80]);
    assert_rows(&cache, id, 0);
    cache.remove(id).unwrap();
    assert_eq!(cache.usage()[0].blocks_used, 0);
}

#[test]
fn rewinding_into_a_registered_block_keeps_it_intact() {
    let cache = full(4, 8);
    let (id, _) = prompt(&cache, &range(8));
    cache.truncate(id, 6).unwrap();
    run(&cache, id, &[60, 70]);
    assert_rows(&cache, id, 0);
    assert_eq!(
        cache
            .cost(&[0, 1, 2, 3, 4, 5, 6, 7, 8], &AddOptions::default())
            .cached_tokens,
        8
    );
    assert_eq!(
        cache
            .cost(&[0, 1, 2, 3, 4, 5, 60, 70, 8], &AddOptions::default())
            .cached_tokens,
        8
    );
    cache.truncate(id, 4).unwrap();
    let (again, cached) = prompt(&cache, &range(9));
    assert_eq!(cached, 8);
    assert_rows(&cache, again, 0);
}

#[test]
fn a_byte_budget_is_divided_by_the_expected_length() {
    let shapes = [
        LayerShape {
            window: None,
            kv_heads: 2,
            k_dim: 64,
            v_dim: 64,
        },
        LayerShape {
            window: Some(512),
            kv_heads: 2,
            k_dim: 64,
            v_dim: 64,
        },
    ];
    let spec = CacheSpec::from_layers(&shapes, DType::F16).unwrap();
    let config = CacheConfig::bytes(64 << 20).with_expected_tokens(4096);
    let cache = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap();
    let usage = cache.usage();
    // 16 tokens * 2 heads * (64 + 64) * 2 bytes.
    assert_eq!(usage[0].bytes_per_block, 8192);
    // A sequence of 4,096 tokens holds 256 and 33 blocks: 511 tokens before it and its own.
    let blocks: Vec<_> = usage.iter().map(|u| u.blocks_total).collect();
    assert_eq!(blocks, [8192 * 256 / (256 + 32), 8192 * 32 / (256 + 32)]);
    assert!(
        usage
            .iter()
            .map(|u| u.blocks_total as u64 * u.bytes_per_block)
            .sum::<u64>()
            <= 64 << 20
    );
}

#[test]
fn clear_waits_for_a_layer_that_is_being_written() {
    let cache = full(4, 8);
    let (id, _) = prompt(&cache, &range(5));
    let plan = cache.plan(&[Feed::new(id, &[1])]).unwrap();
    std::thread::scope(|scope| {
        let step = plan.layer(0).unwrap();
        let clearing = scope.spawn(|| cache.clear());
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!clearing.is_finished());
        drop(step);
        clearing.join().unwrap();
    });
    assert!(matches!(plan.layer(0), Err(Error::StalePlan { .. })));
}

/// Who writes a layer while another thread clears is not made to wait for it.
#[test]
fn a_clear_that_waits_blocks_nobody() {
    let (done, all_done) = std::sync::mpsc::channel();
    // Not scoped: a deadlock shall fail the test, not hang it.
    std::thread::spawn(move || {
        let cache = cache(4, 8, &[None, None]);
        let (id, _) = prompt(&cache, &range(5));
        let plan = cache.plan(&[Feed::new(id, &[1])]).unwrap();
        let step = plan.layer(0).unwrap();
        let clearing = [(); 2].map(|()| {
            let cache = cache.clone();
            std::thread::spawn(move || cache.clear())
        });
        // As soon as one has begun the plan is stale, and says so at once.
        while plan.layer(1).is_ok() {
            std::thread::yield_now();
        }
        assert!(matches!(plan.layer(1), Err(Error::StalePlan { .. })));
        assert_eq!(cache.usage()[0].blocks_used, 2);
        assert!(cache.fork(id).is_err());
        drop(step);
        clearing
            .into_iter()
            .for_each(|clearing| clearing.join().unwrap());
        assert!(matches!(plan.commit(), Err(Error::StalePlan { .. })));
        // Both are done: the next plan is of the epoch that it is now.
        assert_eq!(cache.num_sequences(), 0);
        let (id, cached) = prompt(&cache, &range(5));
        assert_eq!(cached, 0);
        cache.remove(id).unwrap();
        done.send(()).unwrap();
    });
    let patience = std::time::Duration::from_secs(30);
    all_done.recv_timeout(patience).expect("a deadlock");
}

#[test]
fn explicit_positions_stay_out_of_the_prefix_index() {
    let cache = full(4, 16);
    let tokens = range(9);
    let hits = || cache.cost(&tokens, &AddOptions::default()).cached_tokens;
    let shifted: Vec<u32> = (1000..1009).collect();
    let id = cache.add(&tokens, AddOptions::default()).unwrap().id;
    let feed = Feed::new(id, &tokens).with_positions(&shifted);
    cache.plan(&[feed]).unwrap().commit().unwrap();
    assert_eq!(hits(), 0);
    // The positions that a prompt has anyway change nothing.
    let id = cache.add(&tokens, AddOptions::default()).unwrap().id;
    let feed = Feed::new(id, &tokens).with_positions(&tokens);
    cache.plan(&[feed]).unwrap().commit().unwrap();
    assert_eq!(hits(), 8);
}
