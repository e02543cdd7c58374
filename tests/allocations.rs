//! c19: what a step allocates does not grow with the length of the context, nor what a loader
//! allocates with the numbers in a file.
//!
//! A test binary of its own, because it counts every allocation of the process.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "models/checkpoint.rs"]
#[allow(dead_code)]
mod checkpoint;
mod common;
#[path = "allocations/damage.rs"]
mod damage;
#[path = "models/golden.rs"]
#[allow(dead_code)]
mod golden;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::PagedAttention;
use candle_paged_attn::cache::{AddOptions, CacheConfig, CacheSpec, Feed, PagedKvCache};
use candle_paged_attn::ops::{paged_attention, write_kv};
use common::paged::{Batch, Setup, bits};

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

fn count(bytes: usize) {
    BYTES.fetch_add(bytes, Ordering::Relaxed);
    LARGEST.fetch_max(bytes, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator as it came; counting changes nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are those of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's promises are those of `realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of one step (write, then attend) and its largest allocation: medians of many, so that
/// a growing queue of the thread pool does not count.
fn a_step(batch: &Batch, k: &Tensor, v: &Tensor) -> (usize, usize) {
    let options = batch.options();
    let (mut bytes, mut largest) = (Vec::new(), Vec::new());
    for _ in 0..51 {
        LARGEST.store(0, Ordering::Relaxed);
        let before = BYTES.load(Ordering::Relaxed);
        let args = (&batch.q, &batch.k_cache, &batch.v_cache, &batch.table);
        write_kv(args.1, args.2, k, v, args.3).unwrap();
        drop(paged_attention(args.0, args.1, args.2, args.3, &options).unwrap());
        bytes.push(BYTES.load(Ordering::Relaxed) - before);
        largest.push(LARGEST.load(Ordering::Relaxed));
    }
    bytes.sort_unstable();
    largest.sort_unstable();
    (bytes[25], largest[25])
}

/// Tests of one binary run side by side, and all of them are counted.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn c19_no_allocation_grows_with_the_length() {
    let _alone = ALONE.lock().unwrap();
    for rows in [1, 48] {
        let (mut bytes, mut largest) = (Vec::new(), Vec::new());
        // Longest first: buffers that are kept have their size from then on.
        for len in [4096, 2048, 1024, 257, 64] {
            let batch = Setup::new(4, 2, 32, &[(len, rows)]).build();
            let start = len - rows;
            let part = |data: &[f64]| {
                common::paged::tensor(&data[start * 64..], &[rows, 2, 32], candle_core::DType::F32)
            };
            let (k, v) = (part(&batch.seqs[0].k), part(&batch.seqs[0].v));
            // The rows are there already: writing them again changes no bit of the pool.
            let before = (bits(&batch.k_cache), bits(&batch.v_cache));
            let step = a_step(&batch, &k, &v);
            bytes.push(step.0);
            largest.push(step.1);
            assert!(
                (bits(&batch.k_cache), bits(&batch.v_cache)) == before,
                "length {len}: a row that was not planned changed"
            );
        }
        let output = rows * 4 * 32 * 4;
        assert!(bytes[4] >= output, "the counter counts");
        if rows == 1 {
            assert!(
                bytes.iter().all(|&at_length| at_length <= bytes[4] + 64),
                "bytes at lengths 4096, 2048, 1024, 257, 64: {bytes:?}"
            );
        }
        // A longer prompt takes more matrix products, and `gemm` packs the operands of each
        // in memory of its own: more allocations, none of them larger than a tile.
        assert!(
            largest[..4].iter().all(|&bytes| bytes == largest[0]),
            "largest allocation at lengths 4096, 2048, 1024, 257, 64: {largest:?}"
        );
    }
}

#[test]
fn c19_a_decode_step_of_the_cache_allocates_the_same_at_any_length() {
    let _alone = ALONE.lock().unwrap();
    let spec = CacheSpec::uniform(1, 2, 32, DType::F32).unwrap();
    let cache = PagedKvCache::new(&spec, &CacheConfig::tokens(4200), &Device::Cpu).unwrap();
    let attention = PagedAttention::new(1.0);
    let row = |heads: usize| Tensor::ones((1, heads, 32), DType::F32, &Device::Cpu).unwrap();
    let (q, k) = (row(4), row(2));
    let id = cache.add(&[0; 4200], AddOptions::default()).unwrap().id;
    let step = || {
        let plan = cache.plan(&[Feed::new(id, &[1])]).unwrap();
        drop(attention.forward(0, &q, &k, &k, &plan).unwrap());
        plan.commit().unwrap();
    };
    cache
        .plan(&[Feed::new(id, &[0; 4105])])
        .unwrap()
        .commit()
        .unwrap();
    let mut bytes = Vec::new();
    // Each length lies in the middle of a block, as far from its edges as the others.
    for len in [4105, 2057, 1033, 265, 73] {
        cache.truncate(id, len).unwrap();
        let mut samples: Vec<usize> = (0..51)
            .map(|_| {
                let before = BYTES.load(Ordering::Relaxed);
                step();
                let used = BYTES.load(Ordering::Relaxed) - before;
                cache.truncate(id, len).unwrap();
                used
            })
            .collect();
        samples.sort_unstable();
        bytes.push(samples[25]);
    }
    assert!(bytes[4] >= 4 * 32 * 4, "the counter counts");
    assert!(
        bytes.iter().all(|&at_length| at_length <= bytes[4] + 64),
        "bytes at lengths 4105, 2057, 1033, 265, 73: {bytes:?}"
    );
}
