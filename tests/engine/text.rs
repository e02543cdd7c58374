//! Text, and the strings that end it.

use std::sync::Arc;

use candle_paged_attn::engine::{EngineConfig, FinishReason, HookContext, LogitsHook, Request};
use tokenizers::Tokenizer;
use tokenizers::decoders::{
    DecoderWrapper, byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders,
};
use tokenizers::models::wordlevel::WordLevel;

use crate::hash_lm::{engine, model, request, run};

const PIECES: [&str; 6] = ["a", "bE", "N", "Dc", "ü", "."];

fn tokenizer() -> Arc<Tokenizer> {
    of_pieces(PIECES, Fuse::default())
}

/// Token `i` is piece `i`.
fn of_pieces(pieces: [&str; 6], decoder: impl Into<DecoderWrapper>) -> Arc<Tokenizer> {
    let vocab = (0..).zip(pieces).map(|(id, piece)| (piece.to_string(), id));
    let words = WordLevel::builder()
        .vocab(vocab.collect())
        .unk_token(".".into())
        .build()
        .unwrap();
    let mut tokenizer = Tokenizer::new(words);
    tokenizer.with_decoder(Some(decoder));
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
    say_with(tokenizer(), tokens, change)
}

fn say_with(
    tokenizer: Arc<Tokenizer>,
    tokens: &[u32],
    change: impl FnOnce(&mut Request),
) -> (Vec<String>, FinishReason) {
    let mut engine = engine(model(6), 16, 4, EngineConfig::default())
        .with_tokenizer(tokenizer)
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

/// Of Llama 2, Mistral and Phi-3: the newline is a byte token, whose text waits for the next
/// token.
fn newline_is_a_byte() -> Arc<Tokenizer> {
    let pieces = ["a", "<0x0A>", "b", "<0xC3>", "<0xBC>", "."];
    let decoders = vec![ByteFallback::new().into(), Fuse::default().into()];
    of_pieces(pieces, Decoders::new(decoders))
}

#[test]
fn a_stop_string_of_byte_tokens_ends_the_answer_at_once() {
    let say = |tokens: &[u32], stop: &str, min_tokens| {
        let (pieces, finish) = say_with(newline_is_a_byte(), tokens, |r| {
            r.stop_strings = vec![stop.into()];
            r.min_tokens = min_tokens;
        });
        (pieces.len(), pieces.concat(), finish)
    };
    let stopped = |stop: &str| FinishReason::StopString(stop.into());
    // Two tokens are sampled, not three.
    assert_eq!(say(&[0, 1, 2], "\n", 0), (2, "a".into(), stopped("\n")));
    // Nor is it the number of tokens that ends it.
    assert_eq!(say(&[0, 1], "\n", 0), (2, "a".into(), stopped("\n")));
    // It may straddle tokens and have more than one byte; half a character is none.
    assert_eq!(
        say(&[2, 0, 1, 2], "a\n", 0),
        (3, "b".into(), stopped("a\n"))
    );
    assert_eq!(say(&[0, 3, 4, 2], "ü", 0), (3, "a".into(), stopped("ü")));
    let broken = "\u{FFFD}";
    assert_eq!(
        say(&[0, 3, 4], broken, 0),
        (3, "aü".into(), FinishReason::Length)
    );
    // Only the end of the answer leaves it in halves.
    assert_eq!(say(&[0, 3], broken, 0), (2, "a".into(), stopped(broken)));
    // One that came too early ends nothing, neither then nor when its text leaves.
    assert_eq!(
        say(&[0, 1, 2, 0], "\n", 3),
        (4, "a\nba".into(), FinishReason::Length)
    );
    assert_eq!(
        say(&[0, 1, 1, 0], "\n", 3),
        (3, "a\n".into(), stopped("\n"))
    );
}
