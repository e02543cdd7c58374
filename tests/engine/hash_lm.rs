//! A toy language model: its logits are a hash of the tokens that it reads back from the K/V
//! rows of the cache, exact whatever the chunks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::cache::{
    CacheConfig, CacheSpec, LayerKv, LayerShape, PagedKvCache, StepPlan,
};
use candle_paged_attn::engine::{Answer, Engine, EngineConfig, FinishReason, Request, RequestId};
use candle_paged_attn::models::CausalLm;
use candle_paged_attn::ops::PageTable;
use candle_paged_attn::{Error, Result, ops};

use crate::common::Rng;

#[derive(Debug)]
pub struct HashLm {
    pub vocab: usize,
    /// Window of each layer.
    pub windows: Vec<Option<usize>>,
    /// The same logits for any history, instead of a hash.
    pub fixed: Option<Vec<f32>>,
    /// Steps that fail before one succeeds.
    pub failures: AtomicUsize,
    /// Histories that end with this token have NaN for logits.
    pub poison: Option<u32>,
    /// Forward passes so far.
    pub steps: AtomicUsize,
}

pub fn model(vocab: usize) -> HashLm {
    HashLm {
        vocab,
        windows: vec![None],
        fixed: None,
        failures: AtomicUsize::new(0),
        poison: None,
        steps: AtomicUsize::new(0),
    }
}

impl HashLm {
    /// The logits after `history`.
    pub fn logits(&self, history: &[u32]) -> Vec<f32> {
        if self.poison.is_some() && history.last() == self.poison.as_ref() {
            return vec![f32::NAN; self.vocab];
        }
        if let Some(fixed) = &self.fixed {
            return fixed.clone();
        }
        let mut hash = 0u64;
        for window in &self.windows {
            let seen = window.unwrap_or(history.len()).min(history.len());
            for &token in &history[history.len() - seen..] {
                hash = Rng(hash ^ u64::from(token)).next();
            }
        }
        let mut rng = Rng(hash);
        (0..self.vocab)
            .map(|_| rng.unit() as f32 * 8.0 - 4.0)
            .collect()
    }

    /// The greedy answer, without any cache.
    pub fn greedy(&self, prompt: &[u32], tokens: usize) -> Vec<u32> {
        let mut history = prompt.to_vec();
        for _ in 0..tokens {
            let logits = self.logits(&history);
            let best = (0..logits.len())
                .rev()
                .max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            history.push(best.unwrap() as u32);
        }
        history[prompt.len()..].to_vec()
    }

    fn shapes(&self) -> Vec<LayerShape> {
        let shape = |&window| LayerShape {
            window,
            kv_heads: 1,
            k_dim: 8,
            v_dim: 8,
        };
        self.windows.iter().map(shape).collect()
    }
}

impl CausalLm for HashLm {
    fn forward(&self, tokens: &Tensor, plan: &StepPlan) -> Result<Tensor> {
        let tokens: Vec<u32> = tokens.to_vec1().unwrap();
        let rows = |first: &dyn Fn(usize) -> f32| {
            let flat: Vec<f32> = (0..tokens.len())
                .flat_map(|row| {
                    let mut values = [0f32; 8];
                    values[0] = first(row);
                    values[1] = plan.positions()[row] as f32;
                    values
                })
                .collect();
            Tensor::from_vec(flat, (tokens.len(), 1, 8), &Device::Cpu).unwrap()
        };
        let (k, v) = (
            rows(&|row| tokens[row] as f32),
            rows(&|row| -(tokens[row] as f32)),
        );
        // Tokens of each sequence that each layer reads back.
        let mut read: Vec<Vec<(usize, Vec<u32>)>> = Vec::new();
        for layer in 0..self.windows.len() {
            let step = plan.layer(layer)?;
            let table = step.table;
            let LayerKv::Dense { k: ks, v: vs } = step.kv else {
                panic!("dense layers only")
            };
            assert_reads_its_window(table, self.windows[layer]);
            ops::write_kv(ks, vs, &k, &v, table)?;
            let sequences = (0..table.num_seqs()).map(|seq| {
                let (ks, vs) = ops::gather_kv(ks, vs, table, seq).unwrap();
                let (ks, vs) = (values(&ks), values(&vs));
                let first = ks.first().map_or(0, |row| row[1] as usize);
                for (i, (k, v)) in ks.iter().zip(&vs).enumerate() {
                    assert_eq!((k[1], v[1]), ((first + i) as f32, (first + i) as f32));
                    assert_eq!(k[0], -v[0]);
                }
                (first, ks.iter().map(|row| row[0] as u32).collect())
            });
            read.push(sequences.collect());
        }
        self.steps.fetch_add(1, Ordering::Relaxed);
        let failing = |left: usize| left.checked_sub(1);
        let failed = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, failing);
        if failed.is_ok() {
            return Err(Error::Candle(candle_core::Error::Msg("injected".into())));
        }

