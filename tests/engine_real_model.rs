//! SmolLM2-135M-Instruct through the engine: recorded greedy answers, batched, chunked and
//! preempted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../examples/support/mod.rs"]
mod support;

use std::sync::Arc;

use candle_core::{DType, Device};
use candle_paged_attn::cache::{CacheConfig, PagedKvCache};
use candle_paged_attn::engine::{Engine, EngineConfig, Request};
use candle_paged_attn::load::{LoadOptions, from_pretrained};
use candle_paged_attn::models::CausalLm;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    name: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

#[test]
fn golden_answers_from_a_small_pool() {
    let Some(path) = support::model_or_skip("golden_answers_from_a_small_pool") else {
        return;
    };
    const TOKENS: usize = 24;
    let json = include_str!("data/smollm2_135m_instruct_f32.json");
    let goldens: Vec<Golden> = serde_json::from_str(json).unwrap();
    let goldens: Vec<_> = goldens
        .into_iter()
        .filter(|g| g.prompt_ids.len() <= 64)
        .collect();
    assert_eq!(goldens.len(), 11);

    let options = LoadOptions::default().with_dtype(DType::F32);
    let pretrained = from_pretrained(path, &options).unwrap();
    let model = Arc::new(pretrained.model);
    let spec = model.cache_spec(DType::F32).unwrap();
    // Room for about three of them: the others wait, and some are preempted.
    let size = CacheConfig::tokens(200).with_block_size(4);
    let cache = PagedKvCache::new(&spec, &size, &Device::Cpu).unwrap();
    let config = EngineConfig::default()
        .with_max_sequences(8)
        .with_max_batch_tokens(48);
    let mut engine = Engine::new(model, cache, config)
        .unwrap()
        .with_tokenizer(pretrained.tokenizer);
    let requests = goldens
        .iter()
        .map(|golden| Request::new(golden.prompt_ids.as_slice()).with_max_tokens(TOKENS))
        .collect();
    let answers = engine.generate(requests, |_| {}).unwrap();
    for (golden, answer) in goldens.iter().zip(answers) {
        let answer = answer.unwrap();
        let sample = &answer.samples[0];
        assert_eq!(
            sample.tokens,
            golden.greedy_ids[..TOKENS],
            "{}",
            golden.name
        );
        assert!(!sample.text.is_empty());
    }
    assert!(
        engine.stats().preemptions > 0,
        "the pool was meant to be too small"
    );
    assert_eq!(engine.stats().blocks_used, 0);
}
