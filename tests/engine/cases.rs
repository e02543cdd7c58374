//! Field cases of schedulers, each with one right answer.

use std::collections::BTreeMap;

use candle_paged_attn::Error;
use candle_paged_attn::block::Namespace;
use candle_paged_attn::cache::{CacheConfig, CacheSize};
use candle_paged_attn::engine::{
    Answer, EngineConfig, FinishReason, Preemption, Request, RequestId,
};

use crate::common::Rng;
use crate::hash_lm::{
    assert_empty, engine, engine_with, model, prompt, request, run, run_into, step_into, tokens,
};

const VOCAB: usize = 40;

#[test]
fn b1_what_can_never_run_is_refused_and_others_run() {
    let mut engine = engine(model(VOCAB), 49, 16, EngineConfig::default());
    let first = prompt(1, 30, VOCAB);
    let a = engine.add_request(request(&first, 5)).unwrap();
    let refused = engine.add_request(request(&prompt(2, 1002, VOCAB), 5));
    assert!(
        matches!(
            refused,
            Err(Error::OutOfBlocks {
                needed: 63,
                free: 49,
                ..
            })
        ),
        "{refused:?}"
    );
    // 783 tokens and one more are 49 blocks exactly.
    let largest = prompt(3, 783, VOCAB);
    let b = engine.add_request(request(&largest, 1)).unwrap();
    assert!(
        engine
            .add_request(request(&prompt(3, 784, VOCAB), 1))
            .is_err()
    );
    let answers = run(&mut engine);
    assert_eq!(answers.len(), 2);
    assert_eq!(tokens(&answers[&a]), model(VOCAB).greedy(&first, 5));
    assert_eq!(tokens(&answers[&b]), model(VOCAB).greedy(&largest, 1));
}

#[test]
fn b2_alone_in_a_full_pool_a_request_ends_with_a_reason() {
    // 3 blocks of 4: the prompt of 5 can be followed by 7 computed tokens and one more that
    // is never fed.
    let mut engine = engine(model(VOCAB), 3, 4, EngineConfig::default());
    let prompt = prompt(1, 5, VOCAB);
    let id = engine.add_request(request(&prompt, 100)).unwrap();
    let answers = run(&mut engine);
    let sample = &answers[&id].samples[0];
    assert_eq!(sample.finish, Some(FinishReason::CacheFull));
    assert_eq!(sample.tokens, model(VOCAB).greedy(&prompt, 8));
    assert!(answers[&id].report.is_some());
}

#[test]
fn b3_two_that_do_not_fit_together_both_finish() {
    // 10 blocks; each holds 4 after its prompt and needs 8 at the end.
    let mut engine = engine(model(VOCAB), 10, 4, EngineConfig::default());
    let prompts = [prompt(1, 15, VOCAB), prompt(2, 15, VOCAB)];
    let ids = prompts
        .each_ref()
        .map(|p| engine.add_request(request(p, 17)).unwrap());
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    step_into(&mut engine, &mut answers);
    assert_eq!(engine.stats().running, 2);
    assert_eq!(engine.stats().blocks_used, 8);
    run_into(&mut engine, &mut answers);
    for (id, prompt) in ids.iter().zip(&prompts) {
        assert_eq!(tokens(&answers[id]), model(VOCAB).greedy(prompt, 17));
    }
    assert_eq!(engine.stats().preemptions, 1);
    // The one that arrived last gave way.
    assert_eq!(answers[&ids[0]].report.as_ref().unwrap().preemptions, 0);
    assert_eq!(answers[&ids[1]].report.as_ref().unwrap().preemptions, 1);
}

#[test]
fn b4_preempted_prefills_progress_all_the_same() {
    // Long prompts in small chunks beside short requests with long answers, in a pool that
    // holds hardly more than one of them.
    let config = EngineConfig::default()
        .with_max_sequences(4)
        .with_max_batch_tokens(6);
    let mut engine = engine(model(VOCAB), 16, 4, config);
    let shapes = [(3, 40), (3, 40), (50, 4), (45, 4), (50, 4)];
    let requests: Vec<_> = (0..)
        .zip(shapes)
        .map(|(seed, (len, max))| (prompt(seed, len, VOCAB), max))
        .collect();
    let ids: Vec<_> = requests
        .iter()
        .map(|(prompt, max)| engine.add_request(request(prompt, *max)).unwrap())
        .collect();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    let mut computed = vec![0];
    while engine.has_work() {
        step_into(&mut engine, &mut answers);
        computed.push(engine.stats().computed_tokens);
        assert!(computed.len() < 1000);
    }
    // Strictly more over any two steps, but for the very last that only hands outputs out.
    for steps in computed.windows(3).rev().skip(1) {
        assert!(steps[2] > steps[0], "{computed:?}");
    }
    for (id, (prompt, max)) in ids.iter().zip(&requests) {
        assert_eq!(tokens(&answers[id]), model(VOCAB).greedy(prompt, *max));
    }
}