        let step = plan.layer(0)?;
        let table = step.table;
        let offsets = table.query_offsets();
        let mut logits = Vec::new();
        for &row in plan.logit_rows() {
            let seq = offsets.partition_point(|&offset| offset <= row) - 1;
            let behind = (offsets[seq + 1] - 1 - row) as usize;
            let len = table.seq_lens()[seq] as usize - behind;
            // Each layer sees the last tokens up to its window; the widest knows the most.
            let histories = read.iter().map(|layer| &layer[seq]);
            let mut hash = 0u64;
            let mut history = vec![];
            for ((first, tokens), window) in histories.zip(&self.windows) {
                let from = len - window.unwrap_or(len).min(len);
                history = tokens[from - first..len - first].to_vec();
                for &token in &history {
                    hash = Rng(hash ^ u64::from(token)).next();
                }
            }
            if self.fixed.is_some() || self.poison.is_some() {
                logits.extend(self.logits(&history));
            } else {
                let mut rng = Rng(hash);
                logits.extend((0..self.vocab).map(|_| rng.unit() as f32 * 8.0 - 4.0));
            }
        }
        let rows = plan.logit_rows().len();
        Ok(Tensor::from_vec(logits, (rows, self.vocab), &Device::Cpu).unwrap())
    }

    fn cache_spec(&self, dtype: DType) -> Result<CacheSpec> {
        CacheSpec::from_layers(&self.shapes(), dtype)
    }

    fn vocab_size(&self) -> usize {
        self.vocab
    }

    fn context_length(&self) -> usize {
        4096
    }
}

/// The pages of each sequence are those from the first key that its first row sees on.
fn assert_reads_its_window(table: &PageTable, window: Option<usize>) {
    let (size, offsets) = (table.block_size(), table.query_offsets());
    for seq in 0..table.num_seqs() {
        let end = table.seq_lens()[seq] as usize;
        let start = end - (offsets[seq + 1] - offsets[seq]) as usize;
        let seen = window.map_or(0, |window| (start + 1).saturating_sub(window));
        let (pages, first) = table.pages(seq);
        assert_eq!(first, seen / size, "{start} to {end}, {window:?}");
        assert_eq!(pages.len(), end.div_ceil(size) - first);
    }
}

fn values(rows: &Tensor) -> Vec<Vec<f32>> {
    rows.squeeze(1).unwrap().to_vec2().unwrap()
}

/// An engine with `blocks` blocks of `block_size` tokens, the pool filled with NaN.
pub fn engine(
    model: HashLm,
    blocks: usize,
    block_size: usize,
    config: EngineConfig,
) -> Engine<HashLm> {
    let size = CacheConfig::blocks(blocks).with_block_size(block_size);
    engine_with(model, size, config)
}

/// An engine with a cache of any kind, the pool filled with NaN.
pub fn engine_with(model: HashLm, size: CacheConfig, config: EngineConfig) -> Engine<HashLm> {
    engine_of(Arc::new(model), size, config)
}

/// The same for any model.
pub fn engine_of<M: CausalLm>(model: Arc<M>, size: CacheConfig, config: EngineConfig) -> Engine<M> {
    let spec = model.cache_spec(DType::F32).unwrap();
    let cache = PagedKvCache::new(&spec, &size, &Device::Cpu).unwrap();
    crate::common::toy::poison(&cache);
    Engine::new(model, cache, config).unwrap()
}

/// Runs to the end, with all invariants checked after each step.
pub fn run<M: CausalLm>(engine: &mut Engine<M>) -> BTreeMap<RequestId, Answer> {
    let mut answers = BTreeMap::new();
    run_into(engine, &mut answers);
    answers
}

pub fn run_into<M: CausalLm>(engine: &mut Engine<M>, answers: &mut BTreeMap<RequestId, Answer>) {
    let mut steps = 0;
    while engine.has_work() {
        step_into(engine, answers);
        steps += 1;
        assert!(
            steps < 200_000,
            "the engine does not end: {:?}",
            engine.stats()
        );
    }
    assert_empty(engine);
}

pub fn step_into<M: CausalLm>(engine: &mut Engine<M>, answers: &mut BTreeMap<RequestId, Answer>) {
    for output in engine.step().unwrap() {
        answers.entry(output.request).or_default().push(output);
    }
    engine.cache().check_invariants().unwrap();
}

/// Nothing of any request is left.
pub fn assert_empty<M: CausalLm>(engine: &Engine<M>) {
    assert_eq!(engine.cache().num_sequences(), 0);
    assert_eq!(engine.cache().num_swapped(), 0);
    for usage in engine.cache().usage() {
        assert_eq!(usage.blocks_used, 0);
        assert_eq!(usage.blocks_cached + usage.blocks_free, usage.blocks_total);
    }
}

/// The tokens of a request with one sample that was given all it asked for.
pub fn tokens(answer: &Answer) -> &[u32] {
    assert_eq!(answer.samples.len(), 1);
    assert_eq!(answer.samples[0].finish, Some(FinishReason::Length));
    assert!(answer.report.is_some());
    &answer.samples[0].tokens
}

/// `len` tokens that differ from those of another `seed`.
pub fn prompt(seed: u64, len: usize, vocab: usize) -> Vec<u32> {
    let mut rng = Rng(seed);
    (0..len).map(|_| rng.below(vocab) as u32).collect()
}

pub fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request::new(prompt).with_max_tokens(max_tokens)
}
