//! This crate's side.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::cache::{AddOptions, CacheConfig, Feed, Logits, PagedKvCache, SequenceId};
use candle_paged_attn::load::{LoadOptions, Pretrained, from_pretrained};
use candle_paged_attn::models::CausalLm;

use crate::stock::CHUNK;

/// Tokens the cache holds: the longest context and the sequences decoded together, each with
/// its steps, in whole blocks.
const CAPACITY: usize = 8192;

pub struct Ours {
    pub pretrained: Pretrained,
    pub cache: PagedKvCache,
}

/// A prompt whose K/V are in the cache, and the token that follows it.
pub struct Sequence {
    pub id: SequenceId,
    pub len: usize,
    pub next: u32,
}

/// What a timed decode took and gave, tokens per sequence.
pub struct Decoded {
    pub time: Duration,
    pub tokens: Vec<Vec<u32>>,
}

impl Ours {
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let pretrained = from_pretrained(path, options)?;
        let spec = pretrained.model.cache_spec(DType::F32)?;
        let cache = PagedKvCache::new(&spec, &CacheConfig::tokens(CAPACITY), &Device::Cpu)?;
        Ok(Self { pretrained, cache })
    }

    /// One step, committed; its logits.
    pub fn step(&self, feeds: &[Feed<'_>]) -> Result<Tensor> {
        let plan = self.cache.plan(feeds)?;
        let logits = self.pretrained.model.forward(plan.tokens(), &plan)?;
        plan.commit()?;
        Ok(logits)
    }

    /// Computes a prompt, untimed.
    pub fn start(&self, prompt: &[u32]) -> Result<Sequence> {
        let id = self
            .cache
            .add(prompt, AddOptions::default().unindexed())?
            .id;
        let mut logits = None;
        for chunk in prompt.chunks(CHUNK) {
            logits = Some(self.step(&[Feed::new(id, chunk)])?);
        }
        Ok(Sequence {
            id,
            len: prompt.len(),
            next: argmax(&logits.context("no prompt")?)?[0],
        })
    }

    pub fn remove(&self, sequence: Sequence) -> Result<()> {
        Ok(self.cache.remove(sequence.id)?)
    }

    /// From an unknown prompt to its next token.
    pub fn prefill(&self, prompt: &[u32]) -> Result<Duration> {
        let start = Instant::now();
        let id = self
            .cache
            .add(prompt, AddOptions::default().unindexed())?
            .id;
        argmax(&self.step(&[Feed::new(id, prompt).with_logits(Logits::Last)])?)?;
        let time = start.elapsed();
        self.cache.remove(id)?;
        Ok(time)
    }

    /// Greedy tokens of all sequences, one step for all; then rewinds them, untimed.
    pub fn decode(&self, sequences: &[&Sequence], steps: usize) -> Result<Decoded> {
        let mut next: Vec<u32> = sequences.iter().map(|s| s.next).collect();
        let mut tokens = vec![Vec::with_capacity(steps); sequences.len()];
        let start = Instant::now();
        for _ in 0..steps {
            let feeds: Vec<_> = sequences
                .iter()
                .zip(&next)
                .map(|(sequence, token)| Feed::new(sequence.id, std::slice::from_ref(token)))
                .collect();
            let logits = self.step(&feeds)?;
            next = argmax(&logits)?;
            for (tokens, next) in tokens.iter_mut().zip(&next) {
                tokens.push(*next);
            }
        }
        let time = start.elapsed();
        for sequence in sequences {
            self.cache.truncate(sequence.id, sequence.len)?;
        }
        Ok(Decoded { time, tokens })
    }
}

pub fn argmax(logits: &Tensor) -> Result<Vec<u32>> {
    Ok(logits.argmax(1)?.to_vec1()?)
}
