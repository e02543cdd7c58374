//! The sampler against hand calculations, on a model whose logits are always the same.

use std::sync::Arc;

use candle_paged_attn::engine::{
    EngineConfig, FinishReason, HookContext, LogitsHook, Request, Sample, Sampling,
};

use crate::common::Rng;
use crate::hash_lm::{HashLm, engine, model, prompt, request, run, tokens};

/// A model with these logits after any history.
fn fixed(logits: &[f32]) -> HashLm {
    let mut fixed = model(logits.len());
    fixed.fixed = Some(logits.to_vec());
    fixed
}

fn answer(logits: &[f32], request: Request) -> Sample {
    let mut engine = engine(fixed(logits), 512, 16, EngineConfig::default());
    let id = engine.add_request(request).unwrap();
    run(&mut engine).remove(&id).unwrap().samples.remove(0)
}

/// Logits of the probabilities 0.1, 0.2, 0.3 and 0.4.
fn tenths() -> Vec<f32> {
    [1f32, 2., 3., 4.].map(f32::ln).to_vec()
}

/// How often each token was sampled, over 3,000 tokens.
fn shares(sampling: Sampling) -> [f64; 4] {
    const TOKENS: usize = 3000;
    let sample = answer(&tenths(), request(&[0], TOKENS).with_sampling(sampling));
    let mut shares = [0.0; 4];
    for token in sample.tokens {
        shares[token as usize] += 1.0 / TOKENS as f64;
    }
    shares
}

/// Five standard deviations of a share of 1/2 are 0.046.
fn assert_shares(sampling: Sampling, expected: [f64; 4]) {
    let got = shares(sampling);
    for (got_one, expected_one) in got.iter().zip(&expected) {
        let close = (got_one - expected_one).abs() < 0.046;
        let ruled_out = *expected_one == 0.0 && *got_one != 0.0;
        assert!(close && !ruled_out, "got {got:?}, expected {expected:?}");
    }
}

#[test]
fn shares_are_those_of_the_probabilities() {
    let sampling = || Sampling::temperature(1.0).with_seed(1);
    assert_shares(sampling(), [0.1, 0.2, 0.3, 0.4]);
    // p^2 / sum.
    let halved = Sampling::temperature(0.5).with_seed(2);
    assert_shares(halved, [1., 4., 9., 16.].map(|x| x / 30.));
    assert_shares(sampling().with_top_k(2), [0., 0., 3. / 7., 4. / 7.]);
    // 0.4 alone is too little, 0.4 + 0.3 enough.
    assert_shares(sampling().with_top_p(0.65), [0., 0., 3. / 7., 4. / 7.]);
    assert_shares(sampling().with_top_p(0.39), [0., 0., 0., 1.]);
    // At least 0.45 of 0.4.
    assert_shares(sampling().with_min_p(0.45), [0., 2. / 9., 3. / 9., 4. / 9.]);
    // The cuts one after the other: of 2, 3, 4 the two likeliest, of those 4/7 is enough.
    let all = sampling().with_min_p(0.45).with_top_k(2).with_top_p(0.5);
    assert_shares(all, [0., 0., 0., 1.]);
}

#[test]
fn bias_bans_and_allowed_tokens() {
    let sampling = || Sampling::temperature(1.0).with_seed(3);
    let mut biased = sampling();
    biased.logit_bias = vec![(0, 4f32.ln()), (3, f32::NEG_INFINITY)];
    assert_shares(biased, [4. / 9., 2. / 9., 3. / 9., 0.]);
    let mut banned = sampling();
    banned.banned = vec![3, 1];
    assert_shares(banned, [0.25, 0., 0.75, 0.]);
    let mut allowed = sampling();
    allowed.allowed = Some(vec![1, 2]);
    allowed.banned = vec![2];
    assert_shares(allowed, [0., 1., 0., 0.]);
    // Nothing is left: the request fails, and says why.
    let mut none = sampling();
    none.allowed = Some(vec![1]);
    none.banned = vec![1];
    let sample = answer(&tenths(), request(&[0], 3).with_sampling(none));
    assert!(matches!(sample.finish, Some(FinishReason::Failed(_))));
}

