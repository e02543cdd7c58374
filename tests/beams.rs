//! Beam search, token by token, against transformers: a small random llama and what
//! `scripts/beam_goldens.py` found with it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/random_llama.rs"]
mod random_llama;

use candle_core::{DType, Device};
use candle_paged_attn::cache::{CacheConfig, PagedKvCache};
use candle_paged_attn::engine::{
    BeamSearch, EarlyStopping, Engine, EngineConfig, FinishReason, Request,
};
use candle_paged_attn::models::CausalLm;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Search {
    prompt: Vec<u32>,
    num_beams: usize,
    num_return_sequences: usize,
    length_penalty: f32,
    /// `true`, `false` or `"never"`.
    early_stopping: Value,
    max_new_tokens: usize,
    #[serde(default)]
    eos_token_id: Vec<u32>,
    sequences: Vec<Vec<u32>>,
    scores: Vec<f64>,
}

impl Search {
    fn request(&self) -> Request {
        let mut beams = BeamSearch::new(self.num_beams);
        beams.length_penalty = self.length_penalty;
        beams.early_stopping = match &self.early_stopping {
            Value::Bool(true) => EarlyStopping::Yes,
            Value::Bool(false) => EarlyStopping::Heuristic,
            never => {
                assert_eq!(never, "never");
                EarlyStopping::Never
            }
        };
        let mut request = Request::new(self.prompt.as_slice())
            .with_max_tokens(self.max_new_tokens)
            .with_n(self.num_return_sequences)
            .with_beams(beams);
        request.stop_ids = self.eos_token_id.clone();
        request
    }
}

fn searches() -> Vec<Search> {
    let path = random_llama::folder().join("searches.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// All searches at once, in a pool of `tokens` tokens. Answers how often it preempted.
fn assert_as_transformers(tokens: usize, block_size: usize) -> u64 {
    let (model, searches) = (random_llama::load(), searches());
    assert_eq!(searches.len(), 280);
    let spec = model.cache_spec(DType::F32).unwrap();
    let size = CacheConfig::tokens(tokens).with_block_size(block_size);
    let cache = PagedKvCache::new(&spec, &size, &Device::Cpu).unwrap();
    let config = EngineConfig::default().with_max_sequences(32);
    let mut engine = Engine::new(model, cache, config).unwrap();
    let requests = searches.iter().map(Search::request).collect();
    let answers = engine.generate(requests, |_| {}).unwrap();
    for (case, (search, answer)) in searches.iter().zip(answers).enumerate() {
        let samples = answer.unwrap().samples;
        let found: Vec<_> = samples.iter().map(|sample| &sample.tokens).collect();
        let expected: Vec<_> = search.sequences.iter().collect();
        assert_eq!(found, expected, "search {case}");
        for (sample, score) in samples.iter().zip(&search.scores) {
            let far = (sample.score.unwrap() - score).abs() / score.abs().max(1.0);
            assert!(far < 1e-4, "search {case}: {far}");
            let last = sample.tokens[sample.tokens.len() - 1];
            let reason = match search.eos_token_id.contains(&last) {
                true => FinishReason::StopToken(last),
                false => FinishReason::Length,
            };
            assert_eq!(sample.finish.as_ref(), Some(&reason), "search {case}");
        }
    }
    assert_eq!(engine.stats().blocks_used, 0);
    engine.stats().preemptions
}

#[test]
fn searches_are_those_of_transformers() {
    assert_as_transformers(16_384, 16);
}

#[test]
fn searches_in_a_pool_that_preempts_are_those_of_transformers() {
    assert!(assert_as_transformers(160, 4) > 0);
}

/// The searches are about every option, and many of them end before the last token.
#[test]
fn the_stored_searches_cover_the_options() {
    let searches = searches();
    for early_stopping in [Value::Bool(true), Value::Bool(false), "never".into()] {
        for positive in [true, false] {
            let those = searches.iter().filter(|search| {
                search.early_stopping == early_stopping && (search.length_penalty > 0.0) == positive
            });
            let early = |search: &&Search| search.sequences[0].len() < search.max_new_tokens;
            assert!(
                those.filter(early).count() > 2,
                "{early_stopping} {positive}"
            );
        }
    }
    assert!(searches.iter().any(|search| search.eos_token_id.is_empty()));
    assert!(searches.iter().any(|search| search.eos_token_id.len() > 1));
}
