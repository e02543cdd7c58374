//! A cache that cascades: which blocks the sequences of a step read together, that every layer
//! still answers as the f64 reference does, and that an engine answers with the same tokens.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "models/checkpoint.rs"]
mod checkpoint;
mod common;
#[path = "models/run.rs"]
mod run;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::PagedAttention;
use candle_paged_attn::cache::{
    AddOptions, CacheConfig, CacheSpec, Feed, LayerShape, PagedKvCache, SequenceId,
};
use candle_paged_attn::engine::{Answer, Engine, EngineConfig, Request};
use candle_paged_attn::models::{CausalLm, Decoder};
use candle_paged_attn::ops::AttentionOptions;

use checkpoint::{Tiny, tokens};
use common::Rng;
use common::paged::{close, tensor};
use common::reference::{Dims, Rules, reference};

const DIMS: Dims = Dims {
    heads: 6,
    kv_heads: 2,
    k_dim: 16,
    v_dim: 16,
};
const BLOCK: usize = 4;

/// Layers with these windows in one cache, and the sequences that are in it.
struct Layers {
    windows: Vec<Option<usize>>,
    cache: PagedKvCache,
    attention: PagedAttention,
    rules: Rules,
    rng: Rng,
}

/// A sequence and all its tokens.
#[derive(Clone)]
struct Held {
    id: SequenceId,
    tokens: Vec<u32>,
}

impl Layers {
    fn new(windows: &[Option<usize>], config: CacheConfig) -> Self {
        let shape = |&window| LayerShape {
            window,
            kv_heads: DIMS.kv_heads,
            k_dim: DIMS.k_dim,
            v_dim: DIMS.v_dim,
        };
        let shapes: Vec<_> = windows.iter().map(shape).collect();
        let spec = CacheSpec::from_layers(&shapes, DType::F32).unwrap();
        let config = config.with_block_size(BLOCK);
        let slopes: Vec<f32> = (0..6).map(|h| 0.5f32.powi(h + 1)).collect();
        let sinks = vec![0.5f32; 6];
        let options = AttentionOptions::new(0.25)
            .with_alibi_slopes(slopes.clone())
            .with_sinks(sinks.clone());
        Self {
            windows: windows.to_vec(),
            cache: PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap(),
            attention: PagedAttention::with_options(options),
            rules: Rules {
                scale: 0.25,
                slopes: Some(slopes.iter().map(|&x| f64::from(x)).collect()),
                sinks: Some(sinks.iter().map(|&x| f64::from(x)).collect()),
                ..Rules::default()
            },
            rng: Rng(3),
        }
    }

    /// Adds a prompt and computes what is not cached.
    fn add(&mut self, prompt: &[u32]) -> Held {
        let added = self.cache.add(prompt, AddOptions::default()).unwrap();
        let mut held = Held {
            id: added.id,
            tokens: prompt[..added.cached_tokens].to_vec(),
        };
        self.step(&mut [(&mut held, &prompt[added.cached_tokens..])]);
        held
    }

    fn fork(&self, held: &Held) -> Held {
        Held {
            id: self.cache.fork(held.id).unwrap(),
            tokens: held.tokens.clone(),
        }
    }

