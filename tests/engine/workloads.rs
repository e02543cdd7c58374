//! Random workloads: every answer is that of the request alone, whatever the pool, the limits
//! and the company.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_paged_attn::cache::{CacheConfig, CacheSize};
use candle_paged_attn::engine::{Answer, EngineConfig, FinishReason, Preemption, RequestId};
use candle_paged_attn::models::CausalLm;

use crate::common::Rng;
use crate::hash_lm::{HashLm, assert_empty, engine_of, model, prompt, request, step_into};
use crate::random_llama;

const VOCAB: usize = 24;

struct Asked {
    prompt: Vec<u32>,
    max_tokens: usize,
    n: usize,
    cancelled: bool,
}

/// A workload without its model.
struct Workload {
    /// The step in which each request arrives.
    open: Vec<(usize, Asked)>,
    size: CacheConfig,
    config: EngineConfig,
}

/// What has happened in workloads.
#[derive(Default)]
struct Seen {
    samples: usize,
    /// Samples that were compared up to two tokens that are as good as equally likely.
    close: usize,
    preemptions: u64,
    /// Of these, those that moved a sequence to host memory.
    swaps: u64,
    /// Prompt tokens that were found in the cache.
    cached: u64,
    /// Blocks that two sequences shared, one of which went on to write.
    copies: u64,
}

/// Margin of log-probabilities below which a choice may fall to either token.
const CLOSE: f32 = 1e-4;

/// Blocks that a sequence on its way to `tokens` needs at least, of layers with `window`: those
/// that the last position before it sees, and the one it writes to.
fn needed(tokens: usize, window: Option<usize>, block_size: usize) -> usize {
    let first = |at: usize| window.map_or(0, |window| (at + 1).saturating_sub(window));
    (0..tokens)
        .map(|at| (at + 1).div_ceil(block_size) - first(at) / block_size)
        .max()
        .unwrap()
}

/// A workload for a model with these windows.
fn workload(seed: u64, rng: &mut Rng, windows: &[Option<usize>]) -> Workload {
    let block_size = [1, 2, 4, 16][rng.below(4)];
    let requests = 3 + rng.below(12);
    // Some prompts begin alike.
    let stem = prompt(seed, 24, VOCAB);
    let mut open: Vec<(usize, Asked)> = (0..requests)
        .map(|i| {
            let shared = if rng.below(2) == 0 { rng.below(24) } else { 0 };
            let mut asked = stem[..shared].to_vec();
            asked.extend(prompt(seed * 1000 + i as u64, 1 + rng.below(30), VOCAB));
            let asked = Asked {
                prompt: asked,
                max_tokens: 1 + rng.below(24),
                n: if rng.below(4) == 0 {
                    1 + rng.below(3)
                } else {
                    1
                },
                cancelled: rng.below(8) == 0,
            };
            (rng.below(20), asked)
        })
        .collect();
    // Every arrival in its step; the pool from barely enough to ample.
    open.sort_by_key(|(at, _)| *at);
    let need = |asked: &Asked| {
        let tokens = asked.prompt.len() + asked.max_tokens;
        let windows = windows.iter();
        windows
            .map(|&window| needed(tokens, window, block_size))
            .max()
            .unwrap()
    };
    let least = open.iter().map(|(_, asked)| need(asked)).max().unwrap();
    let all: usize = open.iter().map(|(_, asked)| asked.n * need(asked)).sum();
    let blocks = match rng.below(3) {
        0 => least,
        1 => least + rng.below(all - least + 1),
        _ => all,
    };
    let mut config = EngineConfig::default().with_max_sequences(3 + rng.below(6));
    config.max_batch_tokens = config.max_sequences + rng.below(40);
    config.prefix_cache = rng.below(4) > 0;
    config.max_wait = [4, 1024][rng.below(2)];
    let mut size = CacheConfig::blocks(blocks).with_block_size(block_size);
    if rng.below(2) == 0 {
        size = size.with_host(CacheSize::Blocks(1 + rng.below(2 * blocks)));
    }
    if rng.below(3) == 0 {
        size = size.with_sub_block_reuse();
    }
    if rng.below(3) == 0 {
        size = size.with_deduplication();
    }
    config.preemption =
        [Preemption::Recompute, Preemption::Swap, Preemption::Cheaper][rng.below(3)];
    Workload { open, size, config }
}

