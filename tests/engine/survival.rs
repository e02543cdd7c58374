//! What goes wrong beside the model ends the request that it concerns, at most: the engine goes
//! on, and no block is lost.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use candle_core::{DType, Device};
use candle_paged_attn::Error;
use candle_paged_attn::cache::{
    AddOptions, CacheConfig, CacheSize, CacheSpec, Feed, PagedKvCache, SequenceId, StepPlan,
};
use candle_paged_attn::engine::{
    BeamSearch, Engine, EngineConfig, FinishReason, HookContext, LogitsHook, Preemption, Request,
};

use crate::common::Rng;
use crate::hash_lm::{
    HashLm, assert_empty, engine, engine_with, model, prompt, request, run, run_into, step_into,
    tokens,
};

/// The answer of `work`, which must not take for ever.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(Duration::from_secs(60)).unwrap()
}

fn swapping(blocks: usize) -> Engine<HashLm> {
    let size = CacheConfig::blocks(blocks)
        .with_block_size(4)
        .with_host(CacheSize::Blocks(8));
    let mut config = EngineConfig::default();
    config.preemption = Preemption::Swap;
    engine_with(model(30), size, config)
}

/// A sequence that comes back from host memory and fills the pool has no row for its next token.
/// It cannot go on, and the one behind it can.
#[test]
fn a_swapped_sequence_that_fills_the_pool_ends() {
    let (first, second) = in_time(|| {
        let mut engine = swapping(2);
        let large = engine.add_request(request(&prompt(1, 4, 30), 20)).unwrap();
        for _ in 0..5 {
            engine.step().unwrap();
        }
        let small = engine.add_request(request(&prompt(2, 4, 30), 2)).unwrap();
        engine.preempt(large).unwrap();
        let mut answers = run(&mut engine);
        assert_empty(&engine);
        (
            answers.remove(&large).unwrap(),
            answers.remove(&small).unwrap(),
        )
    });
    assert_eq!(first.samples[0].finish, Some(FinishReason::CacheFull));
    assert_eq!(tokens(&second), model(30).greedy(&prompt(2, 4, 30), 2));
}

#[test]
fn a_beam_search_without_a_continuation_fails() {
    let finish = in_time(|| {
        let mut engine = engine(model(30), 16, 4, EngineConfig::default());
        let mut barred = request(&prompt(1, 4, 30), 5).with_beams(BeamSearch::new(2));
        barred.sampling.allowed = Some(vec![1]);
        barred.sampling.banned = vec![1];
        let answers = engine.generate(vec![barred], |_| {}).unwrap();
        assert_empty(&engine);
        answers[0].as_ref().unwrap().samples[0].finish.clone()
    });
    let why = "no token is left to sample".to_string();
    assert_eq!(finish, Some(FinishReason::Failed(why)));
}

#[test]
fn an_end_of_text_token_that_the_model_lacks_never_comes() {
    let mut engine = engine(model(30), 16, 4, EngineConfig::default()).with_eos([30, 4_000_000]);
    let asked = prompt(1, 4, 30);
    let mut early = request(&asked, 5);
    early.min_tokens = 1;
    let answers = engine.generate(vec![early], |_| {}).unwrap();
    let answer = answers[0].as_ref().unwrap();
    assert_eq!(tokens(answer), model(30).greedy(&asked, 5));
}

#[test]
fn log_probabilities_of_logits_that_are_no_numbers() {
    for seed in 0..50 {
        let mut rng = Rng(seed);
        let logit = |_| match rng.below(3) {
            0 => f32::NAN,
            _ => rng.unit() as f32,
        };
        let mut model = model(500);
        model.fixed = Some((0..500).map(logit).collect());
        let mut engine = engine(model, 16, 4, EngineConfig::default());
        let mut asked = request(&prompt(1, 6, 500), 2);
        asked.prompt_logprobs = Some(200);
        let answers = engine.generate(vec![asked], |_| {}).unwrap();
        let answer = answers[0].as_ref().unwrap();
        let why = "the logits are not numbers".to_string();
        assert_eq!(answer.samples[0].finish, Some(FinishReason::Failed(why)));
        assert_empty(&engine);
    }
}