    /// Runs a step through every layer and checks each row. Answers the tokens it saved.
    fn step(&mut self, feeds: &mut [(&mut Held, &[u32])]) -> usize {
        for (held, new) in feeds.iter_mut() {
            held.tokens.extend_from_slice(new);
        }
        let fed: Vec<_> = feeds
            .iter()
            .map(|(held, new)| Feed::new(held.id, new))
            .collect();
        let plan = self.cache.plan(&fed).unwrap();
        let rows = plan.num_rows();
        for layer in 0..self.windows.len() {
            let n = rows * DIMS.heads * DIMS.k_dim;
            let q: Vec<f64> = (0..n)
                .map(|_| f64::from(3.0 * self.rng.normal() as f32))
                .collect();
            let rules = Rules {
                window: self.windows[layer],
                ..self.rules.clone()
            };
            let (mut k, mut v, mut want) = (Vec::new(), Vec::new(), Vec::new());
            let mut row = 0;
            for (held, new) in feeds.iter() {
                let (all_k, all_v) = kv(layer, &held.tokens);
                let width = DIMS.kv_heads * DIMS.k_dim;
                k.extend_from_slice(&all_k[all_k.len() - new.len() * width..]);
                v.extend_from_slice(&all_v[all_v.len() - new.len() * width..]);
                let width = DIMS.heads * DIMS.k_dim;
                let q = &q[row * width..(row + new.len()) * width];
                want.extend(reference(q, &all_k, &all_v, DIMS, &rules).out);
                row += new.len();
            }
            let of = |x: &[f64], heads| tensor(x, &[rows, heads, DIMS.k_dim], DType::F32);
            let (q, k, v) = (
                of(&q, DIMS.heads),
                of(&k, DIMS.kv_heads),
                of(&v, DIMS.kv_heads),
            );
            let out = self.attention.forward(layer, &q, &k, &v, &plan).unwrap();
            close(&out, &want, DIMS.v_dim, 1e-5, &format!("layer {layer}"));
        }
        let saved = plan.tokens_saved();
        plan.commit().unwrap();
        self.cache.check_invariants().unwrap();
        saved
    }
}

/// The K and V rows of a sequence: each depends on the layer and every token up to its own.
fn kv(layer: usize, tokens: &[u32]) -> (Vec<f64>, Vec<f64>) {
    let mut hash = layer as u64;
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for &token in tokens {
        hash = Rng(hash ^ u64::from(token)).next();
        let mut rng = Rng(hash);
        let mut row =
            |n: usize| -> Vec<f64> { (0..n).map(|_| f64::from(rng.normal() as f32)).collect() };
        k.extend(row(DIMS.kv_heads * DIMS.k_dim));
        v.extend(row(DIMS.kv_heads * DIMS.v_dim));
    }
    (k, v)
}

/// A decode step of all of them.
fn decode(layers: &mut Layers, all: &mut [Held], token: u32) -> usize {
    let next = [token];
    let mut feeds: Vec<(&mut Held, &[u32])> =
        all.iter_mut().map(|held| (held, next.as_slice())).collect();
    layers.step(&mut feeds)
}

/// Blocks of a cache that cascades wherever that saves reads.
fn cascading(blocks: usize) -> CacheConfig {
    let mut config = CacheConfig::blocks(blocks);
    config.cascade = Some(0);
    config
}

/// Two rows have to save 128 tokens each: 264 behind 264 tokens, in blocks of 4, not 256 behind
/// 256.
#[test]
fn the_switch_leaves_prefixes_alone_that_save_too_little() {
    for (len, saved) in [(40, 0), (256, 0), (264, 264)] {
        let mut layers = Layers::new(&[None], CacheConfig::blocks(256).with_cascade());
        let system = tokens(1, len, 1000);
        let ask = |seed| [system.as_slice(), &tokens(seed, 7, 1000)].concat();
        let mut all: Vec<Held> = (10..12).map(|seed| layers.add(&ask(seed))).collect();
        assert_eq!(decode(&mut layers, &mut all, 5), saved, "{len}");
    }
}

