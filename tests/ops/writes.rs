//! Writing, copying and gathering rows: exactly the planned ones change.

use std::sync::mpsc;
use std::time::Duration;

use candle_core::{DType, Tensor};
use candle_paged_attn::Error;
use candle_paged_attn::ops::{PageTable, copy_blocks, gather_kv, portable, write_kv};

use crate::common::paged::{Setup, bits, floats, round, tensor};
use crate::common::{Rng, device};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
type Write = fn(&Tensor, &Tensor, &Tensor, &Tensor, &PageTable) -> candle_paged_attn::Result<()>;
const WRITES: [(&str, Write); 2] = [("kernel", write_kv), ("portable", portable::write_kv)];

/// A pool whose every element is a distinct pattern or NaN.
fn pool(blocks: usize, block_size: usize, heads: usize, dim: usize, dtype: DType) -> Tensor {
    let n = blocks * block_size * heads * dim;
    let data: Vec<f64> = (0..n)
        .map(|i| match i % 3 {
            0 => f64::NAN,
            _ => round(i as f64 * 0.25 - 7.0, dtype),
        })
        .collect();
    tensor(&data, &[blocks, block_size, heads, dim], dtype)
}

fn random(rng: &mut Rng, dims: &[usize], dtype: DType) -> (Vec<f64>, Tensor) {
    let n = dims.iter().product();
    let data: Vec<f64> = (0..n).map(|_| round(rng.normal(), dtype)).collect();
    let t = tensor(&data, dims, dtype);
    (data, t)
}

/// Slots of a table that skips, jumps and pads.
fn table(block_size: usize) -> PageTable {
    let mut table = PageTable::new(block_size).unwrap();
    let b = block_size as i64;
    table.push(&[3], 0, 1, &[3 * b]).unwrap();
    table
        .push(&[], 0, 0, &[-1, 0, -1, 1 % b + 5 * b, -1])
        .unwrap();
    table
        .push(&[4, 1], 0, block_size + 1, &[4 * b + b - 1, b])
        .unwrap();
    table
}

#[test]
fn only_the_planned_rows_change() {
    let mut rng = Rng(4);
    for (who, write) in WRITES {
        for cache_dtype in TYPES {
            for (k_dtype, v_dtype) in [(0, 1), (1, 2), (2, 0), (0, 0)] {
                for block_size in [1, 4, 16] {
                    let (k_dtype, v_dtype) = (TYPES[k_dtype], TYPES[v_dtype]);
                    let table = table(block_size);
                    let k_cache = pool(7, block_size, 2, 8, cache_dtype);
                    let v_cache = pool(7, block_size, 2, 24, cache_dtype);
                    let (k_data, k) = random(&mut rng, &[8, 2, 8], k_dtype);
                    let (v_data, v) = random(&mut rng, &[8, 2, 24], v_dtype);
                    let (mut k_want, mut v_want) = (bits(&k_cache), bits(&v_cache));
                    for (row, &slot) in table.slots().iter().enumerate() {
                        if slot >= 0 {
                            let slot = slot as usize;
                            let rounded = |x: &[f64], n: usize| {
                                bits(&tensor(&x[row * n..][..n], &[n], cache_dtype))
                            };
                            k_want[slot * 16..][..16].copy_from_slice(&rounded(&k_data, 16));
                            v_want[slot * 48..][..48].copy_from_slice(&rounded(&v_data, 48));
                        }
                    }
                    write(&k_cache, &v_cache, &k, &v, &table).unwrap();
                    let what = format!("{who}, {cache_dtype:?}, blocks of {block_size}");
                    assert!(bits(&k_cache) == k_want, "{what}: k");
                    assert!(bits(&v_cache) == v_want, "{what}: v");
                }
            }
        }
    }
}

