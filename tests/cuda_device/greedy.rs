//! A model on the GPU against the same model on the CPU, and what a cache asks of its device.

use candle_core::{DType, Device};
use candle_paged_attn::Error;
use candle_paged_attn::cache::{AddOptions, CacheConfig, CacheSpec, Feed, LayerKv, PagedKvCache};
use candle_paged_attn::models::{CausalLm, Decoder, spec_from_hf};

use crate::checkpoint::{Tiny, tokens};
use crate::gpu;

#[test]
#[ignore = "needs a GPU: scripts/gpu-check.sh"]
fn an_uploaded_table_stays_where_it_is_from_step_to_step() {
    let device = gpu();
    let spec = CacheSpec::uniform(1, 2, 64, DType::F16).unwrap();
    let cache = PagedKvCache::new(&spec, &CacheConfig::blocks(16), device).unwrap();
    let prompt: Vec<u32> = (0..40).collect();
    let id = cache.add(&prompt, AddOptions::default()).unwrap().id;
    let upload = |tokens: &[u32]| {
        let plan = cache.plan(&[Feed::new(id, tokens)]).unwrap();
        let placement = plan.layer(0).unwrap().table.upload(device).unwrap();
        plan.commit().unwrap();
        placement.unwrap()
    };
    upload(&prompt);
    let first = upload(&[1]);
    assert_eq!(upload(&[2]), first);
}

/// Greedy tokens of three sequences in one batch, `count` steps after a prompt in two chunks.
/// Two of the prompts start alike; with `cascade` the steps read that once.
fn greedy(device: &Device, count: usize, cascade: bool) -> Vec<Vec<u32>> {
    let tiny = Tiny {
        head_dim: 64,
        hidden: 192,
        ..Tiny::new(3)
    };
    let spec = spec_from_hf(&tiny.config(), "tiny").unwrap();
    let model = Decoder::load(spec, &tiny.weights(5), DType::F32, device).unwrap();
    let spec = model.cache_spec(DType::F32).unwrap();
    let mut config = CacheConfig::blocks(100);
    config.cascade = cascade.then_some(0);
    let cache = PagedKvCache::new(&spec, &config, device).unwrap();
    let mut out = Vec::new();
    let mut ids = Vec::new();
    let stem = tokens(4, 70, tiny.vocab);
    // The stem is computed before, so that the prompts find its four full blocks.
    let first = cache.add(&stem, AddOptions::default()).unwrap().id;
    let plan = cache.plan(&[Feed::new(first, &stem)]).unwrap();
    model.forward(plan.tokens(), &plan).unwrap();
    plan.commit().unwrap();
    let mut done = Vec::new();
    for (seed, len, stem) in [(1, 90, &stem[..]), (2, 17, &[]), (3, 33, &stem)] {
        let prompt = [stem, &tokens(seed, len, tiny.vocab)].concat();
        let added = cache.add(&prompt, AddOptions::default()).unwrap();
        ids.push(added.id);
        done.push(added.cached_tokens);
        out.push(prompt);
    }
    for step in 0..count + 1 {
        let feeds: Vec<_> = (0..3)
            .map(|s| {
                let end = if step == 0 {
                    (done[s] + out[s].len()) / 2
                } else {
                    out[s].len()
                };
                Feed::new(ids[s], &out[s][done[s]..end])
            })
            .collect();
        let fed: Vec<_> = feeds.iter().map(|feed| feed.tokens.len()).collect();
        let plan = cache.plan(&feeds).unwrap();
        assert_eq!(plan.tokens_saved(), if cascade { 64 } else { 0 });
        let logits = model.forward(plan.tokens(), &plan).unwrap();
        plan.commit().unwrap();
        let next: Vec<u32> = logits.argmax(1).unwrap().to_vec1().unwrap();
        for s in 0..3 {
            done[s] += fed[s];
            if step > 0 {
                out[s].push(next[s]);
            }
        }
    }
    cache.check_invariants().unwrap();
    out
}

#[test]
#[ignore = "needs a GPU: scripts/gpu-check.sh"]
fn greedy_tokens_are_those_of_the_cpu() {
    let want = greedy(&Device::Cpu, 40, false);
    for cascade in [false, true] {
        assert_eq!(greedy(gpu(), 40, cascade), want, "cascade: {cascade}");
    }
}

#[test]
#[ignore = "needs a GPU: scripts/gpu-check.sh"]
fn a_cache_on_the_per_thread_default_stream_is_refused() {
    let device = Device::new_cuda(0).unwrap();
    let spec = CacheSpec::uniform(1, 2, 64, DType::F16).unwrap();
    let error = PagedKvCache::new(&spec, &CacheConfig::blocks(4), &device).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    assert!(
        error.to_string().contains("Device::new_cuda_with_stream"),
        "{error}"
    );
}

#[test]
#[ignore = "needs a GPU: scripts/gpu-check.sh"]
fn a_cache_takes_a_fraction_of_the_free_memory() {
    let spec = CacheSpec::uniform(2, 8, 128, DType::BF16).unwrap();
    let config = CacheConfig::free_memory(0.01);
    let cache = PagedKvCache::new(&spec, &config, gpu()).unwrap();
    let usage = cache.usage()[0];
    let bytes = usage.bytes_per_block * usage.blocks_total as u64;
    // A hundredth of a GPU of 8 to 200 GB, less what is in use.
    assert!((20_000_000..2_000_000_000).contains(&bytes), "{bytes}");
    let LayerKv::Dense { k, .. } = cache.layer_kv(1).unwrap() else {
        panic!("a dense layer");
    };
    assert_eq!(k.dims()[0], usage.blocks_total);
}