#[test]
fn penalties_by_hand() {
    let greedy = |logits: &[f32], prompt: &[u32], change: &dyn Fn(&mut Sampling)| {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        answer(logits, request(prompt, 5).with_sampling(sampling)).tokens
    };
    let logits = [1.0, 0.9, 0.45, -1.0];
    // 1.0 -> 0.8; 0.9 -> 0.7; then 0.8 stays the largest: presence counts once.
    let presence = greedy(&logits, &[0], &|s| s.presence_penalty = 0.2);
    assert_eq!(presence, [0, 1, 0, 0, 0]);
    // 1.0, 0.9, 0.75, 0.65, 0.5 | 0.45 is next.
    let frequency = greedy(&logits, &[0], &|s| s.frequency_penalty = 0.25);
    assert_eq!(frequency, [0, 1, 0, 1, 0]);
    // The prompt counts: 1.0 / 2.1 is less than 0.9; then 0.9 / 2.1 is less than 1.0 / 2.1.
    let repetition = greedy(&logits, &[0], &|s| s.repetition_penalty = 2.1);
    assert_eq!(repetition, [1, 0, 0, 0, 0]);
    // A negative logit is multiplied: -0.5 becomes -1.5, below -1.
    let negative = greedy(&[-0.5, -1.0], &[0], &|s| s.repetition_penalty = 3.0);
    assert_eq!(negative, [1, 0, 0, 0, 0]);
}

#[test]
fn equal_logits_give_the_smallest_id() {
    assert_eq!(
        answer(&[0., 2., 1., 2.], request(&[0], 3)).tokens,
        [1, 1, 1]
    );
}

#[test]
fn logprobs_by_hand() {
    let mut request = request(&[0, 3, 1], 2);
    request.logprobs = Some(3);
    request.prompt_logprobs = Some(1);
    let mut engine = engine(fixed(&tenths()), 16, 16, EngineConfig::default());
    let id = engine.add_request(request).unwrap();
    let answer = run(&mut engine).remove(&id).unwrap();
    let near = |got: f32, p: f64| assert!((f64::from(got) - p.ln()).abs() < 1e-6, "{got} {p}");
    assert_eq!(answer.samples[0].logprobs.len(), 2);
    for logprobs in &answer.samples[0].logprobs {
        assert_eq!(logprobs.token.token, 3);
        near(logprobs.token.logprob, 0.4);
        let top: Vec<u32> = logprobs.top.iter().map(|top| top.token).collect();
        assert_eq!(top, [3, 2, 1]);
        near(logprobs.top[2].logprob, 0.2);
    }
    let prompt = answer.report.unwrap().prompt_logprobs;
    assert_eq!(prompt.len(), 3);
    assert!(prompt[0].is_none());
    near(prompt[1].as_ref().unwrap().token.logprob, 0.4);
    near(prompt[2].as_ref().unwrap().token.logprob, 0.2);
    assert_eq!(prompt[2].as_ref().unwrap().top[0].token, 3);
}