#[test]
fn a_cleared_cache_is_filled_again() {
    let mut config = EngineConfig::default();
    config.preemption = Preemption::Swap;
    let size = CacheConfig::blocks(64)
        .with_block_size(4)
        .with_host(CacheSize::Blocks(16));
    let mut engine = engine_with(model(30), size, config);
    let asked: Vec<Vec<u32>> = (0..3).map(|i| prompt(i, 9, 30)).collect();
    let mut all = asked.iter().map(|p| engine.add_request(request(p, 12)));
    let ids = [(); 3].map(|()| all.next().unwrap().unwrap());
    drop(all);
    let searched = request(&asked[0], 6).with_beams(BeamSearch::new(3));
    let beams = engine.add_request(searched.clone()).unwrap();
    let mut answers = BTreeMap::new();
    step_into(&mut engine, &mut answers);
    step_into(&mut engine, &mut answers);
    engine.preempt(ids[1]).unwrap();
    engine.cache().clear();
    engine.cancel(ids[2]);
    run_into(&mut engine, &mut answers);
    for i in 0..2 {
        assert_eq!(tokens(&answers[&ids[i]]), model(30).greedy(&asked[i], 12));
    }
    let mut alone = crate::hash_lm::engine(model(30), 64, 4, EngineConfig::default());
    let alone = alone.generate(vec![searched], |_| {}).unwrap();
    assert_eq!(tokens(&answers[&beams]), tokens(alone[0].as_ref().unwrap()));
    assert_empty(&engine);
}

/// Holds a plan of the cache from the first token that is chosen on.
#[derive(Debug)]
struct Planner {
    cache: PagedKvCache,
    other: SequenceId,
    plan: Mutex<Option<StepPlan>>,
}

impl LogitsHook for Planner {
    fn process(&self, _: &HookContext<'_>, _: &mut [f32]) {
        let mut plan = self.plan.lock().unwrap();
        if plan.is_none() {
            let feed = Feed::new(self.other, &[1, 2]);
            *plan = Some(self.cache.plan(&[feed]).unwrap());
        }
    }
}

/// The step of the others is computed and cannot be tried again: none of them may be lost.
#[test]
fn a_plan_of_somebody_else_while_tokens_are_chosen() {
    let mut engine = engine(model(30), 32, 4, EngineConfig::default());
    let cache = engine.cache().clone();
    let other = cache.add(&[1, 2], AddOptions::default()).unwrap().id;
    let hook = Arc::new(Planner {
        cache: cache.clone(),
        other,
        plan: Mutex::default(),
    });
    let (ours, theirs) = (prompt(1, 4, 30), prompt(2, 4, 30));
    let hooked = request(&ours, 1).with_hook(hook.clone());
    let first = engine.add_request(hooked).unwrap();
    let second = engine.add_request(request(&theirs, 3)).unwrap();
    // Its fork has no chance beside the plan.
    let third = engine.add_request(request(&theirs, 3).with_n(2)).unwrap();
    let mut outputs = engine.step().unwrap();
    assert!(matches!(engine.step(), Err(Error::PlanOutstanding { .. })));
    hook.plan.lock().unwrap().take();
    outputs.extend(in_time(move || {
        let mut outputs = Vec::new();
        while engine.has_work() {
            outputs.extend(engine.step().unwrap());
        }
        assert_eq!(engine.cache().num_sequences(), 1);
        outputs
    }));
    let of = |id| -> Vec<u32> {
        let of = outputs.iter().filter(|output| output.request == id);
        of.flat_map(|output| output.tokens.clone()).collect()
    };
    assert_eq!(of(first), model(30).greedy(&ours, 1));
    assert_eq!(of(second), model(30).greedy(&theirs, 3));
    let failed = outputs.iter().find(|output| output.request == third);
    assert!(matches!(
        failed.unwrap().finish,
        Some(FinishReason::Failed(_))
    ));
}

