//! An engine on the model, and what its steps took.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheSpec, PagedKvCache, StepPlan};
use candle_paged_attn::engine::{Engine, EngineConfig, Request};
use candle_paged_attn::load::{LoadOptions, Pretrained, from_pretrained};
use candle_paged_attn::models::CausalLm;

use crate::prompt;

/// A model that counts the time of its forward passes.
pub struct Timed {
    pretrained: Pretrained,
    nanos: AtomicU64,
}

impl CausalLm for Timed {
    fn forward(&self, tokens: &Tensor, plan: &StepPlan) -> candle_paged_attn::Result<Tensor> {
        let start = Instant::now();
        let logits = self.pretrained.model.forward(tokens, plan);
        let nanos = start.elapsed().as_nanos() as u64;
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
        logits
    }

    fn cache_spec(&self, dtype: DType) -> candle_paged_attn::Result<CacheSpec> {
        self.pretrained.model.cache_spec(dtype)
    }

    fn vocab_size(&self) -> usize {
        self.pretrained.model.vocab_size()
    }

    fn context_length(&self) -> usize {
        self.pretrained.model.context_length()
    }
}

pub struct Model(Arc<Timed>);

/// What a number of steps took and held.
#[derive(Default)]
pub struct Run {
    pub time: Duration,
    /// Of this, time in the model's forward pass.
    pub forward: Duration,
    pub tokens: usize,
    /// Sequences that hold blocks, on average over time.
    pub in_flight: f64,
    pub most_blocks: usize,
}

impl Model {
    pub fn load(gguf: &Path) -> Result<Self> {
        let options = LoadOptions::default().with_dtype(DType::F32);
        Ok(Self(Arc::new(Timed {
            pretrained: from_pretrained(gguf, &options)?,
            nanos: AtomicU64::new(0),
        })))
    }

    /// An engine with a pool of `tokens` tokens in f32.
    pub fn engine(&self, tokens: usize, config: EngineConfig) -> Result<Engine<Timed>> {
        let spec = self.0.cache_spec(DType::F32)?;
        let cache = PagedKvCache::new(&spec, &CacheConfig::tokens(tokens), &Device::Cpu)?;
        Ok(Engine::new(self.0.clone(), cache, config)?)
    }

    /// `len` tokens of English; prompts of different topics and lengths differ from the start.
    pub fn prompt(&self, len: usize, topic: usize) -> Result<Vec<u32>> {
        let mut tokens = prompt::tokens(&self.0.pretrained, len, topic)?;
        if let Some(first) = tokens.first_mut() {
            // Any token of its own: nothing is shared by chance.
            *first = 1000 + topic as u32;
        }
        Ok(tokens)
    }
}

/// A request for exactly `tokens` greedy tokens.
pub fn request(prompt: &[u32], tokens: usize) -> Request {
    let mut request = Request::new(prompt).with_max_tokens(tokens);
    request.ignore_eos = true;
    request
}

/// Steps while `go_on` says so and there is work.
pub fn run(engine: &mut Engine<Timed>, mut go_on: impl FnMut(&Run) -> bool) -> Result<Run> {
    let mut run = Run::default();
    let mut held = 0.0;
    while engine.has_work() && go_on(&run) {
        let forward = engine.model().nanos.load(Ordering::Relaxed);
        let start = Instant::now();
        let outputs = engine.step()?;
        let time = start.elapsed();
        let forward = engine.model().nanos.load(Ordering::Relaxed) - forward;
        run.time += time;
        run.forward += Duration::from_nanos(forward);
        run.tokens += outputs.iter().map(|o| o.tokens.len()).sum::<usize>();
        // Not part of a step: the figures cost a walk over the tables.
        let stats = engine.stats();
        held += stats.running as f64 * time.as_secs_f64();
        run.most_blocks = run.most_blocks.max(stats.blocks_used);
    }
    run.in_flight = held / run.time.as_secs_f64();
    Ok(run)
}