/// Prompt log-probabilities in chunks, after a preemption, and with the prompt in the cache.
#[test]
fn prompt_logprobs_do_not_depend_on_chunks_or_the_cache() {
    let lm = model(20);
    let asked = prompt(1, 30, 20);
    let mut expected = vec![];
    for at in 1..asked.len() {
        let logits = lm.logits(&asked[..at]);
        let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        expected.push(f64::from(logits[asked[at] as usize]) - total.ln());
    }
    let config = EngineConfig::default()
        .with_max_sequences(2)
        .with_max_batch_tokens(7);
    let mut engine = engine(lm, 16, 4, config);
    engine.add_request(request(&asked, 1)).unwrap();
    run(&mut engine);
    let mut again = request(&asked, 3);
    again.prompt_logprobs = Some(0);
    let id = engine.add_request(again).unwrap();
    engine.step().unwrap();
    engine.step().unwrap();
    engine.preempt(id).unwrap();
    let answers = run(&mut engine);
    assert_eq!(tokens(&answers[&id]), model(20).greedy(&asked, 3));
    let report = answers[&id].report.as_ref().unwrap();
    assert_eq!(report.cached_tokens, 0);
    assert_eq!(report.prompt_logprobs.len(), asked.len());
    for (got, expected) in report.prompt_logprobs[1..].iter().zip(expected) {
        let got = got.as_ref().unwrap().token.logprob;
        assert!((f64::from(got) - expected).abs() < 1e-5);
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens_whatever_runs_beside_it() {
    let asked = prompt(1, 10, 30);
    let sampled = |seed| {
        let sampling = Sampling::temperature(1.5).with_top_k(20).with_top_p(0.95);
        request(&asked, 20)
            .with_n(2)
            .with_sampling(sampling.with_seed(seed))
    };
    let mut alone = engine(model(30), 64, 4, EngineConfig::default());
    let id = alone.add_request(sampled(9)).unwrap();
    let expected = run(&mut alone).remove(&id).unwrap().samples;
    assert_ne!(expected[0].tokens, expected[1].tokens);

    let config = EngineConfig::default()
        .with_max_sequences(6)
        .with_max_batch_tokens(11);
    let mut crowded = engine(model(30), 14, 4, config);
    let mut ids = vec![];
    let mut rng = Rng(3);
    for seed in 0..12 {
        if seed % 3 == 0 {
            ids.push(crowded.add_request(sampled(9)).unwrap());
        }
        let len = 1 + rng.below(20);
        crowded
            .add_request(request(&prompt(100 + seed, len, 30), 10))
            .unwrap();
    }
    let other = crowded.add_request(sampled(10)).unwrap();
    let answers = run(&mut crowded);
    assert!(crowded.stats().preemptions > 0);
    for id in ids {
        for (got, expected) in answers[&id].samples.iter().zip(&expected) {
            assert_eq!(got.tokens, expected.tokens);
        }
    }
    assert_ne!(answers[&other].samples[0].tokens, expected[0].tokens);
}

/// n samples of a prompt of p tokens, one more each: (n - 1) * floor(p / B) blocks fewer than
/// without sharing.
#[test]
fn samples_share_the_full_blocks_of_their_prompt() {
    for (n, len, block_size) in [
        (2, 1, 1),
        (2, 9, 1),
        (3, 3, 4),
        (3, 4, 4),
        (4, 14, 4),
        (7, 16, 16),
        (5, 33, 16),
    ] {
        let mut engine = engine(model(30), 128, block_size, EngineConfig::default());
        let sampling = Sampling::temperature(1.0).with_seed(5);
        let asked = request(&prompt(1, len, 30), 3).with_sampling(sampling);
        engine.add_request(asked.with_n(n)).unwrap();
        let mut answers = std::collections::BTreeMap::new();
        // The prompt, then a token of each sample.
        crate::hash_lm::step_into(&mut engine, &mut answers);
        crate::hash_lm::step_into(&mut engine, &mut answers);
        let alone = n * (len + 1).div_ceil(block_size);
        let saved = (n - 1) * (len / block_size);
        assert_eq!(engine.stats().blocks_used, alone - saved, "{n} {len}");
        crate::hash_lm::run_into(&mut engine, &mut answers);
    }
}

/// The last, partly filled block is shared, too, until its samples write to it.
#[test]
fn samples_share_their_prompt() {
    let mut engine = engine(model(30), 64, 4, EngineConfig::default());
    let asked = prompt(1, 14, 30);
    let sampling = Sampling::temperature(1.0).with_seed(5);
    let id = engine
        .add_request(request(&asked, 2).with_n(4).with_sampling(sampling))
        .unwrap();
    let mut answers = std::collections::BTreeMap::new();
    crate::hash_lm::step_into(&mut engine, &mut answers);
    // All four hold the four blocks of the prompt.
    assert_eq!(engine.stats().blocks_used, 4);
    crate::hash_lm::run_into(&mut engine, &mut answers);
    // The last, partly filled block was copied for three of them.
    assert_eq!(engine.cache().counters().copies, 3);
    assert_eq!(answers[&id].samples.len(), 4);
    assert!(
        answers[&id]
            .samples
            .iter()
            .all(|sample| sample.tokens.len() == 2)
    );
}

#[test]
fn the_best_samples_come_in_order_of_their_logprob() {
    let asked = prompt(1, 6, 12);
    let lm = model(12);
    let mut request = request(&asked, 5).with_n(2);
    request.best_of = Some(6);
    request.sampling = Sampling::temperature(1.0).with_seed(4);
    let mut all = request.clone();
    (all.n, all.best_of) = (6, None);
    let mut engine = engine(model(12), 64, 4, EngineConfig::default());
    let [best, all] = [request, all].map(|r| engine.add_request(r).unwrap());
    let answers = run(&mut engine);
    let score = |tokens: &[u32]| {
        let mut history = asked.clone();
        let mut sum = 0.0;
        for &token in tokens {
            let logits = lm.logits(&history);
            let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            sum += f64::from(logits[token as usize]) - total.ln();
            history.push(token);
        }
        sum / tokens.len() as f64
    };
    let mut ranked: Vec<_> = answers[&all]
        .samples
        .iter()
        .map(|s| s.tokens.clone())
        .collect();
    ranked.sort_by(|a, b| score(b).total_cmp(&score(a)));
    let got: Vec<_> = answers[&best]
        .samples
        .iter()
        .map(|s| s.tokens.clone())
        .collect();
    assert_eq!(got, ranked[..2]);
    let reported = answers[&best].samples[0].score.unwrap();
    assert!((reported - score(&got[0])).abs() < 1e-5);
}

#[derive(Debug)]
struct EvenOnly;

impl LogitsHook for EvenOnly {
    fn process(&self, context: &HookContext<'_>, logits: &mut [f32]) {
        assert_eq!(context.prompt, [0]);
        for odd in logits.iter_mut().skip(1).step_by(2) {
            *odd = f32::NEG_INFINITY;
        }
    }
}

#[derive(Debug)]
struct Counting;

impl LogitsHook for Counting {
    fn choose(&self, context: &HookContext<'_>, _: &[f32]) -> Option<u32> {
        let next = context.generated.len() as u32;
        (next < 3).then_some(next)
    }
}

#[derive(Debug)]
struct Panicking;

impl LogitsHook for Panicking {
    fn process(&self, context: &HookContext<'_>, _: &mut [f32]) {
        assert!(context.generated.len() < 2, "expected by the test");
    }
}

#[test]
fn hooks_change_or_replace_the_choice() {
    let even = answer(&tenths(), request(&[0], 3).with_hook(Arc::new(EvenOnly)));
    assert_eq!(even.tokens, [2, 2, 2]);
    let counting = answer(&tenths(), request(&[0], 5).with_hook(Arc::new(Counting)));
    assert_eq!(counting.tokens, [0, 1, 2, 3, 3]);
}

#[test]
fn a_hook_that_panics_ends_its_own_request() {
    let mut engine = engine(model(30), 64, 4, EngineConfig::default());
    let [a, b] = [prompt(1, 6, 30), prompt(2, 7, 30)];
    let bad = engine
        .add_request(request(&a, 6).with_hook(Arc::new(Panicking)))
        .unwrap();
    let good = engine.add_request(request(&b, 6)).unwrap();
    let answers = run(&mut engine);
    let failed = &answers[&bad].samples[0];
    assert!(matches!(failed.finish, Some(FinishReason::Failed(_))));
    assert_eq!(failed.tokens, model(30).greedy(&a, 2));
    assert_eq!(tokens(&answers[&good]), model(30).greedy(&b, 6));
}

#[test]
fn stop_ids_and_the_least_number_of_tokens() {
    let mut stopping = request(&[0], 9);
    stopping.stop_ids = vec![3];
    let sample = answer(&tenths(), stopping.clone());
    assert_eq!(sample.finish, Some(FinishReason::StopToken(3)));
    assert_eq!(sample.tokens, [3]);
    // Until then it cannot be sampled, and the next best is.
    stopping.min_tokens = 2;
    assert_eq!(answer(&tenths(), stopping).tokens, [2, 2, 3]);

    let mut engine = engine(fixed(&tenths()), 16, 4, EngineConfig::default()).with_eos([3]);
    let stops = engine.add_request(request(&[0], 4)).unwrap();
    let mut ignoring = request(&[0], 4);
    ignoring.ignore_eos = true;
    let goes_on = engine.add_request(ignoring).unwrap();
    let answers = run(&mut engine);
    assert_eq!(answers[&stops].samples[0].tokens, [3]);
    assert_eq!(tokens(&answers[&goes_on]), [3, 3, 3, 3]);
}
