//! Field cases of the cache, each with one right answer, and its bad input.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[path = "cache/reuse.rs"]
mod reuse;
#[path = "cache/swap.rs"]
mod swap;

use candle_core::{DType, Device};
use candle_paged_attn::Error;
use candle_paged_attn::block::{BlockId, Candidate, Event, EvictionPolicy, Namespace};
use candle_paged_attn::cache::{
    AddOptions, CacheConfig, CacheSpec, Feed, LayerShape, Logits, PagedKvCache, SequenceId,
};
use common::toy::{Toy, poison, stored_rows, tensors, write_step};

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
fn a1_one_token_of_a_cached_prompt_is_computed() {
    let cache = full(4, 16);
    for (len, hits) in [(8, 4), (4, 0)] {
        let tokens: Vec<u32> = (0..len).map(|i| i + 100 * len).collect();
        let (first, cached) = prompt(&cache, &tokens);
        assert_eq!(cached, 0);
        cache.remove(first).unwrap();
        let (second, cached) = prompt(&cache, &tokens);
        assert_eq!(cached, hits);
        assert_rows(&cache, second, 0);
        cache.remove(second).unwrap();
        // Still findable: a longer prompt finds every full block.
        let longer: Vec<u32> = tokens.iter().copied().chain([9999]).collect();
        assert_eq!(
            cache.cost(&longer, &AddOptions::default()).cached_tokens,
            len as usize
        );
    }
}

#[test]
fn a2_a_reused_block_never_answers_for_its_old_prompt() {
    let cache = full(4, 1);
    for tokens in [[1, 2, 3, 4], [5, 6, 7, 8]] {
        let (id, cached) = prompt(&cache, &tokens);
        assert_eq!(cached, 0);
        cache.remove(id).unwrap();
    }
    assert_eq!(
        cache
            .cost(&[1, 2, 3, 4, 9], &AddOptions::default())
            .cached_tokens,
        0
    );
    assert_eq!(
        cache
            .cost(&[5, 6, 7, 8, 9], &AddOptions::default())
            .cached_tokens,
        4
    );
}

#[test]
fn a3_equal_prompts_in_one_step_compute_twice_then_hit() {
    let cache = full(4, 16);
    let tokens = range(8);
    let a = cache.add(&tokens, AddOptions::default()).unwrap();
    let b = cache.add(&tokens, AddOptions::default()).unwrap();
    assert_eq!((a.cached_tokens, b.cached_tokens), (0, 0));
    run_seeded(&cache, &[(a.id, &tokens, 0), (b.id, &tokens, 0)]);
    assert_rows(&cache, a.id, 0);
    assert_rows(&cache, b.id, 0);
    let (c, cached) = prompt(&cache, &tokens);
    assert_eq!(cached, 4);
    assert_rows(&cache, c, 0);
}

