//! Sequences in host memory.

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::Error;
use candle_paged_attn::cache::{
    AddOptions, CacheConfig, CacheSize, CacheSpec, Feed, PagedKvCache, SequenceId,
};
use candle_paged_attn::ops::{self, PageTable};

use super::common::Rng;
use super::common::paged::bits;
use super::common::toy::tensors;
use super::{assert_rows, configured, hits, prompt, range, run, run_seeded};

fn with_host(blocks: usize, host: usize, windows: &[Option<usize>]) -> PagedKvCache {
    let config = CacheConfig::blocks(blocks)
        .with_block_size(4)
        .with_host(CacheSize::Blocks(host));
    configured(config, windows)
}

/// Blocks of the host pool in use, per group.
fn host_used(cache: &PagedKvCache) -> Vec<usize> {
    cache.usage().iter().map(|u| u.host_blocks_used).collect()
}

/// Fills the whole pool with random values, other ones in each tensor.
fn scramble(cache: &PagedKvCache, rng: &mut Rng) {
    for layer in 0..cache.spec().num_layers() {
        let (k, v) = tensors(cache, layer);
        for x in [k, v] {
            let values: Vec<f32> = (0..x.elem_count()).map(|_| rng.normal() as f32).collect();
            let values = Tensor::from_vec(values, x.shape(), &Device::Cpu).unwrap();
            x.slice_set(&values.to_dtype(x.dtype()).unwrap(), 0, 0)
                .unwrap();
        }
    }
}

/// The bits of K and of V of a sequence, layer by layer.
fn stored_bits(cache: &PagedKvCache, id: SequenceId) -> Vec<(Vec<u32>, Vec<u32>)> {
    let (first, pages) = cache.block_table(id, 0).unwrap();
    let mut table = PageTable::new(cache.block_size()).unwrap();
    let len = cache.len(id).unwrap();
    table.push(&pages, first as u32, len, &[]).unwrap();
    let layers = 0..cache.spec().num_layers();
    let rows = layers.map(|layer| {
        let (k, v) = tensors(cache, layer);
        let (k, v) = ops::gather_kv(&k, &v, &table, 0).unwrap();
        (bits(&k), bits(&v))
    });
    rows.collect()
}

#[test]
fn a19_k_and_v_come_back_bit_by_bit() {
    let mut rng = Rng(19);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for len in [1, 4, 10, 33] {
            // K and V of one shape: one in the place of the other would go unnoticed by sizes.
            let spec = CacheSpec::uniform(2, 2, 8, dtype).unwrap();
            let config = CacheConfig::blocks(12)
                .with_block_size(4)
                .with_host(CacheSize::Blocks(9));
            let cache = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap();
            let tokens = range(len);
            // Not in the index, so nothing may be taken from the pool, which is overwritten.
            let id = cache
                .add(&tokens, AddOptions::default().unindexed())
                .unwrap()
                .id;
            cache
                .plan(&[Feed::new(id, &tokens)])
                .unwrap()
                .commit()
                .unwrap();
            scramble(&cache, &mut rng);
            let (before, table) = (stored_bits(&cache, id), cache.block_table(id, 0).unwrap());
            let swap = cache.swap_out(id).unwrap();
            scramble(&cache, &mut rng);
            let (other, _) = prompt_without_rows(&cache, 5);
            let id = cache.swap_in(swap).unwrap();
            assert_ne!(cache.block_table(id, 0).unwrap(), table);
            for (layer, (got, want)) in stored_bits(&cache, id).iter().zip(&before).enumerate() {
                assert_eq!(got.0, want.0, "K of layer {layer}, {dtype:?}, {len} tokens");
                assert_eq!(got.1, want.1, "V of layer {layer}, {dtype:?}, {len} tokens");
                assert_ne!(want.0, want.1);
            }
            assert_eq!(cache.sequence_tokens(id).unwrap(), tokens);
            assert_eq!(host_used(&cache), [0]);
            cache.remove(other).unwrap();
            cache.check_invariants().unwrap();
        }
    }
}

