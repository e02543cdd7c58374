//! Field cases of caches, each with one right answer.

use candle_paged_attn::Error;
use candle_paged_attn::block::{Event, Namespace};
use candle_paged_attn::cache::{AddOptions, Feed, Logits, PagedKvCache};

use super::{assert_rows, full, prompt, range, run, run_seeded};
use crate::common::toy::{Toy, stored_rows, tensors, write_step};

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
