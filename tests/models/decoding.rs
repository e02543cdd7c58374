//! Forward passes against the f64 reference, where candle's model cannot follow, and what a
//! forward refuses.

use candle_core::{DType, Tensor};
use candle_paged_attn::Error;
use candle_paged_attn::cache::{Feed, Logits};
use candle_paged_attn::models::CausalLm;
use serde_json::json;

use crate::checkpoint::{Tiny, distance, tokens};
use crate::reference::{self, Reference};
use crate::run::{cache, in_chunks, load, sequence};

#[test]
fn biases_and_a_head_dim_of_its_own() {
    let tiny = Tiny {
        hidden: 40,
        head_dim: 24,
        bias: true,
        ..Tiny::new(2)
    };
    let weights = tiny.weights(21);
    let prompt = tokens(22, 29, tiny.vocab);
    let want = reference::logits(&tiny, &weights, &prompt);
    let model = load(&tiny, &weights, DType::F32);
    for chunk in [29, 5] {
        let far = distance(&in_chunks(&model, &prompt, chunk), &want);
        assert!(far <= 1e-5, "chunks of {chunk}: {far}");
    }
}

#[test]
fn linear_rope_scaling_divides_positions() {
    let tiny = Tiny {
        extra: json!({"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ..Tiny::new(2)
    };
    let weights = tiny.weights(23);
    let prompt = tokens(24, 40, tiny.vocab);
    let tensors = weights.tensors();
    let mut reference = Reference::new(&tiny, &tensors);
    for frequency in &mut reference.frequencies {
        *frequency /= 4.0;
    }
    let model = load(&tiny, &weights, DType::F32);
    let far = distance(&in_chunks(&model, &prompt, 40), &reference.logits(&prompt));
    assert!(far <= 1e-5, "{far}");
}

#[test]
fn only_wanted_rows_get_logits() {
    let tiny = Tiny::new(2);
    let model = load(&tiny, &tiny.weights(27), DType::F32);
    let prompts = [(28, 6), (29, 4), (30, 5)].map(|(seed, len)| tokens(seed, len, tiny.vocab));
    let whole: Vec<_> = prompts
        .iter()
        .map(|prompt| in_chunks(&model, prompt, prompt.len()))
        .collect();
    let cache = cache(&model, DType::F32);
    let ids = prompts.each_ref().map(|prompt| sequence(&cache, prompt));
    let run = |kinds: [Logits; 3]| {
        let feeds: Vec<_> = (0..3)
            .map(|i| Feed::new(ids[i], &prompts[i]).with_logits(kinds[i]))
            .collect();
        let plan = cache.plan(&feeds).unwrap();
        model.forward(plan.tokens(), &plan).unwrap()
    };
    let mixed = run([Logits::Last, Logits::None, Logits::All]);
    let mut want = vec![whole[0][5].clone()];
    want.extend(whole[2].iter().cloned());
    let far = distance(&mixed.to_vec2().unwrap(), &want);
    assert!(far <= 1e-5, "{far}");
    assert_eq!(run([Logits::None; 3]).dims(), [0, tiny.vocab]);
}

#[test]
fn c20_a_prompt_of_5000_tokens_and_one_past_the_context_length() {
    let tiny = Tiny {
        hidden: 16,
        heads: 2,
        kv_heads: 1,
        head_dim: 8,
        inner: 24,
        vocab: 64,
        layers: 1,
        context: 8192,
        ..Tiny::new(1)
    };
    let weights = tiny.weights(31);
    let model = load(&tiny, &weights, DType::F32);
    let prompt = tokens(32, 8193, tiny.vocab);
    let far = distance(
        &in_chunks(&model, &prompt[..5000], 5000),
        &reference::logits(&tiny, &weights, &prompt[..5000]),
    );
    assert!(far <= 1e-4, "{far}");

    let cache = cache(&model, DType::F32);
    let id = sequence(&cache, &prompt);
    let plan = cache.plan(&[Feed::new(id, &prompt)]).unwrap();
    match model.forward(plan.tokens(), &plan) {
        Err(Error::ContextLength { len, max, .. }) => assert_eq!((len, max), (8193, 8192)),
        other => panic!("{other:?}"),
    }
    drop(plan);
    assert_eq!(cache.len(id).unwrap(), 0);
    // The last position there is.
    let plan = cache
        .plan(&[Feed::new(id, &prompt[..1]).with_positions(&[8191])])
        .unwrap();
    model.forward(plan.tokens(), &plan).unwrap();
}

#[test]
fn a_token_outside_the_vocabulary_is_refused_before_any_work() {
    let tiny = Tiny::new(1);
    let model = load(&tiny, &tiny.weights(33), DType::F32);
    let cache = cache(&model, DType::F32);
    let prompt = [3, 97, 5];
    let id = sequence(&cache, &prompt);
    let plan = cache.plan(&[Feed::new(id, &prompt)]).unwrap();
    match model.forward(plan.tokens(), &plan) {
        Err(Error::TokenOutOfRange { token, vocab, .. }) => assert_eq!((token, vocab), (97, 97)),
        other => panic!("{other:?}"),
    }
}

/// K/V of other tokens than the plan's would be found under the plan's later.
#[test]
fn other_tokens_than_the_plans_are_refused() {
    let tiny = Tiny::new(1);
    let model = load(&tiny, &tiny.weights(34), DType::F32);
    let cache = cache(&model, DType::F32);
    let prompt = [3, 4, 5];
    let id = sequence(&cache, &prompt);
    let plan = cache.plan(&[Feed::new(id, &prompt)]).unwrap();
    let others = Tensor::new(&[3u32, 4, 6], plan.tokens().device()).unwrap();
    match model.forward(&others, &plan) {
        Err(Error::InvalidArgument { what, .. }) => assert_eq!(what, "tokens"),
        other => panic!("{other:?}"),
    }
}

/// One model, two threads, a cache each: a model holds nothing of a sequence.
#[test]
fn a_model_is_shared_between_threads() {
    let tiny = Tiny::new(2);
    let weights = tiny.weights(35);
    let model = load(&tiny, &weights, DType::F32);
    std::thread::scope(|scope| {
        for seed in [36, 37] {
            let (model, tiny, weights) = (&model, &tiny, &weights);
            scope.spawn(move || {
                let prompt = tokens(seed, 20, tiny.vocab);
                let want = reference::logits(tiny, weights, &prompt);
                for _ in 0..5 {
                    let far = distance(&in_chunks(model, &prompt, 3), &want);
                    assert!(far <= 1e-5, "{far}");
                }
            });
        }
    });
}
