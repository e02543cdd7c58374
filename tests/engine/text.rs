//! Text, and the strings that end it.

use std::sync::Arc;

use candle_paged_attn::engine::{EngineConfig, FinishReason, HookContext, LogitsHook, Request};
use tokenizers::Tokenizer;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::models::wordlevel::WordLevel;

use crate::hash_lm::{engine, model, request, run};

const PIECES: [&str; 6] = ["a", "bE", "N", "Dc", "ü", "."];

fn tokenizer() -> Arc<Tokenizer> {
    let vocab = (0..).zip(PIECES).map(|(id, piece)| (piece.to_string(), id));
    let words = WordLevel::builder()
        .vocab(vocab.collect())
        .unk_token(".".into())
        .build()
        .unwrap();
    let mut tokenizer = Tokenizer::new(words);
    tokenizer.with_decoder(Some(Fuse::default()));
    Arc::new(tokenizer)
}

/// Says these tokens.
#[derive(Debug)]
struct Script(Vec<u32>);

impl LogitsHook for Script {
    fn choose(&self, context: &HookContext<'_>, _: &[f32]) -> Option<u32> {
        self.0.get(context.generated.len()).copied()
    }
}

/// The pieces of text of the answer, and why it ended.
fn say(tokens: &[u32], change: impl FnOnce(&mut Request)) -> (Vec<String>, FinishReason) {
    let mut engine = engine(model(6), 16, 4, EngineConfig::default())
        .with_tokenizer(tokenizer())
        .with_eos([5]);
    let script = Arc::new(Script(tokens.to_vec()));
    let mut asked = request(&[0], tokens.len()).with_hook(script);
    change(&mut asked);
    let id = engine.add_request(asked).unwrap();
    let mut pieces = vec![];
    let mut finish = None;
    while engine.has_work() {
        for output in engine.step().unwrap() {
            assert_eq!(output.request, id);
            pieces.push(output.text);
            finish = output.finish.or(finish);
        }
    }
    (pieces, finish.unwrap())
}

#[test]
fn text_leaves_with_its_tokens() {
    let (pieces, finish) = say(&[0, 1, 4], |_| {});
    assert_eq!(pieces, ["a", "bE", "ü"]);
    assert_eq!(finish, FinishReason::Length);
    // The token that ends the answer has no text.
    let (pieces, finish) = say(&[0, 5, 4], |_| {});
    assert_eq!(pieces, ["a", ""]);
    assert_eq!(finish, FinishReason::StopToken(5));
}

#[test]
fn a_stop_string_may_straddle_tokens() {
    let stop = |r: &mut Request| r.stop_strings = vec!["END".into(), "zz".into()];
    let (pieces, finish) = say(&[0, 1, 2, 3, 0], stop);
    // "E" might begin it and waits; the text ends before the string.
    assert_eq!(pieces, ["a", "b", "", ""]);
    assert_eq!(finish, FinishReason::StopString("END".into()));
    // It does not come: what was held back leaves with what follows, or with the end.
    let (pieces, finish) = say(&[1, 2, 0, 1], stop);
    assert_eq!(pieces, ["b", "", "ENa", "bE"]);
    assert_eq!(finish, FinishReason::Length);
}

#[test]
fn stop_strings_wait_for_the_least_number_of_tokens() {
    let (pieces, finish) = say(&[0, 0, 0, 1], |r| {
        r.stop_strings = vec!["a".into()];
        r.min_tokens = 3;
    });
    assert_eq!(pieces.concat(), "aa");
    assert_eq!(finish, FinishReason::StopString("a".into()));
}

#[test]
fn samples_have_texts_of_their_own() {
    let mut engine = engine(model(6), 64, 4, EngineConfig::default()).with_tokenizer(tokenizer());
    let mut asked = request(&[0, 1], 8).with_n(3);
    asked.sampling.temperature = 1.0;
    let id = engine.add_request(asked).unwrap();
    for sample in &run(&mut engine)[&id].samples {
        let text: String = sample.tokens.iter().map(|&t| PIECES[t as usize]).collect();
        assert_eq!(sample.text, text);
    }
}
