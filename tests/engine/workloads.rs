//! Random workloads: every answer is that of the request alone, whatever the pool, the limits
//! and the company.

use std::collections::BTreeMap;

use candle_paged_attn::cache::{CacheConfig, CacheSize};
use candle_paged_attn::engine::{Answer, EngineConfig, FinishReason, Preemption, RequestId};

use crate::common::Rng;
use crate::hash_lm::{assert_empty, engine_with, model, prompt, request, step_into};

const VOCAB: usize = 24;

struct Asked {
    prompt: Vec<u32>,
    max_tokens: usize,
    n: usize,
    cancelled: bool,
}

/// Answers how often a sequence was preempted, and how often by moving it to host memory.
fn workload(seed: u64) -> (u64, u64) {
    let mut rng = Rng(seed);
    let block_size = [1, 2, 4, 16][rng.below(4)];
    let windowed = rng.below(4) == 0;
    let mut lm = model(VOCAB);
    if windowed {
        lm.windows = vec![Some(1 + rng.below(12)), None];
    }
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
    let need = |asked: &Asked| (asked.prompt.len() + asked.max_tokens).div_ceil(block_size);
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
    let reference = model(VOCAB);
    let plain = !windowed;
    let windows = lm.windows.clone();
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
    let mut engine = engine_with(lm, size, config);

    let mut open = open.into_iter().peekable();
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
                engine.cancel(id).unwrap();
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
    let mut windowed_reference = model(VOCAB);
    windowed_reference.windows = windows;
    let reference = if plain { reference } else { windowed_reference };
    assert_eq!(answers.len(), known.len());
    for (id, asked) in &known {
        let expected = reference.greedy(&asked.prompt, asked.max_tokens);
        let answer = &answers[id];
        assert_eq!(answer.samples.len(), asked.n, "seed {seed}");
        assert!(answer.report.is_some(), "seed {seed}");
        for sample in &answer.samples {
            match &sample.finish {
                Some(FinishReason::Length) => assert_eq!(sample.tokens, expected, "seed {seed}"),
                Some(FinishReason::Cancelled) if asked.cancelled => {
                    assert_eq!(
                        sample.tokens,
                        expected[..sample.tokens.len()],
                        "seed {seed}"
                    );
                }
                other => panic!("seed {seed}: {id} ended with {other:?}"),
            }
        }
    }
    (engine.stats().preemptions, engine.stats().swaps)
}

#[test]
fn two_hundred_random_workloads() {
    let (mut preemptions, mut swaps) = (0, 0);
    for seed in 0..200 {
        let (all, swapped) = workload(seed);
        preemptions += all;
        swaps += swapped;
    }
    // The workloads are about both kinds.
    assert!(
        swaps > 100 && preemptions - swaps > 100,
        "{preemptions} {swaps}"
    );
}