#[test]
fn prompts_that_hit_the_prefix_cache_and_forks_read_their_blocks_once() {
    let mut layers = Layers::new(&[None, None], cascading(256));
    let system = tokens(1, 40, 1000);
    let other = tokens(2, 18, 1000);
    let ask = |stem: &[u32], seed| [stem, &tokens(seed, 7, 1000)].concat();
    let mut all: Vec<Held> = (10..13)
        .map(|seed| layers.add(&ask(&system, seed)))
        .collect();
    assert_eq!(layers.cache.counters().cached_tokens, 2 * 40);
    // 3 behind 40 tokens.
    assert_eq!(decode(&mut layers, &mut all, 5), 2 * 40);
    // A fork shares 48 tokens with its origin, less than 3 of 4 behind 40.
    all.push(layers.fork(&all[0]));
    assert_eq!(decode(&mut layers, &mut all, 6), 3 * 40);
    // A second prefix of 4 whole blocks, and one that stands alone.
    all.extend((20..22).map(|seed| layers.add(&ask(&other, seed))));
    all.push(layers.add(&tokens(30, 33, 1000)));
    assert_eq!(decode(&mut layers, &mut all, 7), 3 * 40 + 16);
    // Without those behind the system prompt that are not the fork's kin.
    let (mut pair, rest) = (vec![all[0].clone(), all[3].clone()], all.split_off(4));
    assert_eq!(decode(&mut layers, &mut pair, 8), 48);
    let mut last = rest[2..].to_vec();
    assert_eq!(decode(&mut layers, &mut last, 9), 0);
    assert_eq!(layers.cache.counters().cascade_tokens, 80 + 120 + 136 + 48);
}

/// A chunk of a prompt and a decode row share, too; a step that is dropped counts nothing.
#[test]
fn chunks_share_and_dropped_steps_do_not_count() {
    let mut layers = Layers::new(&[None], cascading(128));
    let system = tokens(1, 32, 1000);
    let mut first = layers.add(&[system.as_slice(), &[1, 2]].concat());
    let added = layers
        .cache
        .add(&[system.as_slice(), &[3]].concat(), AddOptions::default());
    let mut second = Held {
        id: added.unwrap().id,
        tokens: system,
    };
    let plan = layers
        .cache
        .plan(&[Feed::new(first.id, &[4]), Feed::new(second.id, &[3])]);
    assert_eq!(plan.unwrap().tokens_saved(), 32);
    assert_eq!(layers.cache.counters().cascade_tokens, 0);
    let new = tokens(9, 9, 1000);
    assert_eq!(
        layers.step(&mut [(&mut first, &[4]), (&mut second, &new)]),
        32
    );
    assert_eq!(layers.cache.counters().cascade_tokens, 32);
}

#[test]
fn off_by_default() {
    let mut layers = Layers::new(&[None], CacheConfig::blocks(128));
    let system = tokens(1, 32, 1000);
    let mut all = vec![layers.add(&system), layers.add(&system)];
    assert_eq!(decode(&mut layers, &mut all, 1), 0);
}

/// A windowed group shares only what all of its queries see whole; the full group goes on.
#[test]
fn windowed_groups_share_while_contexts_fit_into_the_window() {
    let config = cascading(128);
    let mut layers = Layers::new(&[Some(24), None], config);
    let system = tokens(1, 16, 1000);
    let ask = |seed| [system.as_slice(), &tokens(seed, 5, 1000)].concat();
    let mut all: Vec<Held> = (10..13).map(|seed| layers.add(&ask(seed))).collect();
    // Contexts of 22, 23 and 24 tokens, then of 25.
    for _ in 0..3 {
        assert_eq!(decode(&mut layers, &mut all, 7), 2 * (2 * 16));
    }
    for _ in 0..8 {
        assert_eq!(decode(&mut layers, &mut all, 7), 2 * 16);
    }
}

/// Greedy answers of `requests`, with the two best logarithms of each step, and the tokens
/// that were saved.
fn answers(
    model: &Arc<Decoder>,
    requests: &[Vec<u32>],
    cascade: Option<usize>,
) -> (Vec<Answer>, u64) {
    let spec = model.cache_spec(DType::F32).unwrap();
    let mut config = CacheConfig::blocks(200).with_block_size(8);
    config.cascade = cascade;
    let cache = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap();
    let limits = EngineConfig::default().with_max_batch_tokens(64);
    let mut engine = Engine::new(model.clone(), cache, limits).unwrap();
    let requests = requests.iter().enumerate().map(|(i, prompt)| {
        let mut request = Request::new(prompt.as_slice())
            .with_max_tokens(20)
            .with_n(1 + i % 2);
        request.logprobs = Some(2);
        request
    });
    let answers = engine.generate(requests.collect(), |_| {}).unwrap();
    let answers = answers.into_iter().map(Result::unwrap).collect();
    assert_eq!(engine.stats().blocks_used, 0);
    (answers, engine.cache().counters().cascade_tokens)
}

