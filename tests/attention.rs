//! The drop-in layer and the drop-in cache, against candle's own attention and `KvCache`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::{D, DType, Device, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_paged_attn::cache::{
    AddOptions, CacheConfig, CacheSpec, Feed, LayerShape, PagedKvCache,
};
use candle_paged_attn::{Error, LayerCache, PagedAttention};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;

fn cache(windows: &[Option<usize>], blocks: usize, dtype: DType) -> PagedKvCache {
    let shape = |&window| LayerShape {
        window,
        kv_heads: KV_HEADS,
        k_dim: DIM,
        v_dim: DIM,
    };
    let shapes: Vec<_> = windows.iter().map(shape).collect();
    let spec = CacheSpec::from_layers(&shapes, dtype).unwrap();
    PagedKvCache::new(
        &spec,
        &CacheConfig::blocks(blocks).with_block_size(4),
        &Device::Cpu,
    )
    .unwrap()
}

fn random(seed: u64, shape: &[usize]) -> Tensor {
    // A small generator of our own, so that equal seeds give equal tensors.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let n = shape.iter().product();
    let values: Vec<f32> = (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Attention as candle's models write it: q `[1, heads, n, dim]`, k and v of the whole context
/// `[1, kv_heads, len, dim]`.
fn candle_attention(q: &Tensor, k: &Tensor, v: &Tensor, window: Option<usize>) -> Tensor {
    let repeat =
        |x: &Tensor| candle_transformers::utils::repeat_kv(x.clone(), HEADS / KV_HEADS).unwrap();
    let (n, len) = (q.dim(2).unwrap(), k.dim(2).unwrap());
    let mask: Vec<f32> = (0..n)
        .flat_map(|i| {
            let position = len - n + i;
            (0..len).map(move |j| {
                let seen = j <= position && window.is_none_or(|w| j + w > position);
                if seen { 0.0 } else { f32::NEG_INFINITY }
            })
        })
        .collect();
    let mask = Tensor::from_vec(mask, (n, len), &Device::Cpu).unwrap();
    let scores = (q.matmul(&repeat(k).t().unwrap()).unwrap() / (DIM as f64).sqrt()).unwrap();
    let weights = candle_nn::ops::softmax_last_dim(&scores.broadcast_add(&mask).unwrap()).unwrap();
    weights.matmul(&repeat(v).contiguous().unwrap()).unwrap()
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    (a - b)
        .unwrap()
        .abs()
        .unwrap()
        .flatten_all()
        .unwrap()
        .max(D::Minus1)
        .unwrap()
        .to_scalar()
        .unwrap()
}

fn attention() -> PagedAttention {
    PagedAttention::new((DIM as f32).powf(-0.5))
}

#[test]
fn both_forms_equal_candles_attention_chunk_by_chunk() {
    for window in [None, Some(5)] {
        let cache = cache(&[window], 32, DType::F32);
        let (q, k, v) = (
            random(1, &[1, HEADS, 13, DIM]),
            random(2, &[1, KV_HEADS, 13, DIM]),
            random(3, &[1, KV_HEADS, 13, DIM]),
        );
        for heads_first in [true, false] {
            let id = cache
                .add(&[0; 13], AddOptions::default().unindexed())
                .unwrap()
                .id;
            let mut start = 0;
            for n in [6, 1, 4, 1, 1] {
                let tokens = vec![0; n];
                let plan = cache.plan(&[Feed::new(id, &tokens)]).unwrap();
                let part = |x: &Tensor, end: usize| x.narrow(2, end - n, n).unwrap();
                let end = start + n;
                let out = if heads_first {
                    attention()
                        .forward(0, &part(&q, end), &part(&k, end), &part(&v, end), &plan)
                        .unwrap()
                } else {
                    let rows =
                        |x: &Tensor| part(x, end).squeeze(0).unwrap().transpose(0, 1).unwrap();
                    let out = attention()
                        .forward(0, &rows(&q), &rows(&k), &rows(&v), &plan)
                        .unwrap();
                    out.transpose(0, 1).unwrap().unsqueeze(0).unwrap()
                };
                plan.commit().unwrap();
                let so_far = |x: &Tensor| x.narrow(2, 0, end).unwrap().contiguous().unwrap();
                let expected = candle_attention(
                    &part(&q, end).contiguous().unwrap(),
                    &so_far(&k),
                    &so_far(&v),
                    window,
                );
                assert!(distance(&out, &expected) < 1e-5, "{window:?} {start}+{n}");
                start = end;
            }
            cache.remove(id).unwrap();
        }
    }
}

#[test]
fn a_batch_in_candles_shape_is_one_feed_per_entry() {
    let cache = cache(&[None], 32, DType::F32);
    let (q, k, v) = (
        random(4, &[3, HEADS, 5, DIM]),
        random(5, &[3, KV_HEADS, 5, DIM]),
        random(6, &[3, KV_HEADS, 5, DIM]),
    );
    let ids: Vec<_> = (0..3)
        .map(|_| {
            cache
                .add(&[0; 5], AddOptions::default().unindexed())
                .unwrap()
                .id
        })
        .collect();
    let feeds: Vec<_> = ids.iter().map(|&id| Feed::new(id, &[0; 5])).collect();
    let plan = cache.plan(&feeds).unwrap();
    let out = attention().forward(0, &q, &k, &v, &plan).unwrap();
    for i in 0..3 {
        let entry = |x: &Tensor| x.narrow(0, i, 1).unwrap().contiguous().unwrap();
        let expected = candle_attention(&entry(&q), &entry(&k), &entry(&v), None);
        assert!(distance(&entry(&out), &expected) < 1e-5);
    }
    // Feeds of different lengths have no such shape.
    drop(plan);
    let plan = cache
        .plan(&[Feed::new(ids[0], &[0; 5]), Feed::new(ids[1], &[0; 4])])
        .unwrap();
    let error = attention()
        .forward(0, &q.narrow(0, 0, 2).unwrap(), &k, &v, &plan)
        .unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let integers = q.to_dtype(DType::U32).unwrap();
    let error = attention()
        .forward(0, &integers, &k, &v, &plan)
        .unwrap_err();
    assert!(matches!(error, Error::Dtype { tensor: "q", .. }), "{error}");
    let error = attention().forward(1, &q, &k, &v, &plan).unwrap_err();
    assert!(error.to_string().contains("a layer below 1"), "{error}");
}

#[test]
fn compute_and_cache_dtypes_may_differ() {
    let (q, k, v) = (
        random(7, &[9, HEADS, DIM]),
        random(8, &[9, KV_HEADS, DIM]),
        random(9, &[9, KV_HEADS, DIM]),
    );
    let batched = |x: &Tensor| {
        x.transpose(0, 1)
            .unwrap()
            .unsqueeze(0)
            .unwrap()
            .contiguous()
            .unwrap()
    };
    let expected = candle_attention(&batched(&q), &batched(&k), &batched(&v), None);
    for compute in [DType::F32, DType::F16, DType::BF16] {
        for stored in [DType::F32, DType::F16, DType::BF16] {
            let cache = cache(&[None], 8, stored);
            let id = cache.add(&[0; 9], AddOptions::default()).unwrap().id;
            let plan = cache.plan(&[Feed::new(id, &[0; 9])]).unwrap();
            let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(compute).unwrap());
            let out = attention().forward(0, &q, &k, &v, &plan).unwrap();
            assert_eq!(out.dtype(), compute);
            // The coarser of the two roundings, relative to outputs below 1.
            let coarse = [compute, stored].contains(&DType::BF16);
            let exact = [compute, stored] == [DType::F32; 2];
            let tolerance = if exact {
                1e-5
            } else if coarse {
                2e-2
            } else {
                3e-3
            };
            let out = batched(&out.to_dtype(DType::F32).unwrap());
            assert!(
                distance(&out, &expected) < tolerance,
                "{compute:?} over {stored:?}"
            );
        }
    }
}

/// One forward pass of a model of two layers whose attention code knows only `append`.
fn append_all(
    layers: &mut [LayerCache],
    seed: u64,
    n: usize,
) -> candle_paged_attn::Result<Vec<(Tensor, Tensor)>> {
    let inputs = (0..layers.len() as u64).map(|i| step_input(seed + 10 * i, n));
    layers
        .iter_mut()
        .zip(inputs)
        .map(|(layer, (k, v))| layer.append(&k, &v))
        .collect()
}

fn step_input(seed: u64, n: usize) -> (Tensor, Tensor) {
    (
        random(seed, &[1, KV_HEADS, n, DIM]),
        random(seed + 1, &[1, KV_HEADS, n, DIM]),
    )
}

fn candle_append(caches: &mut [KvCache], seed: u64, n: usize) -> Vec<(Tensor, Tensor)> {
    let inputs = (0..caches.len() as u64).map(|i| step_input(seed + 10 * i, n));
    caches
        .iter_mut()
        .zip(inputs)
        .map(|(cache, (k, v))| cache.append(&k, &v).unwrap())
        .collect()
}

fn assert_same(ours: &[(Tensor, Tensor)], theirs: &[(Tensor, Tensor)]) {
    for ((k, v), (k2, v2)) in ours.iter().zip(theirs) {
        assert_eq!(distance(k, k2), 0.0);
        assert_eq!(distance(v, v2), 0.0);
        assert!(k.is_contiguous() && v.is_contiguous());
    }
}

#[test]
fn layer_cache_returns_what_candles_kv_cache_returns() {
    let cache = cache(&[None, None], 32, DType::F32);
    let mut ours = cache.layers();
    let mut theirs: Vec<_> = (0..2).map(|_| KvCache::new(2, 64)).collect();
    for (seed, n) in [(100, 7), (200, 1), (300, 1), (400, 5)] {
        let theirs = candle_append(&mut theirs, seed, n);
        assert_same(&append_all(&mut ours, seed, n).unwrap(), &theirs);
    }
    assert_eq!(ours[0].current_seq_len(), theirs[0].current_seq_len());
    ours.iter_mut().for_each(LayerCache::reset);
    assert_eq!(ours[1].current_seq_len(), 0);
    assert_eq!(cache.usage()[0].blocks_used, 0);
    theirs.iter_mut().for_each(KvCache::reset);
    assert_same(
        &append_all(&mut ours, 500, 3).unwrap(),
        &candle_append(&mut theirs, 500, 3),
    );
    drop(ours);
    assert_eq!(
        (cache.num_sequences(), cache.usage()[0].blocks_used),
        (0, 0)
    );
    cache.check_invariants().unwrap();
}

#[test]
fn cloning_the_layers_forks_the_sequence_once() {
    let cache = cache(&[None, None], 32, DType::F32);
    let mut first = cache.layers();
    append_all(&mut first, 100, 6).unwrap();
    let mut second = first.clone();
    assert_eq!(cache.num_sequences(), 2);
    assert_eq!(cache.usage()[0].blocks_used, 2);
    let mut third = first.clone();
    assert_eq!(cache.num_sequences(), 3);

    let replay = |seeds: &[(u64, usize)]| {
        let mut caches: Vec<_> = (0..2).map(|_| KvCache::new(2, 64)).collect();
        let steps = seeds
            .iter()
            .map(|&(seed, n)| candle_append(&mut caches, seed, n));
        steps.collect::<Vec<_>>().pop().unwrap()
    };
    let a = append_all(&mut first, 200, 2).unwrap();
    let b = append_all(&mut second, 300, 2).unwrap();
    let c = append_all(&mut third, 400, 1).unwrap();
    let d = append_all(&mut first, 500, 1).unwrap();
    assert_same(&a, &replay(&[(100, 6), (200, 2)]));
    assert_same(&b, &replay(&[(100, 6), (300, 2)]));
    assert_same(&c, &replay(&[(100, 6), (400, 1)]));
    assert_same(&d, &replay(&[(100, 6), (200, 2), (500, 1)]));
    drop((first, second, third));
    assert_eq!(cache.num_sequences(), 0);
}

#[test]
fn layers_out_of_order_are_an_error_and_the_step_is_undone() {
    let cache = cache(&[None, None], 4, DType::F32);
    let mut layers = cache.layers();
    append_all(&mut layers, 100, 3).unwrap();
    let (k, v) = step_input(200, 2);
    let error = layers[1].append(&k, &v).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    layers[0].append(&k, &v).unwrap();
    assert_eq!(
        (layers[0].current_seq_len(), layers[1].current_seq_len()),
        (5, 3)
    );
    // Another number of tokens than the first layer appended.
    let (long_k, long_v) = step_input(200, 3);
    assert!(matches!(
        layers[1].append(&long_k, &long_v),
        Err(Error::Shape { .. })
    ));
    assert_eq!(layers[0].current_seq_len(), 3);
    // A clone in the middle of a step cannot fork, and says so when it is used.
    layers[0].append(&k, &v).unwrap();
    let mut clone = layers[0].clone();
    clone.reset();
    assert_eq!(
        (clone.current_seq_len(), layers[0].current_seq_len()),
        (0, 5)
    );
    assert!(
        clone
            .append(&k, &v)
            .unwrap_err()
            .to_string()
            .contains("outstanding")
    );
    layers[1].append(&k, &v).unwrap();
    // A step that does not fit leaves the sequence as it was.
    let error = append_all(&mut layers, 300, 20).unwrap_err();
    assert!(matches!(error, Error::OutOfBlocks { .. }), "{error}");
    assert_eq!(layers[0].current_seq_len(), 5);
    append_all(&mut layers, 300, 1).unwrap();
    let batch = random(1, &[2, KV_HEADS, 1, DIM]);
    assert!(matches!(
        layers[0].append(&batch, &batch),
        Err(Error::Shape { .. })
    ));
    // A stale session after the cache was cleared starts anew.
    cache.clear();
    assert!(append_all(&mut layers, 400, 1).is_err());
    layers.iter_mut().for_each(LayerCache::reset);
    append_all(&mut layers, 400, 1).unwrap();
}