/// The beams become hypotheses once, and their blocks return when the plan has ended.
#[test]
fn cancelling_a_search_beside_a_plan() {
    let mut engine = engine(model(30), 64, 4, EngineConfig::default());
    let searched = request(&prompt(1, 5, 30), 8).with_beams(BeamSearch::new(3));
    let id = engine.add_request(searched.with_n(3)).unwrap();
    for _ in 0..3 {
        engine.step().unwrap();
    }
    let cache = engine.cache().clone();
    let other = cache.add(&[1, 2], AddOptions::default()).unwrap().id;
    let plan = cache.plan(&[Feed::new(other, &[1, 2])]).unwrap();
    engine.cancel(id);
    drop(plan);
    cache.remove(other).unwrap();
    let answers = run(&mut engine);
    let samples = &answers[&id].samples;
    assert_eq!(samples.len(), 3);
    for sample in samples {
        assert_eq!(sample.finish, Some(FinishReason::Cancelled));
        assert_eq!(sample.tokens.len(), 3);
    }
    assert_empty(&engine);
}

#[test]
fn a_dropped_engine_gives_everything_back() {
    let mut engine = swapping(16);
    let first = engine.add_request(request(&prompt(1, 9, 30), 50)).unwrap();
    engine.add_request(request(&prompt(2, 9, 30), 50)).unwrap();
    engine.step().unwrap();
    engine.preempt(first).unwrap();
    let cache = engine.cache().clone();
    assert_eq!((cache.num_sequences(), cache.num_swapped()), (1, 1));
    drop(engine);
    assert_eq!((cache.num_sequences(), cache.num_swapped()), (0, 0));
    assert_eq!(cache.usage()[0].blocks_used, 0);
}

#[test]
fn a_cache_of_other_layers_is_refused() {
    let spec = CacheSpec::uniform(3, 2, 16, DType::F32).unwrap();
    let cache = PagedKvCache::new(&spec, &CacheConfig::blocks(8), &Device::Cpu).unwrap();
    let refused = Engine::new(Arc::new(model(30)), cache, EngineConfig::default());
    assert!(matches!(
        refused.unwrap_err(),
        Error::InvalidArgument { what, .. } if what == "cache"
    ));
}

/// Position 32 sees positions 15 to 32, which lie in blocks 0, 1 and 2 of 16 tokens; position 34
/// sees 17 to 34, in blocks 1 and 2.
#[test]
fn a_window_may_need_more_blocks_on_the_way_than_at_its_end() {
    let windowed = |blocks| {
        let mut model = model(30);
        model.windows = vec![Some(18)];
        engine(model, blocks, 16, EngineConfig::default())
    };
    let asked: Request = request(&prompt(1, 33, 30), 2);
    let refused = windowed(2).add_request(asked.clone());
    assert!(matches!(
        refused,
        Err(Error::OutOfBlocks {
            needed: 3,
            free: 2,
            ..
        })
    ));
    let answers = windowed(3).generate(vec![asked], |_| {}).unwrap();
    let finish = &answers[0].as_ref().unwrap().samples[0].finish;
    assert_eq!(*finish, Some(FinishReason::Length));
}

#[test]
fn a_prompt_of_one_token_has_no_log_probability() {
    let mut engine = engine(model(30), 16, 4, EngineConfig::default());
    let mut asked = request(&[3], 2);
    asked.prompt_logprobs = Some(1);
    let answers = engine.generate(vec![asked], |_| {}).unwrap();
    let report = answers[0].as_ref().unwrap().report.as_ref().unwrap();
    assert_eq!(report.prompt_logprobs.len(), 1);
    assert!(report.prompt_logprobs[0].is_none());
}

#[test]
fn a_pin_needs_a_prefix_cache() {
    let config = EngineConfig::default().without_prefix_cache();
    let mut engine = engine(model(30), 4, 4, config);
    let refused = engine.pin_prefix(&prompt(9, 12, 30), Default::default());
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
    assert_empty(&engine);
}