/// A prompt that takes blocks, but whose rows are nobody's concern.
fn prompt_without_rows(cache: &PagedKvCache, len: usize) -> (SequenceId, usize) {
    let tokens: Vec<u32> = (0..len).map(|i| 5000 + i as u32).collect();
    let added = cache.add(&tokens, AddOptions::default()).unwrap();
    let plan = cache.plan(&[Feed::new(added.id, &tokens)]).unwrap();
    plan.commit().unwrap();
    (added.id, len)
}

#[test]
fn overwritten_blocks_come_back_and_are_findable_again() {
    let cache = with_host(6, 3, &[None]);
    let (id, _) = prompt(&cache, &range(10));
    let swap = cache.swap_out(id).unwrap();
    assert!(matches!(cache.len(id), Err(Error::StaleHandle { .. })));
    assert_eq!((cache.num_sequences(), cache.num_swapped()), (0, 1));
    assert_eq!(
        (cache.usage()[0].blocks_used, host_used(&cache)),
        (0, vec![3])
    );

    // The other prompt takes the whole pool.
    let other: Vec<u32> = (700..724).collect();
    let (other, _) = prompt(&cache, &other);
    assert_eq!(hits(&cache, &range(10)), 0);
    let before = (cache.usage(), cache.block_table(other, 0).unwrap());
    let refused = cache.swap_in(swap).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::OutOfBlocks {
                op: "swap_in",
                needed: 3,
                free: 0
            }
        ),
        "{refused}"
    );
    assert_eq!(
        (cache.usage(), cache.block_table(other, 0).unwrap()),
        before
    );
    assert_eq!(cache.num_swapped(), 1);

    cache.remove(other).unwrap();
    let id = cache.swap_in(swap).unwrap();
    cache.check_invariants().unwrap();
    assert_rows(&cache, id, 0);
    assert_eq!((host_used(&cache), cache.num_swapped()), (vec![0], 0));
    let counters = cache.counters();
    assert_eq!((counters.blocks_to_host, counters.blocks_from_host), (3, 3));
    assert_eq!((counters.swapped_out, counters.swapped_in), (1, 1));
    // It goes on as if it had never been away, and so do those who share its prompt.
    run(&cache, id, &[10, 11, 12]);
    assert_rows(&cache, id, 0);
    assert_eq!(hits(&cache, &range(13)), 12);
}

#[test]
fn what_is_still_findable_is_not_copied_back() {
    let cache = with_host(8, 8, &[None]);
    let (id, _) = prompt(&cache, &range(10));
    let before = cache.block_table(id, 0).unwrap().1;
    let swap = cache.swap_out(id).unwrap();
    let id = cache.swap_in(swap).unwrap();
    assert_rows(&cache, id, 0);
    assert_eq!(cache.block_table(id, 0).unwrap().1[..2], before[..2]);
    assert_eq!(cache.counters().blocks_from_host, 1);
    cache.check_invariants().unwrap();
}

#[test]
fn shared_blocks_are_shared_on_the_host_and_after() {
    let cache = with_host(8, 5, &[None]);
    let (first, _) = prompt(&cache, &range(8));
    let mut ids = vec![first];
    ids.extend((0..2).map(|_| cache.fork(first).unwrap()));
    for (i, &id) in ids.iter().enumerate() {
        run(&cache, id, &[50 + i as u32, 60]);
    }
    // Two blocks of the prompt and one each.
    assert_eq!(cache.usage()[0].blocks_used, 5);
    let swaps: Vec<_> = ids.iter().map(|&id| cache.swap_out(id).unwrap()).collect();
    assert_eq!(host_used(&cache), [5]);
    assert_eq!(cache.counters().blocks_to_host, 5);
    cache.check_invariants().unwrap();

    let other: Vec<u32> = (700..732).collect();
    let (other, _) = prompt(&cache, &other);
    cache.remove(other).unwrap();
    let back: Vec<_> = swaps.iter().map(|&s| cache.swap_in(s).unwrap()).collect();
    for &id in &back {
        assert_rows(&cache, id, 0);
    }
    assert_eq!(cache.usage()[0].blocks_used, 5);
    assert_eq!(cache.counters().blocks_from_host, 5);
    assert_eq!(host_used(&cache), [0]);
    cache.check_invariants().unwrap();

    // A block that a live sequence holds stays where it is.
    let table = cache.block_table(back[0], 0).unwrap().1;
    let swap = cache.swap_out(back[1]).unwrap();
    assert_eq!(cache.block_table(back[0], 0).unwrap().1, table);
    let again = cache.swap_in(swap).unwrap();
    assert_eq!(cache.block_table(again, 0).unwrap().1[..2], table[..2]);
    assert_rows(&cache, again, 0);
}

