//! What is refused, with a typed error and without a trace.

use candle_core::{DType, Device};
use candle_paged_attn::Error;
use candle_paged_attn::cache::{AddOptions, CacheConfig, CacheSize, CacheSpec, Feed, PagedKvCache};

use super::{full, prompt, range};

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
    // Blocks of 64 MiB, of which there are few enough to be numbered.
    let wide = CacheSpec::uniform(1, 1024, 512, DType::F32).unwrap();
    for config in [
        CacheConfig::bytes(1 << 50),
        CacheConfig::blocks(1).with_host(CacheSize::Bytes(1 << 50)),
    ] {
        let error = PagedKvCache::new(&wide, &config, &Device::Cpu).unwrap_err();
        let expected = (1u64 << 50).to_string();
        assert!(error.to_string().contains(&expected), "{error}");
    }
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
