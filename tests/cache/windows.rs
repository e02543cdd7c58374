//! Layers with a window give back what is behind it.

use candle_paged_attn::Error;
use candle_paged_attn::cache::AddOptions;

use super::{assert_rows, cache, prompt, range, run};
use crate::common::toy::{Toy, stored_rows};

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
