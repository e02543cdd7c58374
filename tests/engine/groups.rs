//! Layer groups under the engine: what each holds while requests run, give way and come back.

use std::sync::Arc;

use candle_paged_attn::cache::{CacheConfig, CacheSize};
use candle_paged_attn::engine::{Engine, EngineConfig, Preemption};

use crate::hash_lm::{
    HashLm, assert_empty, engine_of, engine_with, model, prompt, request, run, step_into, tokens,
};

const VOCAB: usize = 24;

fn with_windows(windows: &[Option<usize>]) -> HashLm {
    let mut lm = model(VOCAB);
    lm.windows = windows.to_vec();
    lm
}

/// Blocks that the token after `len` others sees, of each group.
fn seen(engine: &Engine<HashLm>, len: usize) -> Vec<usize> {
    let size = engine.cache().block_size();
    let groups = engine.cache().spec().groups.iter();
    groups
        .map(|group| {
            let first = group.window.map_or(0, |w| (len + 1).saturating_sub(w));
            len.div_ceil(size) - first / size
        })
        .collect()
}

#[test]
fn a_request_holds_the_blocks_of_its_windows_here_and_in_host_memory() {
    let gemma3 = [vec![Some(12); 5], vec![None]].concat();
    for windows in [gemma3, vec![Some(5)], vec![Some(3), Some(9)]] {
        for block_size in [1, 4, 16] {
            let lm = with_windows(&windows);
            let asked = prompt(7, 61, VOCAB);
            let expected = lm.greedy(&asked, 50);
            let size = CacheConfig::tokens(256)
                .with_block_size(block_size)
                .with_host(CacheSize::Tokens(256));
            let mut config = EngineConfig::default()
                .without_prefix_cache()
                .with_max_sequences(4);
            config.max_batch_tokens = 7;
            config.preemption = Preemption::Swap;
            let mut engine = engine_with(lm, size, config);
            let id = engine.add_request(request(&asked, 50)).unwrap();
            let mut answers = Default::default();
            for step in 0.. {
                step_into(&mut engine, &mut answers);
                if !engine.has_work() {
                    break;
                }
                // Nothing is cached or computed twice.
                let held = seen(&engine, engine.stats().computed_tokens as usize);
                let usage = engine.cache().usage();
                let used: Vec<usize> = usage.iter().map(|u| u.blocks_used).collect();
                assert_eq!(
                    used, held,
                    "{windows:?}, blocks of {block_size}, step {step}"
                );
                if step % 9 == 5 {
                    engine.preempt(id).unwrap();
                    let usage = engine.cache().usage();
                    let there: Vec<usize> = usage.iter().map(|u| u.host_blocks_used).collect();
                    assert!(usage.iter().all(|u| u.blocks_used == 0));
                    assert_eq!(
                        there, held,
                        "{windows:?}, blocks of {block_size}, step {step}"
                    );
                }
            }
            assert_empty(&engine);
            assert_eq!(tokens(&answers[&id]), expected);
            assert!(engine.stats().swaps > 5);
        }
    }
}

#[test]
fn a_window_only_model_answers_endlessly_in_a_few_blocks() {
    let lm = Arc::new(with_windows(&[Some(16)]));
    let asked = prompt(8, 1000, VOCAB);
    let expected = lm.greedy(&asked, 1500);
    // 16 keys reach into two blocks, and the next token may need a third.
    let size = CacheConfig::blocks(3).with_block_size(16);
    for prefix_cache in [true, false] {
        let mut config = EngineConfig::default();
        config.prefix_cache = prefix_cache;
        let mut engine = engine_of(lm.clone(), size, config);
        let id = engine.add_request(request(&asked, 1500)).unwrap();
        let answers = run(&mut engine);
        assert_eq!(tokens(&answers[&id]), expected);
        assert_eq!(engine.stats().preemptions, 0);
    }
}

/// A pool made for four sequences of 256 tokens has few blocks for the window, which long
/// prompts pass through: they need not wait for one another.
#[test]
fn long_prompts_share_the_blocks_of_a_window() {
    let lm = Arc::new(with_windows(&[Some(16), None]));
    let size = CacheConfig::bytes(64 * (4 * 256 + 4 * 20))
        .with_block_size(4)
        .with_expected_tokens(256);
    for preemption in [Preemption::Recompute, Preemption::Swap] {
        let mut config = EngineConfig::default().with_max_sequences(4);
        config.max_batch_tokens = 16;
        config.preemption = preemption;
        let host = size.with_host(CacheSize::Tokens(1024));
        let mut engine = engine_of(lm.clone(), host, config);
        let windowed = engine.cache().usage()[0].blocks_total;
        assert!(windowed < 200 / 4, "{windowed}: the prompt fits at once");
        let asked: Vec<_> = (0..4).map(|i| prompt(20 + i, 200, VOCAB)).collect();
        let ids: Vec<_> = asked
            .iter()
            .map(|asked| engine.add_request(request(asked, 20)).unwrap())
            .collect();
        let mut answers = Default::default();
        let mut most = 0;
        while engine.has_work() {
            step_into(&mut engine, &mut answers);
            most = most.max(engine.stats().running);
            // A sequence that comes back needs no more than it held.
            if engine.stats().running == 2 && engine.stats().preemptions < 3 {
                engine.preempt(ids[1]).unwrap();
            }
        }
        assert_empty(&engine);
        assert!(most >= 2, "{most} at once");
        for (id, asked) in ids.iter().zip(&asked) {
            assert_eq!(tokens(&answers[id]), lm.greedy(asked, 20));
        }
    }
}