#[test]
fn b5_a_victim_that_is_already_part_of_the_step_leaves_it_whole() {
    // Blocks of one token, steps of 4. `low` decodes, and so comes first in every step, while
    // `high`, which was admitted when the pool still had room for its prompt, computes it in
    // chunks of the other 3.
    let config = EngineConfig::default()
        .with_max_sequences(4)
        .with_max_batch_tokens(4);
    let mut engine = engine(model(VOCAB), 43, 1, config);
    let (low, high) = (prompt(1, 2, VOCAB), prompt(2, 39, VOCAB));
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    let a = engine
        .add_request(request(&low, 30).with_priority(-1))
        .unwrap();
    step_into(&mut engine, &mut answers);
    let b = engine.add_request(request(&high, 3)).unwrap();
    let mut before = engine.stats().computed_tokens;
    while engine.stats().preemptions == 0 {
        let made = len(&answers[&a]);
        step_into(&mut engine, &mut answers);
        let computed = engine.stats().computed_tokens;
        // Also in the step in which `low` gave way, without a token of its own: all 4 are
        // `high`'s.
        assert_eq!(computed - before, 4);
        let gave_way = engine.stats().preemptions == 1;
        assert_eq!(len(&answers[&a]) == made, gave_way);
        before = computed;
    }
    run_into(&mut engine, &mut answers);
    assert_eq!(tokens(&answers[&a]), model(VOCAB).greedy(&low, 30));
    assert_eq!(tokens(&answers[&b]), model(VOCAB).greedy(&high, 3));
    assert_eq!(answers[&b].report.as_ref().unwrap().preemptions, 0);

    // Two that were admitted together: the first, of higher priority, grows into the pool.
    let config = EngineConfig::default()
        .with_max_sequences(4)
        .with_max_batch_tokens(9);
    let mut engine = self::engine(model(VOCAB), 6, 4, config);
    let first = engine
        .add_request(request(&prompt(5, 9, VOCAB), 12))
        .unwrap();
    let second = engine
        .add_request(request(&prompt(6, 7, VOCAB), 12).with_priority(-1))
        .unwrap();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    run_into(&mut engine, &mut answers);
    assert_eq!(
        tokens(&answers[&first]),
        model(VOCAB).greedy(&prompt(5, 9, VOCAB), 12)
    );
    assert_eq!(
        tokens(&answers[&second]),
        model(VOCAB).greedy(&prompt(6, 7, VOCAB), 12)
    );
    assert_eq!(answers[&first].report.as_ref().unwrap().preemptions, 0);
    assert!(engine.stats().preemptions > 0);
}

#[test]
fn b6_preempted_at_every_length() {
    let prompt = prompt(1, 3, VOCAB);
    let expected = model(VOCAB).greedy(&prompt, 14);
    for (prefix_cache, preemption) in [
        (true, Preemption::Recompute),
        (false, Preemption::Recompute),
        (true, Preemption::Swap),
        (false, Preemption::Swap),
    ] {
        for at in 1..=13 {
            let mut config = EngineConfig::default();
            (config.prefix_cache, config.preemption) = (prefix_cache, preemption);
            let size = CacheConfig::blocks(8)
                .with_block_size(4)
                .with_host(CacheSize::Blocks(8));
            let mut engine = engine_with(model(VOCAB), size, config);
            let id = engine.add_request(request(&prompt, 14)).unwrap();
            let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
            let mut preempted = false;
            while engine.has_work() {
                let made = answers.get(&id).map_or(0, |a: &_| len(a));
                if made == at && !preempted {
                    preempted = true;
                    engine.preempt(id).unwrap();
                    assert_eq!(engine.stats().blocks_used, 0);
                }
                step_into(&mut engine, &mut answers);
                let made = len(&answers[&id]);
                if made < 14 {
                    // The newest token is not in the cache yet.
                    let computed = prompt.len() + made - 1;
                    assert_eq!(engine.stats().blocks_used, computed.div_ceil(4));
                }
            }
            assert_eq!(tokens(&answers[&id]), expected, "preempted at {at}");
            assert_eq!(answers[&id].report.as_ref().unwrap().preemptions, 1);
            assert_empty(&engine);
        }
    }
}