#[test]
fn c10_strided_sources() {
    let mut rng = Rng(6);
    let table = table(4);
    // q: 3 heads, k and v: 2 heads each, of 8.
    let (_, fused) = random(&mut rng, &[8, 7 * 8], DType::F32);
    let part = |start: usize| {
        fused
            .narrow(1, start * 8, 16)
            .unwrap()
            .reshape((8, 2, 8))
            .unwrap()
    };
    let (k, v) = (part(3), part(5));
    let heads_first = k.transpose(0, 1).unwrap().contiguous().unwrap();
    let dims_first = k.transpose(1, 2).unwrap().contiguous().unwrap();
    let views = [
        k.clone(),
        heads_first.transpose(0, 1).unwrap(),
        dims_first.transpose(1, 2).unwrap(),
    ];
    for (who, write) in WRITES {
        for cache_dtype in TYPES {
            let pools = || (pool(7, 4, 2, 8, cache_dtype), pool(7, 4, 2, 8, cache_dtype));
            let (k_want, v_want) = pools();
            write(
                &k_want,
                &v_want,
                &k.contiguous().unwrap().copy().unwrap(),
                &v.contiguous().unwrap().copy().unwrap(),
                &table,
            )
            .unwrap();
            for view in &views {
                let (k_cache, v_cache) = pools();
                write(&k_cache, &v_cache, view, &v, &table).unwrap();
                assert_eq!(bits(&k_cache), bits(&k_want), "{who}");
                assert_eq!(bits(&v_cache), bits(&v_want), "{who}");
            }
        }
    }
}

/// K and V of a layer interleaved in one allocation.
#[test]
fn c10_interleaved_caches() {
    let mut rng = Rng(8);
    let table = table(4);
    let (_, k) = random(&mut rng, &[8, 2, 8], DType::F32);
    let (_, v) = random(&mut rng, &[8, 2, 8], DType::F32);
    let all = Tensor::stack(
        &[pool(7, 4, 2, 8, DType::F32), pool(7, 4, 2, 8, DType::F32)],
        1,
    )
    .unwrap();
    let view = |i: usize| all.narrow(1, i, 1).unwrap().squeeze(1).unwrap();
    let plain = (pool(7, 4, 2, 8, DType::F32), pool(7, 4, 2, 8, DType::F32));
    write_kv(&view(0), &view(1), &k, &v, &table).unwrap();
    write_kv(&plain.0, &plain.1, &k, &v, &table).unwrap();
    assert_eq!(bits(&view(0)), bits(&plain.0));
    assert_eq!(bits(&view(1)), bits(&plain.1));

    let pairs = [(0, 3), (3, 5), (6, 0)];
    copy_blocks(&[&view(0), &view(1)], &pairs).unwrap();
    copy_blocks(&[&plain.0, &plain.1], &pairs).unwrap();
    assert_eq!(bits(&view(0)), bits(&plain.0));
    assert_eq!(bits(&view(1)), bits(&plain.1));

    let (a, b) = gather_kv(&view(0), &view(1), &table, 2).unwrap();
    let (c, d) = gather_kv(&plain.0, &plain.1, &table, 2).unwrap();
    assert_eq!((bits(&a), bits(&b)), (bits(&c), bits(&d)));
}

#[test]
fn a_written_context_is_the_one_that_is_read() {
    let batch = Setup::new(4, 2, 16, &[(50, 50), (20, 20)]).build();
    let k_cache = batch
        .k_cache
        .ones_like()
        .unwrap()
        .affine(0.0, f64::NAN)
        .unwrap();
    let v_cache = k_cache.copy().unwrap();
    let all = |f: fn(&crate::common::paged::Dense) -> &Vec<f64>| {
        let data: Vec<f64> = batch.seqs.iter().flat_map(|s| f(s).clone()).collect();
        tensor(&data, &[70, 2, 16], DType::F32)
    };
    write_kv(
        &k_cache,
        &v_cache,
        &all(|s| &s.k),
        &all(|s| &s.v),
        &batch.table,
    )
    .unwrap();
    assert_eq!(bits(&k_cache), bits(&batch.k_cache));
    assert_eq!(bits(&v_cache), bits(&batch.v_cache));
}

#[test]
fn a18_copies_have_snapshot_semantics() {
    type Copy = fn(&[&Tensor], &[(u32, u32)]) -> candle_paged_attn::Result<()>;
    for copy in [copy_blocks as Copy, portable::copy_blocks] {
        for dtype in TYPES {
            for pairs in [
                vec![(0, 1), (1, 2)],
                vec![(0, 1), (1, 0)],
                vec![(2, 3), (3, 4), (4, 2), (1, 1), (2, 5)],
                vec![],
            ] {
                // Two caches of different dims, as K and V may have.
                let caches = [pool(6, 4, 2, 8, dtype), pool(6, 4, 1, 24, dtype)];
                let before: Vec<Vec<u32>> = caches.iter().map(bits).collect();
                copy(&[&caches[0], &caches[1]], &pairs).unwrap();
                for (cache, before) in caches.iter().zip(before) {
                    let len = before.len() / 6;
                    let mut want = before.clone();
                    for &(from, to) in &pairs {
                        let (from, to) = (from as usize * len, to as usize * len);
                        want[to..to + len].copy_from_slice(&before[from..from + len]);
                    }
                    assert!(bits(cache) == want, "{pairs:?} in {dtype:?}");
                }
            }
        }
    }
}