#[test]
fn a_partly_filled_block_of_a_fork_is_its_own_afterwards() {
    let cache = with_host(8, 8, &[None]);
    let (parent, _) = prompt(&cache, &range(6));
    let child = cache.fork(parent).unwrap();
    let swap = cache.swap_out(child).unwrap();
    // The parent is the last owner now: it writes in place.
    run(&cache, parent, &[9]);
    assert_eq!(cache.counters().copies, 0);
    let child = cache.swap_in(swap).unwrap();
    run(&cache, child, &[8]);
    assert_eq!(cache.counters().copies, 0);
    assert_rows(&cache, parent, 0);
    assert_rows(&cache, child, 0);
}

#[test]
fn all_groups_or_none() {
    // After 18 tokens the window of 4 still holds 2 blocks, the full layers 5.
    let cache = with_host(8, 4, &[Some(4), None]);
    let (id, _) = prompt(&cache, &range(18));
    let refused = cache.swap_out(id).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::OutOfBlocks {
                op: "swap_out",
                needed: 5,
                free: 4
            }
        ),
        "{refused}"
    );
    assert_eq!(host_used(&cache), [0, 0]);
    assert_rows(&cache, id, 0);
    cache.check_invariants().unwrap();

    let cache = with_host(8, 5, &[Some(4), None]);
    let (id, _) = prompt(&cache, &range(18));
    let tables = |id| [0, 1].map(|g| cache.block_table(id, g).unwrap().0);
    assert_eq!(tables(id), [3, 0]);
    let swap = cache.swap_out(id).unwrap();
    assert_eq!(host_used(&cache), [2, 5]);
    let other: Vec<u32> = (700..732).collect();
    let (other, _) = prompt(&cache, &other);
    assert_eq!(cache.block_table(other, 0).unwrap().1.len(), 1);
    let usage = cache.usage();
    // The group of the window has room, the other has not.
    assert!(matches!(
        cache.swap_in(swap),
        Err(Error::OutOfBlocks {
            needed: 5,
            free: 0,
            ..
        })
    ));
    assert_eq!(cache.usage(), usage);
    cache.remove(other).unwrap();
    let id = cache.swap_in(swap).unwrap();
    assert_eq!(tables(id), [3, 0]);
    assert_rows(&cache, id, 0);
    cache.check_invariants().unwrap();
    // The rule of the window is as before: what was released cannot be seen again.
    assert!(matches!(
        cache.truncate(id, 5),
        Err(Error::InvalidArgument { .. })
    ));
    for token in 0..9 {
        run(&cache, id, &[900 + token]);
        assert_rows(&cache, id, 0);
    }
}

#[test]
fn idle_blocks_that_it_takes_are_not_free_for_it() {
    let cache = with_host(8, 8, &[Some(4), None]);
    let (id, _) = prompt(&cache, &range(18));
    let swap = cache.swap_out(id).unwrap();
    // In the full layers four findable blocks stay, and the other prompt takes what is free.
    let other: Vec<u32> = (700..716).collect();
    let (other, _) = prompt(&cache, &other);
    let usage = cache.usage();
    assert_eq!((usage[1].blocks_cached, usage[1].blocks_free), (4, 0));
    let refused = cache.swap_in(swap).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::OutOfBlocks {
                op: "swap_in",
                needed: 5,
                free: 4
            }
        ),
        "{refused}"
    );
    assert_eq!(cache.usage(), usage);
    cache.check_invariants().unwrap();
    cache.remove(other).unwrap();
    let id = cache.swap_in(swap).unwrap();
    assert_rows(&cache, id, 0);
}