fn len(answer: &Answer) -> usize {
    answer
        .samples
        .first()
        .map_or(0, |sample| sample.tokens.len())
}

#[test]
fn b7_a_preempted_request_resumes_in_a_flow_of_small_ones() {
    for preemption in [Preemption::Recompute, Preemption::Swap] {
        let mut config = EngineConfig::default().with_max_sequences(4);
        config.preemption = preemption;
        let size = CacheConfig::blocks(12)
            .with_block_size(4)
            .with_host(CacheSize::Blocks(12));
        let mut engine = engine_with(model(VOCAB), size, config);
        let long = prompt(1, 24, VOCAB);
        let id = engine.add_request(request(&long, 6)).unwrap();
        let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
        step_into(&mut engine, &mut answers);
        // Small ones run already when it gives way, and would for ever if they overtook it.
        for seed in 500..504 {
            engine
                .add_request(request(&prompt(seed, 4, VOCAB), 3))
                .unwrap();
        }
        step_into(&mut engine, &mut answers);
        assert!(engine.stats().running > 1);
        engine.preempt(id).unwrap();
        let swapped = usize::from(preemption == Preemption::Swap);
        assert_eq!(
            (engine.stats().preempted, engine.stats().swapped),
            (1 - swapped, swapped)
        );
        assert_eq!(engine.cache().num_swapped(), swapped);
        let mut steps = 0;
        while answers
            .get(&id)
            .is_none_or(|answer| answer.report.is_none())
        {
            // Two more small prompts arrive in every step, for ever.
            for i in 0..2 {
                let small = prompt(1000 + 2 * steps + i, 4, VOCAB);
                // Of different lengths, so that they do not all end at once.
                engine
                    .add_request(request(&small, 4 + (steps + i) as usize % 4))
                    .unwrap();
            }
            step_into(&mut engine, &mut answers);
            steps += 1;
            assert!(steps < 20, "the preempted request starves");
        }
        assert_eq!(tokens(&answers[&id]), model(VOCAB).greedy(&long, 6));
        run_into(&mut engine, &mut answers);
    }
}

#[test]
fn b7_a_low_priority_is_served_after_the_longest_wait() {
    let mut config = EngineConfig::default().with_max_sequences(1);
    config.max_wait = 50;
    let mut engine = engine(model(VOCAB), 12, 4, config);
    let low = prompt(1, 8, VOCAB);
    let id = engine
        .add_request(request(&low, 3).with_priority(-5))
        .unwrap();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    let mut steps = 0;
    while answers
        .get(&id)
        .is_none_or(|answer| answer.report.is_none())
    {
        let other = prompt(1000 + steps, 4, VOCAB);
        engine
            .add_request(request(&other, 1).with_priority(5))
            .unwrap();
        step_into(&mut engine, &mut answers);
        steps += 1;
        assert!(steps < 100, "the low priority starves");
    }
    assert!(steps > 50);
    assert_eq!(tokens(&answers[&id]), model(VOCAB).greedy(&low, 3));
}

#[test]
fn b8_one_at_a_time_and_in_three_blocks() {
    for (blocks, slots) in [(64, 1), (3, 8)] {
        let config = EngineConfig::default().with_max_sequences(slots);
        let mut engine = engine(model(VOCAB), blocks, 4, config);
        let mut rng = Rng(7);
        let requests: Vec<_> = (0..1000)
            .map(|i| {
                let len = 1 + rng.below(8);
                (prompt(i, len, VOCAB), 1 + rng.below(12 - len))
            })
            .collect();
        let ids: Vec<_> = requests
            .iter()
            .map(|(prompt, max)| engine.add_request(request(prompt, *max)).unwrap())
            .collect();
        let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
        while engine.has_work() {
            for output in engine.step().unwrap() {
                answers.entry(output.request).or_default().push(output);
            }
        }
        assert_empty(&engine);
        for (id, (prompt, max)) in ids.iter().zip(&requests) {
            assert_eq!(tokens(&answers[id]), model(VOCAB).greedy(prompt, *max));
        }
    }
}