#[test]
fn a4_a_prompt_that_does_not_fit_changes_nothing() {
    let cache = full(1, 8);
    // Three blocks in use, three idle ones behind them, two free.
    let (long, _) = prompt(&cache, &range(6));
    let short = cache.fork(long).unwrap();
    cache.truncate(short, 3).unwrap();
    cache.remove(long).unwrap();
    let usage = cache.usage()[0];
    assert_eq!(
        (usage.blocks_used, usage.blocks_cached, usage.blocks_free),
        (3, 3, 2)
    );

    let wanted = range(9);
    let cost = cache.cost(&wanted, &AddOptions::default());
    assert_eq!(
        (
            cost.cached_tokens,
            cost.blocks_needed[0],
            cost.blocks_available[0]
        ),
        (6, 6, 5)
    );
    assert!(!cost.fits());
    assert_eq!(cache.usage()[0], usage);

    let added = cache.add(&wanted, AddOptions::default()).unwrap();
    let table = cache.block_table(added.id, 0).unwrap();
    let error = cache
        .plan(&[Feed::new(added.id, &wanted[6..])])
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::OutOfBlocks {
                needed: 3,
                free: 2,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(cache.block_table(added.id, 0).unwrap(), table);
    cache.remove(added.id).unwrap();
    assert_eq!(cache.usage()[0], usage);
    assert_eq!(cache.cost(&wanted, &AddOptions::default()), cost);
    cache.check_invariants().unwrap();
}

#[test]
fn a7_a8_namespaces_are_distinct_entries() {
    let cache = full(4, 64);
    let none = Namespace::default;
    let namespaces = [
        none(),
        none().with_adapter("X", 1),
        none().with_salt("X"),
        none().with_adapter("X", 1).with_salt("X"),
        none().with_adapter("a", 1).with_salt("bc"),
        none().with_adapter("ab", 1).with_salt("c"),
        none().with_adapter("X", 2),
    ];
    let tokens = range(9);
    for (seed, namespace) in namespaces.iter().enumerate() {
        let options = AddOptions::default().with_namespace(namespace.clone());
        assert_eq!(
            cache.cost(&tokens, &options).cached_tokens,
            0,
            "{namespace:?}"
        );
        let added = cache.add(&tokens, options.clone()).unwrap();
        run_seeded(&cache, &[(added.id, &tokens, seed as u8)]);
        assert_eq!(cache.cost(&tokens, &options).cached_tokens, 8);
    }
}

#[test]
fn a9_drafts_are_findable_only_when_accepted() {
    let cache = full(4, 8);
    let id = cache.add(&[1, 2, 3], AddOptions::default()).unwrap().id;
    let plan = cache
        .plan(&[Feed::new(id, &[1, 2, 3, 40, 50]).with_logits(Logits::All)])
        .unwrap();
    assert_eq!(plan.logit_rows(), [0, 1, 2, 3, 4]);
    let hits = |tokens: &[u32]| cache.cost(tokens, &AddOptions::default()).cached_tokens;
    assert_eq!(hits(&[1, 2, 3, 40, 9]), 0);
    let tokens = vec![1, 2, 3, 40, 50];
    write_step(
        &plan,
        &cache,
        &[Toy {
            seed: 0,
            tokens,
            new: 5,
        }],
    );
    plan.commit_accepted(&[4]).unwrap();
    assert_eq!(cache.sequence_tokens(id).unwrap(), [1, 2, 3, 40]);
    assert_eq!(hits(&[1, 2, 3, 40, 9]), 4);
    assert_eq!(hits(&[1, 2, 3, 41, 9]), 0);
    assert_eq!(cache.usage()[0].blocks_used, 1);
    assert_rows(&cache, id, 0);
}

#[test]
fn a10_without_reads_the_prompt_is_computed_and_still_fills_the_index() {
    let cache = full(4, 16);
    let (id, _) = prompt(&cache, &range(9));
    cache.remove(id).unwrap();
    let options = AddOptions::default().without_prefix_reads();
    let added = cache.add(&range(9), options).unwrap();
    assert_eq!(added.cached_tokens, 0);
    let fresh: Vec<u32> = (50..59).collect();
    let other = cache
        .add(&fresh, AddOptions::default().without_prefix_reads())
        .unwrap();
    run(&cache, other.id, &fresh);
    assert_eq!(cache.cost(&fresh, &AddOptions::default()).cached_tokens, 8);
}

#[test]
fn a11_removed_is_told_at_the_last_copy() {
    // Two copies of two blocks fill the pool; a third prompt evicts the copies in turn.
    let cache = full(4, 4);
    let tokens = range(8);
    let a = cache.add(&tokens, AddOptions::default()).unwrap().id;
    let b = cache.add(&tokens, AddOptions::default()).unwrap().id;
    run_seeded(&cache, &[(a, &tokens, 0), (b, &tokens, 0)]);
    cache.remove(a).unwrap();
    cache.take_events();
    let removed = |cache: &PagedKvCache| {
        cache
            .take_events()
            .iter()
            .filter(|(_, e)| matches!(e, Event::Removed { .. }))
            .count()
    };
    let other = cache
        .add(&[70, 71, 72, 73, 74, 75, 76, 77], AddOptions::default())
        .unwrap()
        .id;
    run(&cache, other, &[70, 71, 72, 73, 74, 75, 76, 77]);
    assert_eq!(removed(&cache), 0);
    assert_eq!(
        cache
            .cost(&[0, 1, 2, 3, 4, 5, 6, 7, 9], &AddOptions::default())
            .cached_tokens,
        8
    );
    cache.remove(b).unwrap();
    run(&cache, other, &[80, 81, 82, 83]);
    assert_eq!(removed(&cache), 1);
}

#[test]
fn a12_less_than_a_block_matches_nothing() {
    for (block_size, len) in [(4, 3), (64, 63)] {
        let cache = full(block_size, 8);
        let (id, _) = prompt(&cache, &range(len));
        cache.remove(id).unwrap();
        assert_eq!(
            cache
                .cost(&range(len), &AddOptions::default())
                .cached_tokens,
            0
        );
        let usage = cache.usage()[0];
        assert_eq!((usage.blocks_cached, usage.blocks_free), (0, 8));
    }
}

#[test]
fn a14_fork_then_append_copies_once() {
    let cache = full(4, 8);
    let (parent, _) = prompt(&cache, &range(6));
    let child = cache.fork(parent).unwrap();
    assert_eq!(cache.usage()[0].blocks_used, 2);
    run_seeded(&cache, &[(parent, &[9], 0), (child, &[8], 0)]);
    assert_eq!(cache.counters().copies, 1);
    assert_rows(&cache, parent, 0);
    assert_rows(&cache, child, 0);
    let rows = |id| stored_rows(&cache, id, 0);
    assert_eq!(rows(parent)[..6], rows(child)[..6]);
    assert_ne!(rows(parent)[6], rows(child)[6]);

    // A full last block is shared as it is.
    let cache = full(4, 8);
    let (parent, _) = prompt(&cache, &range(8));
    let child = cache.fork(parent).unwrap();
    run(&cache, parent, &[9]);
    run(&cache, child, &[8]);
    assert_eq!(cache.counters().copies, 0);
    assert_rows(&cache, parent, 0);
    assert_rows(&cache, child, 0);
}

#[test]
fn a15_the_last_owner_does_not_copy() {
    let cache = full(4, 8);
    let (parent, _) = prompt(&cache, &range(6));
    let child = cache.fork(parent).unwrap();
    cache.remove(parent).unwrap();
    let before = cache.block_table(child, 0).unwrap();
    run(&cache, child, &[8]);
    assert_eq!(cache.block_table(child, 0).unwrap(), before);
    assert_eq!(cache.counters().copies, 0);
    assert_rows(&cache, child, 0);
}

#[test]
fn a16_window_fork_append_remove_leaves_nothing() {
    let cache = cache(4, 16, &[Some(8)]);
    let (parent, _) = prompt(&cache, &range(10));
    let child = cache.fork(parent).unwrap();
    for (i, id) in [parent, child].into_iter().enumerate() {
        for step in 0..6 {
            run(&cache, id, &[(100 * (i + 1) + step) as u32]);
        }
    }
    cache.remove(parent).unwrap();
    cache.remove(child).unwrap();
    let usage = cache.usage()[0];
    assert_eq!(usage.blocks_used, 0);
    assert_eq!(usage.blocks_cached + usage.blocks_free, usage.blocks_total);
    cache.check_invariants().unwrap();
}

#[test]
fn a17_fork_grid_counts_blocks_and_copies() {
    for block_size in [1, 8] {
        for len in [1, 9, 16, 129] {
            for append in [1, 16, 129] {
                let cache = full(block_size, 600);
                let (parent, _) = prompt(&cache, &range(len));
                let before = cache.usage()[0].blocks_used;
                let child = cache.fork(parent).unwrap();
                let tokens: Vec<u32> = (0..append).map(|i| 5000 + i as u32).collect();
                run(&cache, child, &tokens);
                let fresh = cache.usage()[0].blocks_used - before;
                assert_eq!(
                    fresh,
                    (len + append).div_ceil(block_size) - len / block_size
                );
                assert_eq!(cache.counters().copies, u64::from(len % block_size != 0));
                assert_rows(&cache, child, 0);
                assert_rows(&cache, parent, 0);
            }
        }
    }
}

#[test]
fn a20_a_new_epoch_misses() {
    let cache = full(4, 16);
    let (id, _) = prompt(&cache, &range(9));
    let pin = cache.pin(id).unwrap();
    cache.clear();
    assert_eq!(
        cache.cost(&range(9), &AddOptions::default()).cached_tokens,
        0
    );
    assert!(matches!(cache.len(id), Err(Error::StaleHandle { .. })));
    assert!(matches!(cache.unpin(pin), Err(Error::StaleHandle { .. })));
    assert_eq!(prompt(&cache, &range(9)).1, 0);
}

#[test]
fn a21_a_prompt_counts_once_and_a_recomputed_one_apart() {
    let cache = full(4, 4);
    let (first, _) = prompt(&cache, &range(9));
    // Three attempts: the first two do not fit.
    for _ in 0..2 {
        let added = cache.add(&range(15), AddOptions::default()).unwrap();
        assert_eq!(added.cached_tokens, 8);
        let refused = cache.plan(&[Feed::new(added.id, &range(15)[8..])]);
        assert!(matches!(refused, Err(Error::OutOfBlocks { .. })));
        cache.remove(added.id).unwrap();
    }
    cache.remove(first).unwrap();
    let (second, _) = prompt(&cache, &range(15));
    run(&cache, second, &[15]);
    let counted = |cache: &PagedKvCache| {
        let (counters, stats) = (cache.counters(), cache.index_stats()[0]);
        assert_eq!(
            (stats.queries, stats.queried_tokens, stats.hit_tokens),
            (
                counters.prompts,
                counters.prompt_tokens,
                counters.cached_tokens
            )
        );
        (
            counters.prompts,
            counters.prompt_tokens,
            counters.cached_tokens,
        )
    };
    assert_eq!(counted(&cache), (2, 9 + 15, 8));

    // It gives way and comes back: apart, and neither does a fork count again.
    cache.remove(second).unwrap();
    let again = AddOptions::default().recomputed();
    let added = cache.add(&range(16), again).unwrap();
    let fork = cache.fork(added.id).unwrap();
    run(&cache, added.id, &range(16)[12..]);
    cache.remove(added.id).unwrap();
    cache.truncate(fork, 8).unwrap();
    run(&cache, fork, &[7]);
    assert_eq!(counted(&cache), (2, 9 + 15, 8));
    let counters = cache.counters();
    assert_eq!(
        (
            counters.recomputed,
            counters.recomputed_tokens,
            counters.recomputed_cached_tokens
        ),
        (1, 16, 12)
    );
}

#[test]
fn a22_shared_prompt_blocks_are_counted_once() {
    let cache = full(16, 16);
    prompt(&cache, &range(55));
    assert_eq!(cache.usage()[0].blocks_used, 4);
    let other: Vec<u32> = (0..48).chain(900..907).collect();
    let (_, cached) = prompt(&cache, &other);
    assert_eq!(cached, 48);
    let usage = cache.usage()[0];
    assert_eq!(usage.blocks_used, 5);
    assert_eq!(usage.tokens, 48 + 7 + 7);
    assert!((usage.utilization - 62.0 / 80.0).abs() < 1e-12);
}

#[test]
fn a25_no_hit_through_a_released_parent() {
    let cache = cache(4, 12, &[Some(8)]);
    let (first, _) = prompt(&cache, &range(40));
    let other: Vec<u32> = (500..540).collect();
    // 40 tokens leave the blocks of positions 32.. in use; the other prompt takes all others.
    assert_eq!(cache.block_table(first, 0).unwrap().0, 8);
    let (second, cached) = prompt(&cache, &other);
    assert_eq!(cached, 0);
    cache.remove(first).unwrap();
    cache.remove(second).unwrap();
    assert_eq!(
        cache.cost(&range(40), &AddOptions::default()).cached_tokens,
        0
    );
    let (again, cached) = prompt(&cache, &range(40));
    assert_eq!(cached, 0);
    let toy = Toy {
        seed: 0,
        tokens: range(40),
        new: 0,
    };
    assert_eq!(stored_rows(&cache, again, 0), toy.rows(0, 32));
}

#[test]
fn c14_stale_and_outstanding_plans() {
    let cache = full(4, 16);
    let (id, _) = prompt(&cache, &range(5));
    let twice = cache
        .plan(&[Feed::new(id, &[1]), Feed::new(id, &[2])])
        .unwrap_err();
    assert!(
        matches!(twice, Error::InvalidArgument { op: "plan", .. }),
        "{twice}"
    );

    let plan = cache.plan(&[Feed::new(id, &[1])]).unwrap();
    let outstanding = |r: candle_paged_attn::Result<()>| {
        assert!(matches!(r, Err(Error::PlanOutstanding { .. })), "{r:?}");
    };
    outstanding(cache.plan(&[Feed::new(id, &[1])]).map(drop));
    outstanding(cache.add(&[1], AddOptions::default()).map(drop));
    outstanding(cache.fork(id).map(drop));
    outstanding(cache.truncate(id, 1));
    outstanding(cache.remove(id));
    outstanding(cache.pin(id).map(drop));
    assert_eq!(cache.len(id).unwrap(), 5);

    cache.clear();
    assert!(matches!(
        plan.layer(0),
        Err(Error::StalePlan {
            plan: 0,
            cache: 1,
            ..
        })
    ));
    assert!(matches!(plan.commit(), Err(Error::StalePlan { .. })));
    let (id, _) = prompt(&cache, &range(5));
    assert_eq!(cache.len(id).unwrap(), 5);
}

#[test]
fn c19_only_the_planned_rows_change() {
    let cache = full(16, 300);
    let (id, _) = prompt(&cache, &range(64));
    let mut len = 64;
    for target in [64, 65, 200, 1000, 4095] {
        if target > len {
            let chunk: Vec<u32> = (len..target).map(|i| i as u32 % 977).collect();
            run(&cache, id, &chunk);
            len = target;
        }
        let pool = || -> Vec<Vec<u32>> {
            let (k, v) = tensors(&cache, 0);
            let bits = |x: candle_core::Tensor| {
                let rows = x.flatten(0, 2).unwrap().to_vec2::<f32>().unwrap();
                rows.into_iter()
                    .map(|row| row.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            };
            bits(k)
                .zip(bits(v))
                .map(|(mut k, v)| {
                    k.extend(v);
                    k
                })
                .collect()
        };
        let before = pool();
        run(&cache, id, &[7]);
        let (_, table) = cache.block_table(id, 0).unwrap();
        let slot = table[len / 16] as usize * 16 + len % 16;
        let changed: Vec<usize> = before
            .iter()
            .zip(pool())
            .enumerate()
            .filter(|(_, (a, b))| **a != *b)
            .map(|(i, _)| i)
            .collect();
        assert_eq!(changed, [slot]);
        len += 1;
    }
}

#[test]
fn windows_release_what_is_behind_them() {
    // Gemma 3's pattern: five windowed layers for each full one.
    let windows: Vec<_> = (0..12)
        .map(|i| if i % 6 == 5 { None } else { Some(8) })
        .collect();
    let cache = cache(4, 64, &windows);
    assert_eq!(cache.spec().groups.len(), 2);
    let (id, _) = prompt(&cache, &range(10));
    for token in 0..90 {
        run(&cache, id, &[token]);
        let len = cache.len(id).unwrap();
        for (g, group) in cache.spec().groups.iter().enumerate() {
            assert_eq!(
                cache.block_table(id, g).unwrap().1.len(),
                group.blocks_held(len, 4)
            );
            assert_eq!(cache.usage()[g].blocks_used, group.blocks_held(len, 4));
        }
    }
    let error = cache.truncate(id, 20).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { op: "truncate", .. }),
        "{error}"
    );
    assert_eq!(cache.len(id).unwrap(), 100);
    cache.truncate(id, 99).unwrap();
    cache.truncate(id, 0).unwrap();
    run(&cache, id, &range(5));
    assert_rows(&cache, id, 0);
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
fn free_memory_is_a_fraction_and_needs_a_gpu() {
    let spec = CacheSpec::uniform(1, 2, 8, DType::F32).unwrap();
    let refused = |fraction| {
        let config = CacheConfig::free_memory(fraction);
        match PagedKvCache::new(&spec, &config, &Device::Cpu) {
            Err(Error::InvalidArgument { what, got, .. }) if what == "size" => got,
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(0.5).contains("Cpu"), "{}", refused(0.5));
    for fraction in [0.0, -0.5, 1.01, f64::NAN, f64::INFINITY] {
        assert_eq!(refused(fraction), fraction.to_string());
    }
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

#[test]
fn handles_of_another_cache_are_stale() {
    let (ours, other) = (full(4, 8), full(4, 8));
    let (id, _) = prompt(&ours, &range(5));
    let (other_id, _) = prompt(&other, &range(5));
    let (pin, other_pin) = (ours.pin(id).unwrap(), other.pin(other_id).unwrap());
    assert!(matches!(other.len(id), Err(Error::StaleHandle { .. })));
    assert!(matches!(other.remove(id), Err(Error::StaleHandle { .. })));
    assert!(matches!(other.unpin(pin), Err(Error::StaleHandle { .. })));
    other.unpin(other_pin).unwrap();
    other.remove(other_id).unwrap();
}

#[test]
fn sizes_beyond_any_machine_are_refused() {
    assert!(CacheSpec::uniform(usize::MAX, 1, 8, DType::F32).is_err());
    let spec = CacheSpec::uniform(30, 8, 128, DType::F32).unwrap();
    for config in [
        CacheConfig::bytes(1 << 50),
        CacheConfig::bytes(u64::MAX),
        CacheConfig::tokens(usize::MAX),
        CacheConfig::blocks(u32::MAX as usize - 1).with_block_size(256),
        CacheConfig::bytes(1 << 50).with_expected_tokens(usize::MAX),
    ] {
        let error = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    // 2^64 elements in one tensor.
    let spec = CacheSpec::uniform(1, 1 << 40, 512, DType::F32).unwrap();
    let config = CacheConfig::blocks(1 << 15).with_block_size(1);
    assert!(PagedKvCache::new(&spec, &config, &Device::Cpu).is_err());
    assert_eq!(spec.groups[0].blocks_held(10, 0), 10);
}

#[test]
fn bad_input_is_a_typed_error_and_changes_nothing() {
    let spec = CacheSpec::uniform(1, 1, 8, DType::F32).unwrap();
    for block_size in [0, 3, 512] {
        let config = CacheConfig::blocks(4).with_block_size(block_size);
        let error = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap_err();
        assert!(
            error.to_string().contains(&format!("got {block_size}")),
            "{error}"
        );
    }
    for config in [
        CacheConfig::blocks(0),
        CacheConfig::bytes(100),
        CacheConfig::tokens(0),
    ] {
        let error = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    let huge = CacheConfig::blocks(usize::MAX / 2);
    assert!(PagedKvCache::new(&spec, &huge, &Device::Cpu).is_err());
    assert!(CacheSpec::uniform(0, 1, 8, DType::F32).is_err());
    assert!(CacheSpec::uniform(1, 1, 12, DType::F32).is_err());
    assert!(CacheSpec::uniform(1, 1, 8, DType::U8).is_err());

    let cache = full(4, 4);
    let empty = cache.add(&[], AddOptions::default()).unwrap_err();
    assert!(matches!(empty, Error::Empty { op: "add", .. }), "{empty}");
    let (id, _) = prompt(&cache, &range(5));
    let usage = cache.usage();
    assert!(matches!(cache.plan(&[]), Err(Error::Empty { .. })));
    assert!(matches!(
        cache.plan(&[Feed::new(id, &[])]),
        Err(Error::Empty { .. })
    ));
    let positions = cache
        .plan(&[Feed::new(id, &[1, 2]).with_positions(&[7])])
        .unwrap_err();
    assert!(
        matches!(positions, Error::InvalidArgument { op: "plan", .. }),
        "{positions}"
    );
    let large = cache.plan(&[Feed::new(id, &range(20))]).unwrap_err();
    assert!(
        matches!(
            large,
            Error::OutOfBlocks {
                needed: 5,
                free: 2,
                ..
            }
        ),
        "{large}"
    );
    let accepted = cache
        .plan(&[Feed::new(id, &[1])])
        .unwrap()
        .commit_accepted(&[2])
        .unwrap_err();
    assert!(
        matches!(accepted, Error::InvalidArgument { op: "commit", .. }),
        "{accepted}"
    );
    assert!(matches!(
        cache.truncate(id, 6),
        Err(Error::InvalidArgument { .. })
    ));
    assert_eq!(cache.usage(), usage);
    assert_eq!(cache.sequence_tokens(id).unwrap(), range(5));

    cache.remove(id).unwrap();
    let stale = |r: candle_paged_attn::Result<()>| {
        assert!(matches!(r, Err(Error::StaleHandle { .. })), "{r:?}")
    };
    stale(cache.remove(id));
    stale(cache.plan(&[Feed::new(id, &[1])]).map(drop));
    stale(cache.fork(id).map(drop));
    stale(cache.truncate(id, 0));
    stale(cache.pin(id).map(drop));
    stale(cache.len(id).map(drop));
    // The slot is reused under a new generation: the old handle stays stale.
    let (new, _) = prompt(&cache, &range(5));
    stale(cache.remove(id));
    cache.remove(new).unwrap();
}