#[test]
fn handles_are_used_once_and_refusals_are_typed() {
    let cache = with_host(8, 8, &[None]);
    let (id, _) = prompt(&cache, &range(6));
    let (other, _) = prompt(&cache, &[90, 91]);
    let swap = cache.swap_out(id).unwrap();
    let plan = cache.plan(&[Feed::new(other, &[92])]).unwrap();
    let outstanding = |r: candle_paged_attn::Result<()>| {
        assert!(matches!(r, Err(Error::PlanOutstanding { .. })), "{r:?}");
    };
    outstanding(cache.swap_out(other).map(drop));
    outstanding(cache.swap_in(swap).map(drop));
    outstanding(cache.discard_swap(swap));
    drop(plan);

    let stale = |r: candle_paged_attn::Result<()>| {
        assert!(matches!(r, Err(Error::StaleHandle { .. })), "{r:?}");
    };
    stale(cache.swap_out(id).map(drop));
    let id = cache.swap_in(swap).unwrap();
    stale(cache.swap_in(swap).map(drop));
    stale(cache.discard_swap(swap));
    let swap = cache.swap_out(id).unwrap();
    assert_eq!(host_used(&cache), [2]);
    cache.discard_swap(swap).unwrap();
    assert_eq!((host_used(&cache), cache.num_swapped()), (vec![0], 0));
    stale(cache.swap_in(swap).map(drop));

    let swap = cache.swap_out(other).unwrap();
    cache.clear();
    stale(cache.swap_in(swap).map(drop));
    assert_eq!((host_used(&cache), cache.num_swapped()), (vec![0], 0));
    cache.check_invariants().unwrap();

    let without = super::full(4, 8);
    let (id, _) = prompt(&without, &range(6));
    let refused = without.swap_out(id).unwrap_err();
    assert!(
        matches!(refused, Error::InvalidArgument { op: "swap_out", .. }),
        "{refused}"
    );
    assert_rows(&without, id, 0);
    assert_eq!(without.usage()[0].host_blocks_total, 0);
    stale(without.swap_in(swap).map(drop));
}

#[test]
fn the_host_pool_has_a_size_of_its_own() {
    // A block is 4 tokens of 8 + 16 numbers of 4 bytes: 384 bytes.
    let config = CacheConfig::blocks(3).with_block_size(4);
    let cache = configured(config.with_host(CacheSize::Bytes(4000)), &[None]);
    let usage = cache.usage()[0];
    assert_eq!((usage.blocks_total, usage.host_blocks_total), (3, 10));
    let spec = CacheSpec::uniform(1, 1, 8, DType::F32).unwrap();
    let none = config.with_host(CacheSize::Bytes(10));
    let refused = PagedKvCache::new(&spec, &none, &Device::Cpu).unwrap_err();
    assert!(
        matches!(&refused, Error::InvalidArgument { what, .. } if what == "host"),
        "{refused}"
    );
}

#[test]
fn more_sequences_than_the_pool_holds_take_turns() {
    let cache = with_host(4, 16, &[None]);
    let mut swapped = Vec::new();
    for i in 0..4u32 {
        let tokens: Vec<u32> = (0..7).map(|t| 100 * i + t).collect();
        swapped.push(cache.swap_out(prompt(&cache, &tokens).0).unwrap());
    }
    for turn in 0..8u32 {
        let ids: Vec<_> = swapped[..2]
            .iter()
            .map(|&s| cache.swap_in(s).unwrap())
            .collect();
        run_seeded(&cache, &[(ids[0], &[turn], 0), (ids[1], &[turn + 50], 0)]);
        swapped.drain(..2);
        for id in ids {
            assert_rows(&cache, id, 0);
            // None may outgrow its half of the pool.
            let keep = cache.len(id).unwrap().min(7);
            cache.truncate(id, keep).unwrap();
            swapped.push(cache.swap_out(id).unwrap());
        }
        cache.check_invariants().unwrap();
    }
    assert_eq!(cache.num_swapped(), 4);
}