#[test]
fn b9_one_that_fails_in_a_step_does_not_touch_the_others() {
    let mut failing = model(VOCAB);
    failing.poison = Some(39);
    let mut engine = engine(failing, 64, 4, EngineConfig::default());
    // No answer of theirs runs into the poisoned token by itself.
    let reference = model(VOCAB);
    let good: Vec<_> = (0..)
        .map(|seed| prompt(seed, 6 + seed as usize % 4, 39))
        .filter(|prompt| !reference.greedy(prompt, 6).contains(&39))
        .take(2)
        .collect();
    let mut bad = prompt(3, 7, 39);
    bad.push(39);
    let a = engine.add_request(request(&good[0], 6)).unwrap();
    let b = engine.add_request(request(&bad, 6)).unwrap();
    let c = engine.add_request(request(&good[1], 6)).unwrap();
    let answers = run(&mut engine);
    let failed = &answers[&b].samples[0];
    assert!(
        matches!(failed.finish, Some(FinishReason::Failed(_))),
        "{failed:?}"
    );
    assert!(failed.tokens.is_empty());
    assert_eq!(tokens(&answers[&a]), reference.greedy(&good[0], 6));
    assert_eq!(tokens(&answers[&c]), reference.greedy(&good[1], 6));
}

#[test]
fn b9_a_forward_that_fails_once_loses_nothing() {
    let mut engine = engine(model(VOCAB), 64, 4, EngineConfig::default());
    let prompt = prompt(1, 9, VOCAB);
    let id = engine.add_request(request(&prompt, 6)).unwrap();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    for failing in [true, false, false, true, true, false] {
        engine
            .model()
            .failures
            .store(failing.into(), std::sync::atomic::Ordering::Relaxed);
        match engine.step() {
            Ok(outputs) => {
                assert!(!failing);
                for output in outputs {
                    answers.entry(id).or_default().push(output);
                }
            }
            Err(error) => assert!(failing, "{error}"),
        }
        engine.cache().check_invariants().unwrap();
    }
    run_into(&mut engine, &mut answers);
    assert_eq!(tokens(&answers[&id]), model(VOCAB).greedy(&prompt, 6));
}

#[test]
fn b10_cached_and_cold_prompts_in_one_step() {
    let mut engine = engine(model(VOCAB), 64, 4, EngineConfig::default());
    let shared = prompt(1, 13, VOCAB);
    engine.add_request(request(&shared, 1)).unwrap();
    run(&mut engine);
    let cold = prompt(2, 10, VOCAB);
    let mut longer = shared.clone();
    longer.extend(prompt(3, 5, VOCAB));
    let ids = [&longer, &cold, &shared].map(|p| engine.add_request(request(p, 5)).unwrap());
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    step_into(&mut engine, &mut answers);
    assert_eq!(engine.stats().running, 3);
    run_into(&mut engine, &mut answers);
    for (id, (prompt, cached)) in ids.iter().zip([(&longer, 12), (&cold, 0), (&shared, 12)]) {
        assert_eq!(tokens(&answers[id]), model(VOCAB).greedy(prompt, 5));
        assert_eq!(answers[id].report.as_ref().unwrap().cached_tokens, cached);
    }
}

#[test]
fn b11_fifty_requests_and_the_first_again() {
    let mut engine = engine(model(VOCAB), 32, 4, EngineConfig::default());
    for i in (0..50).chain([0]) {
        let prompt = prompt(i, 5 + i as usize % 17, VOCAB);
        let id = engine.add_request(request(&prompt, 7)).unwrap();
        let answers = run(&mut engine);
        assert_eq!(
            tokens(&answers[&id]),
            model(VOCAB).greedy(&prompt, 7),
            "{i}"
        );
    }
}

#[test]
fn b12_two_chats_turn_by_turn() {
    let mut engine = engine(model(VOCAB), 64, 4, EngineConfig::default());
    let mut chats = [prompt(1, 6, VOCAB), prompt(2, 9, VOCAB)];
    let mut alone = chats.clone();
    for turn in 0..6 {
        for (chat, alone) in chats.iter_mut().zip(&mut alone) {
            let id = engine.add_request(request(chat, 5)).unwrap();
            let answers = run(&mut engine);
            // All but the last block of the chat so far was cached.
            let cached = answers[&id].report.as_ref().unwrap().cached_tokens;
            assert_eq!(cached > 0, turn > 0);
            chat.extend(tokens(&answers[&id]));
            alone.extend(model(VOCAB).greedy(alone, 5));
            let said = prompt(100 + turn, 4, VOCAB);
            chat.extend(&said);
            alone.extend(&said);
            assert_eq!(chat, alone);
        }
    }
}