/// Runs a workload; `expected` answers the tokens of a request alone, with the margin of each.
fn play<M: CausalLm>(
    seed: u64,
    rng: &mut Rng,
    model: Arc<M>,
    workload: Workload,
    expected: impl Fn(&Asked) -> Vec<(u32, f32)>,
    seen: &mut Seen,
) {
    let mut engine = engine_of(model, workload.size, workload.config);
    let mut open = workload.open.into_iter().peekable();
    let mut known: BTreeMap<RequestId, Asked> = BTreeMap::new();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    let mut step = 0;
    while open.peek().is_some() || engine.has_work() {
        while let Some((_, asked)) = open.next_if(|(at, _)| *at <= step) {
            let request = request(&asked.prompt, asked.max_tokens)
                .with_n(asked.n)
                .with_priority(rng.below(3) as i32);
            known.insert(engine.add_request(request).unwrap(), asked);
        }
        step_into(&mut engine, &mut answers);
        if rng.below(10) == 0
            && let Some((&id, asked)) = known.iter().nth(rng.below(known.len().max(1)))
        {
            if asked.cancelled {
                engine.cancel(id);
            } else {
                engine.preempt(id).unwrap();
            }
            engine.cache().check_invariants().unwrap();
        }
        step += 1;
        assert!(
            step < 5000,
            "seed {seed} does not end: {:?}",
            engine.stats()
        );
    }
    assert_empty(&engine);
    assert_eq!(answers.len(), known.len());
    for (id, asked) in &known {
        let expected = expected(asked);
        let answer = &answers[id];
        assert_eq!(answer.samples.len(), asked.n, "seed {seed}");
        assert!(answer.report.is_some(), "seed {seed}");
        for sample in &answer.samples {
            match &sample.finish {
                Some(FinishReason::Length) => assert_eq!(sample.tokens.len(), expected.len()),
                Some(FinishReason::Cancelled) if asked.cancelled => {}
                other => panic!("seed {seed}: {id} ended with {other:?}"),
            }
            let mut both = sample.tokens.iter().zip(&expected);
            let sure = both
                .position(|(_, (_, margin))| *margin < CLOSE)
                .unwrap_or(sample.tokens.len());
            let expected: Vec<u32> = expected.iter().map(|(token, _)| *token).collect();
            assert_eq!(sample.tokens[..sure], expected[..sure], "seed {seed}");
            seen.samples += 1;
            seen.close += usize::from(sure < sample.tokens.len());
        }
    }
    seen.preemptions += engine.stats().preemptions;
    seen.swaps += engine.stats().swaps;
    seen.cached += engine.stats().cached_tokens;
    seen.copies += engine.cache().counters().copies;
}

impl Seen {
    /// The workloads were about both kinds of preemption, and hardly about equal logits.
    fn check(&self) {
        let share = 100.0 * self.close as f64 / self.samples as f64;
        println!("{} samples, {share:.2} % compared in part", self.samples);
        let recomputed = self.preemptions - self.swaps;
        assert!(self.swaps > 100 && recomputed > 100, "{recomputed}");
        assert!(share <= 1.0, "{share}");
    }
}

/// What the toy says to a request alone. Its logits are exact: no token was a close one.
fn exact(lm: &HashLm, asked: &Asked) -> Vec<(u32, f32)> {
    let tokens = lm.greedy(&asked.prompt, asked.max_tokens);
    let margins = tokens.into_iter().map(|token| (token, f32::INFINITY));
    margins.collect()
}

/// The toy's logits are exact, so every token has to be right.
#[test]
fn two_hundred_random_workloads() {
    let mut seen = Seen::default();
    for seed in 0..200 {
        let mut rng = Rng(seed);
        let mut lm = model(VOCAB);
        if rng.below(4) == 0 {
            lm.windows = vec![Some(1 + rng.below(12)), None];
        }
        let lm = Arc::new(lm);
        let alone = |asked: &Asked| exact(&lm, asked);
        let workload = workload(seed, &mut rng, &lm.windows);
        play(seed, &mut rng, lm.clone(), workload, alone, &mut seen);
    }
    seen.check();
    assert_eq!(seen.close, 0);
}

/// Groups of layers that release their blocks at different times, and models of windows alone
/// in pools that hold little more than a window.
#[test]
fn two_hundred_random_workloads_on_layer_groups() {
    let gemma3 = |window| [vec![Some(window); 5], vec![None]].concat();
    for pattern in ["Gemma 3", "windows alone", "two windows", "alternating"] {
        let mut seen = Seen::default();
        for seed in 2000..2050 {
            let mut rng = Rng(seed);
            let window = 1 + rng.below(20);
            let mut lm = model(VOCAB);
            lm.windows = match pattern {
                "Gemma 3" => gemma3(window),
                "windows alone" => vec![Some(window)],
                "two windows" => vec![Some(window), Some(window + 1 + rng.below(9))],
                _ => [Some(window), None].repeat(2),
            };
            let lm = Arc::new(lm);
            let alone = |asked: &Asked| exact(&lm, asked);
            let workload = workload(seed, &mut rng, &lm.windows);
            play(seed, &mut rng, lm.clone(), workload, alone, &mut seen);
        }
        assert_eq!(seen.close, 0);
        let Seen {
            swaps,
            cached,
            copies,
            ..
        } = seen;
        let recomputed = seen.preemptions - swaps;
        println!(
            "{pattern}: {} samples, {recomputed} recomputed, {swaps} swapped, {cached} tokens \
             found, {copies} copies",
            seen.samples
        );
        assert!(recomputed > 20 && swaps > 20, "{pattern}");
        assert!(cached > 300 && copies > 20, "{pattern}");
    }
}

/// The same on a decoder with real attention: as alone in an ample pool.
#[test]
fn two_hundred_random_workloads_on_a_decoder() {
    let decoder = random_llama::load();
    let size = CacheConfig::tokens(256).with_block_size(16);
    let config = EngineConfig::default().without_prefix_cache();
    let alone = |asked: &Asked| {
        let mut engine = engine_of(decoder.clone(), size, config.clone());
        let mut request = request(&asked.prompt, asked.max_tokens);
        request.logprobs = Some(2);
        let answers = engine.generate(vec![request], |_| {}).unwrap();
        let sample = &answers[0].as_ref().unwrap().samples[0];
        let chosen = sample.logprobs.iter();
        chosen
            .map(|row| (row.token.token, row.top[0].logprob - row.top[1].logprob))
            .collect()
    };
    let mut seen = Seen::default();
    for seed in 1000..1200 {
        let mut rng = Rng(seed);
        let workload = workload(seed, &mut rng, &[None]);
        play(seed, &mut rng, decoder.clone(), workload, alone, &mut seen);
    }
    seen.check();
}