#[test]
fn an_engine_answers_with_the_same_tokens() {
    let (mut compared, mut ties, mut saved) = (0, 0, 0);
    for seed in 0..6 {
        let mut tiny = Tiny::new(1 + seed as usize % 3);
        tiny.context = 512;
        let model = Arc::new(run::load(&tiny, &tiny.weights(seed), DType::F32));
        let stems = [
            tokens(seed + 50, 90, tiny.vocab),
            tokens(seed + 60, 45, tiny.vocab),
        ];
        let requests: Vec<Vec<u32>> = (0..12)
            .map(|i| {
                let stem = stems.get(i % 3).map_or(&[][..], Vec::as_slice);
                [stem, &tokens(seed * 100 + i as u64, 3 + i, tiny.vocab)].concat()
            })
            .collect();
        let (got, tokens_saved) = answers(&model, &requests, Some(0));
        let (want, none) = answers(&model, &requests, None);
        assert_eq!(none, 0);
        saved += tokens_saved;
        for (got, want) in got.iter().zip(&want) {
            for (got, want) in got.samples.iter().zip(&want.samples) {
                compared += 1;
                let margin = |i: usize| {
                    let top = &want.logprobs[i].top;
                    top[0].logprob - top[1].logprob
                };
                for i in 0..want.tokens.len() {
                    if margin(i) < 1e-4 {
                        ties += 1;
                        break;
                    }
                    assert_eq!(got.tokens[i], want.tokens[i], "seed {seed}, token {i}");
                    let off = got.logprobs[i].token.logprob - want.logprobs[i].token.logprob;
                    assert!(off.abs() < 1e-3, "seed {seed}, token {i}: off by {off}");
                }
            }
        }
    }
    println!("{compared} samples compared, {ties} up to a tie, {saved} tokens saved");
    // 6 sequences behind 88 tokens in whole blocks and 6 behind 40, 19 decode steps each: if
    // all ran at the same time, 6 * 19 * (5 * 88 + 5 * 40) = 72,960.
    assert!(saved > 60_000, "{saved} tokens");
    assert!(
        ties * 100 <= compared,
        "{ties} of {compared} ended in a tie"
    );
}

#[test]
fn the_candle_form_of_the_operands_works_too() {
    let mut layers = Layers::new(&[None], cascading(64));
    let system = tokens(1, 20, 1000);
    // Of five blocks the second prompt finds four: its last token is computed.
    let all = [layers.add(&system), layers.add(&system)];
    let run = |cache: &PagedKvCache| {
        let feeds = [Feed::new(all[0].id, &[1]), Feed::new(all[1].id, &[2])];
        let plan = cache.plan(&feeds).unwrap();
        assert_eq!(plan.tokens_saved(), 16);
        let x = |heads: usize| {
            let x = Tensor::arange(0f32, (2 * heads * 16) as f32, &Device::Cpu).unwrap();
            (x.reshape((2, heads, 1, 16)).unwrap() / 100.0).unwrap()
        };
        let of_rows = |heads: usize| x(heads).squeeze(2).unwrap();
        let batch = layers
            .attention
            .forward(0, &x(6), &x(2), &x(2), &plan)
            .unwrap();
        let rows = layers
            .attention
            .forward(0, &of_rows(6), &of_rows(2), &of_rows(2), &plan);
        let flat = |x: Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(batch.dims(), [2, 6, 1, 16]);
        assert_eq!(flat(batch), flat(rows.unwrap()));
    };
    run(&layers.cache);
}