#[test]
fn a21_a_prompt_counts_once_however_often_it_comes() {
    // The second request does not fit beside the first: it is tried in every step until the
    // first has ended, and then preempted once.
    let mut engine = engine(model(VOCAB), 8, 4, EngineConfig::default());
    let (a, b) = (prompt(1, 20, VOCAB), prompt(2, 16, VOCAB));
    engine.add_request(request(&a, 6)).unwrap();
    let second = engine.add_request(request(&b, 6)).unwrap();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    for _ in 0..3 {
        step_into(&mut engine, &mut answers);
        assert_eq!(engine.stats().prompt_tokens, 20);
    }
    while engine.stats().prompt_tokens == 20 {
        step_into(&mut engine, &mut answers);
    }
    engine.preempt(second).unwrap();
    run_into(&mut engine, &mut answers);
    let stats = engine.stats();
    assert_eq!((stats.prompt_tokens, stats.cached_tokens), (36, 0));
    assert_eq!(stats.hit_rate, 0.0);
    // The prompt and its first token came back, four blocks of them still cached.
    assert_eq!(
        (stats.resumed_tokens, stats.resumed_cached_tokens),
        (17, 16)
    );
}

#[test]
fn a3_equal_prompts_at_once_are_computed_once() {
    let mut engine = engine(model(VOCAB), 64, 4, EngineConfig::default());
    let prompt = prompt(1, 13, VOCAB);
    let ids = [0; 3].map(|_| engine.add_request(request(&prompt, 4)).unwrap());
    let other = engine
        .add_request(request(&prompt, 4).with_namespace(Namespace::default().with_salt("b")))
        .unwrap();
    let answers = run(&mut engine);
    let cached = |id| answers[id].report.as_ref().unwrap().cached_tokens;
    assert_eq!(ids.each_ref().map(cached), [0, 12, 12]);
    assert_eq!(cached(&other), 0);
    assert_eq!(engine.stats().deferrals, 2);
    for id in ids.iter().chain([&other]) {
        assert_eq!(tokens(&answers[id]), model(VOCAB).greedy(&prompt, 4));
    }
}

#[test]
fn the_cost_of_a_request_is_known_before() {
    let mut engine = engine(model(VOCAB), 64, 4, EngineConfig::default());
    let prompt = prompt(1, 13, VOCAB);
    let cost = engine.cost(&Request::new(prompt.as_slice())).unwrap();
    assert_eq!((cost.cached_tokens, &cost.blocks_needed[..]), (0, &[4][..]));
    engine.add_request(request(&prompt, 1)).unwrap();
    run(&mut engine);
    let cost = engine.cost(&Request::new(prompt.as_slice())).unwrap();
    assert_eq!(cost.cached_tokens, 12);
    // Three cached blocks that nobody uses now, and a new one.
    assert_eq!(cost.blocks_needed, [4]);
    assert!(cost.fits());
}

#[test]
fn a_pinned_prefix_outlives_everything() {
    let mut engine = engine(model(VOCAB), 8, 4, EngineConfig::default());
    let system = prompt(1, 12, VOCAB);
    let pin = engine.pin_prefix(&system, Namespace::default()).unwrap();
    assert_eq!(pin.tokens, 12);
    for seed in 10..20 {
        engine
            .add_request(request(&prompt(seed, 14, VOCAB), 4))
            .unwrap();
    }
    while engine.has_work() {
        engine.step().unwrap();
    }
    let mut asked = system.clone();
    asked.push(3);
    let id = engine.add_request(request(&asked, 4)).unwrap();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    while engine.has_work() {
        step_into(&mut engine, &mut answers);
    }
    assert_eq!(answers[&id].report.as_ref().unwrap().cached_tokens, 12);
    assert_eq!(tokens(&answers[&id]), model(VOCAB).greedy(&asked, 4));
    engine.cache().unpin(pin).unwrap();
    assert_empty(&engine);
}

#[test]
fn cancelled_requests_give_their_blocks_back() {
    let mut engine = engine(model(VOCAB), 64, 4, EngineConfig::default());
    let prompts = [prompt(1, 9, VOCAB), prompt(2, 9, VOCAB)];
    let [a, b] = prompts
        .each_ref()
        .map(|p| engine.add_request(request(p, 20)).unwrap());
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    for _ in 0..4 {
        step_into(&mut engine, &mut answers);
    }
    engine.cancel(a);
    assert_eq!(engine.stats().blocks_used, 3);
    let waiting = engine.add_request(request(&prompts[0], 5)).unwrap();
    engine.cancel(waiting);
    run_into(&mut engine, &mut answers);
    let cancelled = &answers[&a].samples[0];
    assert_eq!(cancelled.finish, Some(FinishReason::Cancelled));
    assert_eq!(cancelled.tokens, model(VOCAB).greedy(&prompts[0], 4));
    assert_eq!(
        answers[&waiting].samples[0].finish,
        Some(FinishReason::Cancelled)
    );
    assert_eq!(tokens(&answers[&b]), model(VOCAB).greedy(&prompts[1], 20));
    engine.cancel(a);
}
