//! Requests that are refused, each with an error that names what was given, and without a
//! trace in the engine.

use candle_paged_attn::Error;
use candle_paged_attn::engine::{BeamSearch, EngineConfig, Request};

use crate::hash_lm::{assert_empty, engine, model, prompt, request, run, tokens};

#[test]
fn bad_requests_are_refused_and_others_unharmed() {
    let mut engine = engine(
        model(30),
        16,
        4,
        EngineConfig::default().with_max_sequences(4),
    );
    let good = prompt(1, 6, 30);
    let id = engine.add_request(request(&good, 4)).unwrap();
    type Change = fn(&mut Request);
    let invalid: [(&str, Change); 23] = [
        ("temperature", |r| r.sampling.temperature = -1.0),
        ("temperature", |r| r.sampling.temperature = f32::NAN),
        ("temperature", |r| r.sampling.temperature = f32::INFINITY),
        ("top_p", |r| r.sampling.top_p = 0.0),
        ("top_p", |r| r.sampling.top_p = 1.5),
        ("top_p", |r| r.sampling.top_p = f32::NAN),
        ("top_k", |r| r.sampling.top_k = Some(0)),
        ("min_p", |r| r.sampling.min_p = -0.1),
        ("repetition_penalty", |r| {
            r.sampling.repetition_penalty = 0.0
        }),
        ("presence_penalty", |r| {
            r.sampling.presence_penalty = f32::NAN
        }),
        ("frequency_penalty", |r| {
            r.sampling.frequency_penalty = f32::INFINITY
        }),
        ("logit_bias", |r| {
            r.sampling.logit_bias = vec![(1, f32::NAN)]
        }),
        ("logit_bias", |r| {
            r.sampling.logit_bias = vec![(1, f32::INFINITY)]
        }),
        ("allowed", |r| r.sampling.allowed = Some(vec![])),
        ("n", |r| r.n = 0),
        ("best_of", |r| (r.n, r.best_of) = (3, Some(2))),
        ("samples or beams", |r| r.n = 5),
        ("max_tokens", |r| r.max_tokens = 0),
        ("min_tokens", |r| r.min_tokens = 99),
        ("logprobs", |r| r.logprobs = Some(31)),
        ("stop_strings", |r| r.stop_strings = vec!["x".into()]),
        ("beams.width", |r| r.beams = Some(BeamSearch::new(1))),
        ("temperature", |r| {
            r.beams = Some(BeamSearch::new(2));
            r.sampling.temperature = 1.0;
        }),
    ];
    for (name, change) in invalid {
        let mut bad = request(&good, 4);
        change(&mut bad);
        match engine.add_request(bad.clone()) {
            Err(Error::InvalidArgument {
                op: "add_request",
                what,
                ..
            }) => assert_eq!(what, name),
            other => panic!("{name}: {other:?}"),
        }
        assert!(engine.cost(&bad).is_err());
    }
    let refused = |change: Change| {
        let mut bad = request(&good, 4);
        change(&mut bad);
        bad
    };
    let empty = engine.add_request(refused(|r| r.prompt.clear()));
    assert!(matches!(
        empty,
        Err(Error::Empty {
            what: "the prompt",
            ..
        })
    ));
    let stop = engine.add_request(refused(|r| r.stop_strings = vec![String::new()]));
    assert!(matches!(
        stop,
        Err(Error::Empty {
            what: "a stop string",
            ..
        })
    ));
    let outside: [Change; 5] = [
        |r| r.prompt.push(30),
        |r| r.stop_ids.push(30),
        |r| r.sampling.banned.push(30),
        |r| r.sampling.allowed = Some(vec![30]),
        |r| r.sampling.logit_bias = vec![(30, 1.0)],
    ];
    for change in outside {
        let refused = engine.add_request(refused(change));
        let expected = matches!(
            refused,
            Err(Error::TokenOutOfRange {
                token: 30,
                vocab: 30,
                ..
            })
        );
        assert!(expected, "{refused:?}");
    }
    let long = engine.add_request(request(&prompt(2, 4096, 30), 1));
    assert!(matches!(
        long,
        Err(Error::ContextLength {
            len: 4097,
            max: 4096,
            ..
        })
    ));

    assert_eq!(engine.num_requests(), 1);
    let answers = run(&mut engine);
    assert_eq!(answers.len(), 1);
    assert_eq!(tokens(&answers[&id]), model(30).greedy(&good, 4));
    assert_empty(&engine);
}

#[test]
fn generate_answers_refused_requests_in_their_place() {
    let mut engine = engine(model(30), 16, 4, EngineConfig::default());
    let asked = prompt(1, 6, 30);
    let mut seen = vec![];
    let requests = vec![
        request(&asked, 3),
        request(&[], 3),
        request(&asked, 2).with_n(2),
    ];
    let answers = engine
        .generate(requests, |progress| seen.push(*progress))
        .unwrap();
    let first = answers[0].as_ref().unwrap();
    assert_eq!(tokens(first), model(30).greedy(&asked, 3));
    assert!(matches!(answers[1], Err(Error::Empty { .. })));
    assert_eq!(answers[2].as_ref().unwrap().samples.len(), 2);
    let last = seen.last().unwrap();
    assert_eq!((last.requests, last.finished, last.tokens), (3, 3, 7));
    assert!(seen.windows(2).all(|two| two[0].tokens <= two[1].tokens));
}

#[test]
fn a_forward_that_always_fails_ends_its_requests() {
    let mut engine = engine(model(30), 16, 4, EngineConfig::default());
    let asked = prompt(1, 6, 30);
    engine
        .model()
        .failures
        .store(2, std::sync::atomic::Ordering::Relaxed);
    let answers = engine.generate(vec![request(&asked, 3)], |_| {}).unwrap();
    let finish = answers[0].as_ref().unwrap().samples[0]
        .finish
        .as_ref()
        .unwrap();
    assert_eq!(finish.as_str(), "failed");
    let answers = engine.generate(vec![request(&asked, 3)], |_| {}).unwrap();
    assert_eq!(
        tokens(answers[0].as_ref().unwrap()),
        model(30).greedy(&asked, 3)
    );
    assert_empty(&engine);
}

#[test]
fn an_engine_whose_budget_is_below_its_sequences_is_refused() {
    let lm = std::sync::Arc::new(model(30));
    let cache = engine(model(30), 4, 4, EngineConfig::default())
        .cache()
        .clone();
    for (sequences, budget) in [(0, 8), (9, 8)] {
        let mut config = EngineConfig::default();
        (config.max_sequences, config.max_batch_tokens) = (sequences, budget);
        let refused = candle_paged_attn::engine::Engine::new(lm.clone(), cache.clone(), config);
        assert!(matches!(
            refused,
            Err(Error::InvalidArgument { op: "engine", .. })
        ));
    }
}
