//! Steps over a paged cache.

use candle_core::{DType, Device};
use candle_paged_attn::cache::{AddOptions, CacheConfig, Feed, Logits, PagedKvCache, SequenceId};
use candle_paged_attn::models::{CausalLm, Decoder, WeightSource, spec_from_hf};

use crate::checkpoint::Tiny;

/// The decoder of a checkpoint under Hugging Face's names.
pub fn load(tiny: &Tiny, weights: &dyn WeightSource, dtype: DType) -> Decoder {
    let spec = spec_from_hf(&tiny.config(), "tiny").unwrap();
    Decoder::load(spec, weights, dtype, &Device::Cpu).unwrap()
}

/// A cache of 600 blocks for `model`, with rows of `dtype`.
pub fn cache(model: &Decoder, dtype: DType) -> PagedKvCache {
    let spec = model.cache_spec(dtype).unwrap();
    PagedKvCache::new(&spec, &CacheConfig::blocks(600), &Device::Cpu).unwrap()
}

/// A sequence that finds nothing cached.
pub fn sequence(cache: &PagedKvCache, prompt: &[u32]) -> SequenceId {
    let options = AddOptions::default().without_prefix_reads();
    cache.add(prompt, options).unwrap().id
}

/// Runs one step and commits it: the logits of every row.
pub fn step(
    model: &Decoder,
    cache: &PagedKvCache,
    feeds: &[(SequenceId, &[u32])],
) -> Vec<Vec<f32>> {
    let feeds: Vec<Feed<'_>> = feeds
        .iter()
        .map(|(sequence, tokens)| Feed::new(*sequence, tokens).with_logits(Logits::All))
        .collect();
    let plan = cache.plan(&feeds).unwrap();
    let logits = model.forward(plan.tokens(), &plan).unwrap();
    assert_eq!(logits.dtype(), DType::F32);
    plan.commit().unwrap();
    logits.to_vec2().unwrap()
}

/// Runs `tokens` alone, in chunks of `chunk`: the logits of every row.
pub fn in_chunks(model: &Decoder, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let cache = cache(model, DType::F32);
    let sequence = sequence(&cache, tokens);
    let chunks = tokens.chunks(chunk);
    chunks
        .flat_map(|chunk| step(model, &cache, &[(sequence, chunk)]))
        .collect()
}