#[test]
fn gather_returns_the_listed_tokens_in_order() {
    for released in [None, Some(10)] {
        for dtype in TYPES {
            let mut setup = Setup::new(2, 2, 8, &[(37, 1), (0, 1), (16, 16), (40, 1)]);
            setup.dims.v_dim = 24;
            setup.cache_dtype = dtype;
            setup.release_behind = released;
            let batch = setup.build();
            for (i, seq) in batch.seqs.iter().enumerate() {
                let first = batch.table.first_page()[i] as usize * 16;
                let args = (&batch.k_cache, &batch.v_cache, &batch.table);
                for (k, v) in [
                    gather_kv(args.0, args.1, args.2, i).unwrap(),
                    portable::gather_kv(args.0, args.1, args.2, i).unwrap(),
                ] {
                    assert_eq!(k.dims(), [seq.shape.len - first, 2, 8]);
                    assert_eq!(v.dims(), [seq.shape.len - first, 2, 24]);
                    assert_eq!((k.dtype(), v.dtype()), (dtype, dtype));
                    assert_eq!(floats(&k), seq.k[first * 16..]);
                    assert_eq!(floats(&v), seq.v[first * 48..]);
                }
            }
        }
    }
}

/// Runs `f` on a thread and fails instead of hanging.
fn within_seconds<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(f()));
    receive
        .recv_timeout(Duration::from_secs(20))
        .expect("the op hangs")
}

#[test]
fn c17_a_source_that_aliases_the_cache_is_an_error() {
    for (who, write) in WRITES {
        within_seconds(move || {
            let mut table = PageTable::new(4).unwrap();
            table.push(&[0], 0, 4, &[0, 1, 2, 3]).unwrap();
            let k_cache = pool(3, 4, 2, 8, DType::F32);
            let v_cache = pool(3, 4, 2, 8, DType::F32);
            let before = (bits(&k_cache), bits(&v_cache));
            let rows = |cache: &Tensor| cache.narrow(0, 2, 1).unwrap().squeeze(0).unwrap();
            let fresh = Tensor::ones((4, 2, 8), DType::F32, device()).unwrap();
            for (k, v, name) in [
                (rows(&k_cache), fresh.clone(), "k"),
                (rows(&v_cache), fresh.clone(), "k"),
                (fresh.clone(), rows(&k_cache), "v"),
                (fresh.clone(), rows(&v_cache), "v"),
            ] {
                let error = write(&k_cache, &v_cache, &k, &v, &table).unwrap_err();
                let Error::InvalidArgument { op, what, .. } = &error else {
                    panic!("{who}: {error}");
                };
                assert_eq!((*op, what.as_str()), ("write_kv", name));
                assert_eq!((bits(&k_cache), bits(&v_cache)), before, "{who}");
            }
            // K and V from one tensor of their own are fine.
            write(&k_cache, &v_cache, &fresh, &fresh, &table).unwrap();
        });
    }
}

/// Reading is not writing: queries may be a view of the cache.
#[test]
fn c17_queries_may_alias_the_cache() {
    within_seconds(|| {
        let batch = Setup::new(2, 2, 8, &[(16, 1)]).build();
        let page = batch.table.indices()[0] as usize;
        let q = batch
            .k_cache
            .narrow(0, page, 1)
            .unwrap()
            .squeeze(0)
            .unwrap()
            .narrow(0, 3, 1)
            .unwrap();
        let attend = |q: &Tensor| {
            let (k, v) = (&batch.k_cache, &batch.v_cache);
            candle_paged_attn::ops::paged_attention(q, k, v, &batch.table, &batch.options())
                .unwrap()
        };
        assert_eq!(bits(&attend(&q)), bits(&attend(&q.copy().unwrap())));
    });
}
