//! SentencePiece vocabularies from GGUF metadata. The ids are those of Google's sentencepiece
//! (`scripts/tokenizer_goldens.py`), of llama.cpp (Gemma's), or worked out by hand.

use std::{collections::HashMap, sync::Arc};

use candle_core::quantized::gguf_file::Value;
use candle_paged_attn::{
    Error,
    load::{gguf::GgufFile, tokenizer},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Deserialize;
use tokenizers::Tokenizer;

use crate::{TokenizerGolden, build, encode, golden, stream, tiny};

/// A vocabulary as a GGUF file holds it, and texts with their ids.
#[derive(Deserialize)]
struct Golden {
    add_space_prefix: bool,
    bos: u32,
    eos: u32,
    tokens: Vec<String>,
    scores: Vec<f32>,
    types: Vec<i32>,
    texts: Vec<TokenizerGolden>,
}

impl Golden {
    fn read(name: &str) -> Self {
        golden(&format!("tokenizers/{name}.json"))
    }

    fn metadata(&self) -> HashMap<String, Value> {
        let tokens: Vec<&str> = self.tokens.iter().map(String::as_str).collect();
        let types = self.types.iter().map(|&t| Value::I32(t)).collect();
        let scores = self.scores.iter().map(|&s| Value::F32(s)).collect();
        [
            ("model", Value::String("llama".into())),
            ("tokens", tiny::strings(&tokens)),
            ("scores", Value::Array(scores)),
            ("token_type", Value::Array(types)),
            ("bos_token_id", Value::U32(self.bos)),
            ("eos_token_id", Value::U32(self.eos)),
            ("add_space_prefix", Value::Bool(self.add_space_prefix)),
        ]
        .map(|(key, value)| (format!("tokenizer.ggml.{key}"), value))
        .into()
    }

    fn tokenizer(&self) -> Tokenizer {
        build(&self.metadata()).unwrap()
    }

    fn id(&self, token: &str) -> u32 {
        self.tokens.iter().position(|t| t == token).unwrap() as u32
    }
}

#[test]
fn ids_are_those_of_sentencepiece_and_decode_to_the_text() {
    for name in ["spaced", "unspaced"] {
        let golden = Golden::read(name);
        let tokenizer = Arc::new(golden.tokenizer());
        assert!(golden.texts.len() > 100);
        for TokenizerGolden { text, ids } in &golden.texts {
            assert_eq!(&encode(&tokenizer, text), ids, "{name}: {text:?}");
            for skip in [false, true] {
                let whole = tokenizer.decode(ids, skip).unwrap();
                assert_eq!(stream(&tokenizer, ids, skip).concat(), whole, "{text:?}");
            }
            // The space in front of what follows `<s>` is no text, but nobody can know.
            let controls = golden.types.iter().zip(&golden.tokens);
            let mut controls = controls.filter(|(kind, _)| **kind == 3);
            if name == "unspaced" || !controls.any(|(_, token)| text.contains(token)) {
                assert_eq!(&tokenizer.decode(ids, false).unwrap(), text);
            }
        }
    }
}

/// Runs of bytes that are no characters, in the middle and at the end, among them.
#[test]
fn pieces_of_random_tokens_add_up_to_the_whole_decode() {
    for name in ["spaced", "unspaced"] {
        let golden = Golden::read(name);
        let tokenizer = Arc::new(golden.tokenizer());
        let bytes: Vec<u32> = ["<0xE2>", "<0x82>", "<0xAC>", "<0x41>", "<0xF0>"]
            .iter()
            .map(|token| golden.id(token))
            .collect();
        let mut rng = StdRng::seed_from_u64(13);
        for _ in 0..500 {
            let tokens: Vec<u32> = (0..rng.random_range(0..30))
                .map(|_| match rng.random_range(0..3) {
                    0 => bytes[rng.random_range(0..bytes.len())],
                    1 => rng.random_range(0..4),
                    _ => rng.random_range(0..golden.tokens.len() as u32 + 8),
                })
                .collect();
            for skip in [false, true] {
                let whole = tokenizer.decode(&tokens, skip).unwrap();
                assert_eq!(stream(&tokenizer, &tokens, skip).concat(), whole);
            }
        }
    }
}

/// A vocabulary of bytes, `<s>`, these tokens with these scores, and nothing else.
fn small(tokens: &[(&str, f32)]) -> Golden {
    let bytes = (0..=255u8).map(|b| (format!("<0x{b:02X}>"), 0.0, 6));
    let tokens = tokens.iter().map(|&(t, score)| (t.to_string(), score, 1));
    let all: Vec<_> = [("<s>".to_string(), 0.0, 3)]
        .into_iter()
        .chain(bytes)
        .chain(tokens)
        .collect();
    Golden {
        add_space_prefix: false,
        bos: 0,
        eos: 0,
        tokens: all.iter().map(|(token, ..)| token.clone()).collect(),
        scores: all.iter().map(|(_, score, _)| *score).collect(),
        types: all.iter().map(|(.., kind)| *kind).collect(),
        texts: vec![],
    }
}

#[test]
fn the_best_score_is_joined_first_and_the_leftmost_of_equals() {
    let cut = |tokens: &[(&str, f32)], text: &str| {
        let encoding = small(tokens).tokenizer().encode(text, false).unwrap();
        encoding.get_tokens().to_vec()
    };
    let letters = [("a", -9.0), ("b", -9.0), ("c", -9.0)];
    let with = |more: &[(&'static str, f32)]| [&letters[..], more].concat();
    assert_eq!(
        cut(&with(&[("ab", -2.0), ("bc", -1.0)]), "abc"),
        ["a", "bc"]
    );
    assert_eq!(
        cut(&with(&[("ab", -1.0), ("bc", -2.0)]), "abc"),
        ["ab", "c"]
    );
    assert_eq!(cut(&with(&[("aa", -1.0)]), "aaa"), ["aa", "a"]);
    // `abc` can only be reached through `bc`.
    let tokens = with(&[("ab", -1.0), ("bc", -2.0), ("abc", -3.0)]);
    assert_eq!(cut(&tokens, "abc"), ["abc"]);
    let tokens = with(&[("cb", -1.0), ("bc", -2.0), ("abc", -3.0)]);
    assert_eq!(cut(&tokens, "abcb"), ["a", "b", "cb"]);
    // Not in the vocabulary: its bytes.
    assert_eq!(cut(&letters, "aé"), ["a", "<0xC3>", "<0xA9>"]);
}

#[test]
fn bos_is_added_unless_the_file_says_no_and_eos_if_it_says_so() {
    let golden = Golden::read("spaced");
    let mut metadata = golden.metadata();
    let encoded = |metadata: &_, text| {
        let encoding = build(metadata).unwrap().encode(text, true).unwrap();
        encoding.get_ids().to_vec()
    };
    let the = golden.id("▁the");
    assert_eq!(encoded(&metadata, "the"), [golden.bos, the]);
    assert_eq!(encoded(&metadata, ""), [golden.bos]);
    let add_eos = "tokenizer.ggml.add_eos_token";
    metadata.insert(add_eos.into(), Value::Bool(true));
    assert_eq!(encoded(&metadata, "the"), [golden.bos, the, golden.eos]);
    metadata.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(false));
    assert_eq!(encoded(&metadata, "the"), [the, golden.eos]);
    // A space in front is what a file gets that does not mention it.
    metadata.insert(add_eos.into(), Value::Bool(false));
    metadata.remove("tokenizer.ggml.add_space_prefix").unwrap();
    assert_eq!(encoded(&metadata, "the"), [the]);
}

/// `rstrip` of Phi-3's `tokenizer.json`.
#[test]
fn phi3s_special_tokens_swallow_the_white_space_after_them() {
    let golden = Golden::read("spaced");
    let mut metadata = golden.metadata();
    let plain = golden.tokenizer();
    let architecture = Value::String("phi3".into());
    metadata.insert("general.architecture".into(), architecture);
    let phi3 = build(&metadata).unwrap();
    let parts = |parts: [&str; 3]| parts.map(|part| encode(&plain, part)).concat();
    let text = "the</s> \nother";
    assert_eq!(encode(&phi3, text), parts(["the", "</s>", "other"]));
    assert_eq!(encode(&plain, text), parts(["the", "</s>", " \nother"]));
    let text = "the<s> \nother";
    assert_eq!(encode(&phi3, text), parts(["the", "<s>", " \nother"]));
}

#[test]
fn broken_descriptions_are_named() {
    let golden = Golden::read("spaced");
    let with = |key: &str, value: Value| {
        let mut metadata = golden.metadata();
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
        build(&metadata).unwrap_err()
    };
    for key in ["tokens", "scores", "token_type", "bos_token_id"] {
        let mut metadata = golden.metadata();
        metadata.remove(&format!("tokenizer.ggml.{key}")).unwrap();
        let error = build(&metadata).unwrap_err();
        assert!(
            matches!(&error, Error::Missing { what, .. } if what.contains(key)),
            "{key}: {error}"
        );
    }
    let count = golden.tokens.len();
    let mut scores = vec![Value::F32(0.0); count];
    scores[7] = Value::F32(f32::NAN);
    let mut types = vec![Value::I32(1); count];
    types[7] = Value::I32(9);
    let twice = |i: usize| match i {
        7 => "a",
        _ => golden.tokens[i].as_str(),
    };
    let twice: Vec<&str> = (0..count).map(twice).collect();
    let ends = |id| Value::U32(id);
    for (key, value, expected) in [
        ("tokens", tiny::strings(&twice), "tokens appear twice"),
        (
            "tokens",
            tiny::strings(&["<s>"]),
            "token_type: 1015 entries",
        ),
        ("scores", Value::Array(vec![Value::F32(0.0)]), "1 entries"),
        ("scores", Value::F32(0.0), "scores"),
        (
            "scores",
            Value::Array(scores),
            "scores[7]: expected a finite",
        ),
        ("token_type", Value::Array(vec![]), "0 entries"),
        ("token_type", Value::Array(types), "token_type[7]"),
        (
            "bos_token_id",
            ends(1015),
            "bos_token_id: 1015 is not below",
        ),
        (
            "eos_token_id",
            ends(1015),
            "eos_token_id: 1015 is not below",
        ),
        ("add_space_prefix", Value::U32(1), "add_space_prefix"),
    ] {
        let error = with(key, value);
        assert!(
            matches!(&error, Error::Format { what, .. } if what.contains(expected)),
            "{key}: {error}"
        );
    }
    for (key, value) in [
        ("remove_extra_whitespaces", Value::Bool(true)),
        ("precompiled_charsmap", Value::Array(vec![Value::U8(0)])),
    ] {
        let error = with(key, value);
        assert!(
            matches!(&error, Error::Unsupported { got, .. } if got.contains(key)),
            "{key}: {error}"
        );
    }
    assert!(build(&golden.metadata()).is_ok());
}

#[test]
fn vocabularies_that_merges_cannot_express_are_refused() {
    let mut lacking = small(&[("a", -1.0)]);
    let letter = lacking.id("<0x41>") as usize;
    lacking.tokens[letter] = "A".into();
    let error = build(&lacking.metadata()).unwrap_err();
    assert!(
        error.to_string().contains("no byte token `<0x41>`"),
        "{error}"
    );
    // SentencePiece would join `x` with the `a` after it, though `x` is no token.
    let error = build(&small(&[("a", -1.0), ("xa", -2.0)]).metadata()).unwrap_err();
    assert!(
        error.to_string().contains("`xa` is made of `x` and `a`"),
        "{error}"
    );
    // But not `xya`, whose parts it never gets to.
    assert!(build(&small(&[("a", -1.0), ("xya", -2.0)]).metadata()).is_ok());
}

fn refused(golden: &Golden) -> String {
    let error = build(&golden.metadata()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    error.to_string()
}

#[test]
fn ties_that_merges_cannot_express_are_refused() {
    let letters = [("a", -9.0), ("b", -9.0), ("c", -9.0), ("d", -9.0)];
    let with = |more: &[(&'static str, f32)]| small(&[&letters[..], more].concat());
    // SentencePiece joins the leftmost, whatever the order of the file is.
    let error = refused(&with(&[("bc", -1.0), ("ab", -1.0)]));
    for part in ["tokenizer.ggml.scores", "`ab`", "`bc`"] {
        assert!(error.contains(part), "{error}");
    }
    // Zeros are equal, whatever their sign.
    refused(&with(&[("bc", 0.0), ("ab", -0.0)]));
    // They do not overlap, but `abc` is there as soon as `ab` is.
    refused(&with(&[("cd", -1.0), ("ab", -1.0), ("abc", -0.5)]));
    // Runs of one character, and tokens that never meet.
    let runs = [("aa", -5.0), ("aaa", -5.0), ("aaaa", -5.0), ("ab", -1.0)];
    assert!(build(&with(&runs).metadata()).is_ok());
    assert!(build(&with(&[("ab", -1.0), ("cd", -1.0)]).metadata()).is_ok());
}

/// SentencePiece's way, step by step: joins the best neighbours, the leftmost of equals.
fn join(tokens: &[(&str, f32)], text: &str) -> Vec<String> {
    let mut parts: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for at in 1..parts.len() {
            let pair = [parts[at - 1].as_str(), &parts[at]].concat();
            let score = tokens.iter().find(|(t, _)| *t == pair).map(|(_, s)| *s);
            if let Some(score) = score
                && best.is_none_or(|(highest, _)| score > highest)
            {
                best = Some((score, at));
            }
        }
        let Some((_, at)) = best else { return parts };
        let right = parts.remove(at);
        parts[at - 1].push_str(&right);
    }
}

#[test]
fn vocabularies_with_ties_are_joined_as_sentencepiece_joins_or_refused() {
    const MORE: [&str; 14] = [
        "ab", "bc", "cd", "da", "ac", "bd", "aa", "aaa", "aaaa", "abc", "bcd", "cda", "aab", "dda",
    ];
    let mut rng = StdRng::seed_from_u64(14);
    let (mut taken, mut tied) = (0, 0);
    for _ in 0..800 {
        let mut tokens = vec![("a", -9.0), ("b", -9.0), ("c", -9.0), ("d", -9.0)];
        for token in MORE {
            if rng.random_bool(0.35) {
                tokens.push((token, -(rng.random_range(0..12) as f32)));
            }
        }
        let Ok(tokenizer) = build(&small(&tokens).metadata()) else {
            continue;
        };
        taken += 1;
        let mut scores: Vec<f32> = tokens[4..].iter().map(|(_, score)| *score).collect();
        scores.sort_by(f32::total_cmp);
        tied += usize::from(scores.windows(2).any(|pair| pair[0] == pair[1]));
        for _ in 0..50 {
            let text: String = (0..rng.random_range(1..12))
                .map(|_| ['a', 'b', 'c', 'd'][rng.random_range(0..4)])
                .collect();
            let encoding = tokenizer.encode(text.as_str(), false).unwrap();
            let want = join(&tokens, &text);
            assert_eq!(encoding.get_tokens(), want, "{tokens:?}: {text}");
        }
    }
    assert!(taken > 200 && tied > 50, "{taken}, {tied} with ties");
}

/// SentencePiece looks for none of these when it joins.
#[test]
fn bytes_and_special_tokens_are_not_made_of_letters() {
    let mut golden = small(&[
        ("<", -9.0),
        ("0x41>", -9.0),
        ("s>", -9.0),
        ("x", -9.0),
        ("<0x41>x", -1.0),
        ("ab", -1.0),
        ("a", -9.0),
        ("b", -9.0),
    ]);
    for letter in ["0", "4", "1", ">", "0x", "41>", "41", "s"] {
        golden.tokens.push(letter.into());
        golden.scores.push(-2.0 - golden.tokens.len() as f32);
        golden.types.push(1);
    }
    let cut = |golden: &Golden, text: &str| {
        let encoding = golden.tokenizer().encode(text, false).unwrap();
        encoding.get_tokens().to_vec()
    };
    assert_eq!(cut(&golden, "<0x41>"), ["<", "0x41>"]);
    // `A` is no token, and its byte is joined to nothing.
    assert_eq!(cut(&golden, "Ax"), ["<0x41>", "x"]);
    assert_eq!(cut(&golden, "ab"), ["ab"]);
    // An unused token would be taken apart again.
    let ab = golden.id("ab") as usize;
    golden.types[ab] = 5;
    let error = refused(&golden);
    assert!(error.contains("unused token: `ab`"), "{error}");
    // Unknown and control tokens are found before, or never.
    for kind in [2, 3] {
        golden.types[ab] = kind;
        assert_eq!(cut(&golden, "ab"), ["ab"]);
    }
}

/// 1024 bytes are taken.
#[test]
fn tokens_that_would_take_too_long_are_refused() {
    let letter = ("é", -1.0);
    let long = "é".repeat(512);
    assert!(build(&small(&[letter, (&long, -2.0)]).metadata()).is_ok());
    let longer = format!("{long}a");
    let error = refused(&small(&[letter, (&longer, -2.0)]));
    assert!(error.contains("1025 bytes"), "{error}");
}

#[test]
#[ignore = "needs Gemma's vocabulary: tests/data/README-goldens.md"]
fn gemma_gives_exactly_the_ids_of_llama_cpp() {
    let path = std::env::var_os("GEMMA3_GGUF").expect("GEMMA3_GGUF names the file");
    let file = GgufFile::open(path).unwrap();
    let tokenizer = Arc::new(tokenizer::from_gguf(&file).unwrap());
    let texts: Vec<TokenizerGolden> = golden("tokenizers/gemma3.json");
    assert!(texts.len() >= 14);
    for TokenizerGolden { text, ids } in texts {
        assert_eq!(encode(&tokenizer, &text), ids, "{text:?}");
        assert_eq!(stream(&tokenizer, &ids, false).concat(), text);
    }
    let turn = encode(&tokenizer, "<start_of_turn>user\nHi<end_of_turn>\n");
    let tokens: Vec<String> = turn
        .iter()
        .map(|&id| tokenizer.id_to_token(id).unwrap())
        .collect();
    assert_eq!(
        tokens,
        ["<start_of_turn>", "user", "\n", "Hi", "<end_of_turn>", "\n"]
    );
    assert_eq!(tokenizer.decode(&turn, true).unwrap(), "user\nHi\n");
}
