//! Tokenizers built from GGUF metadata, and text streamed back out of tokens.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "tokenizer/sentencepiece.rs"]
mod sentencepiece;
#[path = "../examples/support/mod.rs"]
mod support;
#[path = "load/tiny.rs"]
#[allow(dead_code)]
mod tiny;

use std::{collections::HashMap, path::Path, sync::Arc};

use candle_core::quantized::gguf_file::Value;
use candle_paged_attn::{
    Error, Result,
    load::{TextStream, gguf::GgufFile, tokenizer},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer};

fn build(metadata: &HashMap<String, Value>) -> Result<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny::write(folder.path(), "t.gguf", tiny::gguf_bytes(metadata, &[]));
    tokenizer::from_gguf(&GgufFile::open(path).unwrap())
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).unwrap().get_ids().to_vec()
}

/// Ids of these vocabulary entries.
fn ids(tokens: &[&str]) -> Vec<u32> {
    tokens.iter().map(|token| tiny::id(token)).collect()
}

#[test]
fn splitting_rules_merges_and_special_tokens() {
    let mut metadata = tiny::tokenizer_metadata("smollm");
    // Makes the rule visible: `1` and `2` may merge, but smollm keeps digits apart.
    let tokens: Vec<String> = tiny::vocabulary()
        .into_iter()
        .chain(["12".into()])
        .collect();
    let last = tokens.len() as u32 - 1;
    let text: Vec<&str> = tokens.iter().map(String::as_str).collect();
    metadata.insert("tokenizer.ggml.tokens".into(), tiny::strings(&text));
    let merges = tiny::strings(&["h e", "l l", "he ll", "hell o", "1 2"]);
    metadata.insert("tokenizer.ggml.merges".into(), merges);
    let Some(Value::Array(kinds)) = metadata.get_mut("tokenizer.ggml.token_type") else {
        panic!("no token types");
    };
    kinds.push(Value::I32(1));
    let smollm = build(&metadata).unwrap();
    metadata.insert("tokenizer.ggml.pre".into(), Value::String("gpt-2".into()));
    let gpt2 = build(&metadata).unwrap();

    assert_eq!(encode(&smollm, "hello"), ids(&["hello"]));
    // No space is put before a text; one that is there is the letter Ġ.
    assert_eq!(encode(&smollm, " hello"), ids(&["Ġ", "hello"]));
    assert_eq!(encode(&smollm, "12"), ids(&["1", "2"]));
    assert_eq!(encode(&gpt2, "12"), [last]);
    // Arabic digits are digits too (two bytes each).
    assert_eq!(encode(&smollm, "١"), ids(&["Ù", "¡"]));
    // Control and user-defined tokens are found in the text; only control tokens are hidden.
    let found = encode(&smollm, "<|im_start|>he<|note|>");
    assert_eq!(found, ids(&["<|im_start|>", "he", "<|note|>"]));
    assert_eq!(smollm.decode(&found, true).unwrap(), "he<|note|>");
    assert_eq!(
        smollm.decode(&found, false).unwrap(),
        "<|im_start|>he<|note|>"
    );
}

/// Contractions, numbers, accents, code, CJK, emoji and capitals, cut by hand as each rule's
/// regular expression reads.
#[test]
fn every_splitting_rule_cuts_where_its_expression_says() {
    const TEXT: &str = "It's 12345 años\n  x=1 日本 🦙 HelloWorld";
    let tail = [" x", "=", "1", " 日本", " 🦙", " HelloWorld"];
    let cases: [(&[&str], Vec<&str>); 4] = [
        (
            &["llama-bpe", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
            [
                &["It", "'s", " ", "123", "45", " años", "\n", " "][..],
                &tail,
            ]
            .concat(),
        ),
        (
            &["qwen2", "deepseek-r1-qwen", "stablelm2"],
            [
                &["It", "'s", " ", "1", "2", "3", "4", "5", " años", "\n", " "][..],
                &tail,
            ]
            .concat(),
        ),
        (
            &["smollm", "starcoder", "refact"],
            [
                &["It", "'s", " ", "1", "2", "3", "4", "5", " años", "\n "][..],
                &tail,
            ]
            .concat(),
        ),
        (
            &["gpt-2", "phi-2", "olmo"],
            [&["It", "'s", " 12345", " años", "\n "][..], &tail].concat(),
        ),
    ];
    let gpt4o = [
        &["It's", " ", "123", "45", " años", "\n", " "][..],
        &tail[..5],
        &[" Hello", "World"],
    ]
    .concat();
    let tekken = [
        &["It", "'s", " ", "1", "2", "3", "4", "5", " años", "\n", " "][..],
        &tail[..5],
        &[" Hello", "World"],
    ]
    .concat();
    let others = [(&["gpt-4o"][..], gpt4o), (&["tekken"], tekken)];
    let cases = cases.into_iter().chain(others);
    for (names, want) in cases {
        for pre in names {
            let tokenizer = build(&tiny::tokenizer_metadata(pre)).unwrap();
            assert_eq!(cut(&tokenizer, TEXT), want, "{pre}");
        }
    }
}

/// The words of a text by the tokenizer's splitting rule.
fn cut<'a>(tokenizer: &Tokenizer, text: &'a str) -> Vec<&'a str> {
    let mut split = PreTokenizedString::from(text);
    let splitter = tokenizer.get_pre_tokenizer().unwrap();
    splitter.pre_tokenize(&mut split).unwrap();
    split
        .get_splits(OffsetReferential::Original, OffsetType::Byte)
        .into_iter()
        .map(|(_, (start, end), _)| &text[start..end])
        .collect()
}

/// Capitals with accents begin a word, marks belong to the letter before them, and a slash ends
/// what it follows: where GPT-4o's rule and Tekken's differ from all others.
#[test]
fn capitals_marks_and_slashes_by_the_rules_of_gpt4o_and_tekken() {
    for pre in ["gpt-4o", "tekken"] {
        let tokenizer = build(&tiny::tokenizer_metadata(pre)).unwrap();
        let words = cut(&tokenizer, "caféÉtat nin\u{303}o ABCd ://\n//x");
        let want = ["café", "État", " nin\u{303}o", " ABCd", " ://\n//", "x"];
        assert_eq!(words, want, "{pre}");
    }
}

/// Llama 3 and Tekken: a word that is a token is taken whole, and BOS is added unless the file
/// says no. GLM-4: only the former.
#[test]
fn whole_words_and_bos_by_rule() {
    let encoded = |metadata: &_| {
        let tokenizer = build(metadata).unwrap();
        let encoding = tokenizer.encode("hello", true).unwrap();
        encoding.get_ids().to_vec()
    };
    for (pre, words, bos) in [
        ("llama-bpe", true, true),
        ("tekken", true, true),
        ("glm4", true, false),
        ("chatglm-bpe", false, false),
        ("gpt-4o", false, false),
    ] {
        let mut metadata = tiny::tokenizer_metadata(pre);
        metadata.insert("tokenizer.ggml.merges".into(), tiny::strings(&["h e"]));
        let word: &[&str] = match words {
            true => &["hello"],
            false => &["he", "l", "l", "o"],
        };
        let want = [if bos { &["<|bos|>"][..] } else { &[] }, word].concat();
        assert_eq!(encoded(&metadata), ids(&want), "{pre}");
        metadata.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(false));
        assert_eq!(encoded(&metadata), ids(word), "{pre}");
    }
}

#[test]
fn bos_and_eos_are_added_only_where_the_file_says_so() {
    let mut metadata = tiny::tokenizer_metadata("smollm");
    let eos = tiny::id("<|im_end|>");
    metadata.insert("tokenizer.ggml.eos_token_id".into(), Value::U32(eos));
    let add = |name: &str| {
        (
            format!("tokenizer.ggml.add_{name}_token"),
            Value::Bool(true),
        )
    };
    let encoded = |metadata: &_, special| {
        let tokenizer = build(metadata).unwrap();
        tokenizer
            .encode("hello", special)
            .unwrap()
            .get_ids()
            .to_vec()
    };
    assert_eq!(encoded(&metadata, true), ids(&["hello"]));
    metadata.extend([add("bos")]);
    assert_eq!(encoded(&metadata, true), ids(&["<|bos|>", "hello"]));
    assert_eq!(encoded(&metadata, false), ids(&["hello"]));
    metadata.extend([add("eos")]);
    assert_eq!(
        encoded(&metadata, true),
        ids(&["<|bos|>", "hello", "<|im_end|>"])
    );
    metadata.insert("tokenizer.ggml.bos_token_id".into(), Value::U32(99_999));
    assert!(matches!(build(&metadata), Err(Error::Format { .. })));
}

#[test]
fn unknown_kinds_and_broken_descriptions_are_named() {
    let with = |key: &str, value: Value| {
        let mut metadata = tiny::tokenizer_metadata("smollm");
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
        build(&metadata).unwrap_err()
    };
    for pre in ["default", "falcon", "smollm2", ""] {
        let error = with("pre", Value::String(pre.into()));
        assert!(
            matches!(&error, Error::Unsupported { what: "pre-tokenizer", got, supported }
                if got.starts_with(&format!("`{pre}`")) && supported.contains("`smollm`")),
            "{error}"
        );
    }
    for model in ["bert", "t5", "rwkv", "plamo2", "none", "gemma4", ""] {
        let error = with("model", Value::String(model.into()));
        assert!(
            matches!(&error, Error::Unsupported { what: "tokenizer model", got, supported }
                if got.starts_with(&format!("`{model}`")) && supported.contains("`llama`")),
            "{error}"
        );
    }
    for key in ["model", "pre", "tokens", "merges"] {
        let mut metadata = tiny::tokenizer_metadata("smollm");
        metadata.remove(&format!("tokenizer.ggml.{key}")).unwrap();
        let error = build(&metadata).unwrap_err();
        assert!(
            matches!(&error, Error::Missing { what, .. } if what.contains(key)),
            "{key}: {error}"
        );
    }
    for (key, value, expected) in [
        ("tokens", tiny::strings(&["a", "a"]), "twice"),
        ("tokens", Value::U32(1), "tokens"),
        ("merges", tiny::strings(&["he"]), "`he`"),
        ("merges", tiny::strings(&["h nowhere"]), "merges"),
        // Longer than every token.
        (
            "merges",
            tiny::strings(&["<|im_start|> <|im_start|>"]),
            "merges",
        ),
        ("token_type", Value::Array(vec![Value::I32(3)]), "1 entries"),
        ("bos_token_id", Value::U32(264), "bos_token_id: 264"),
        ("eos_token_id", Value::U32(264), "eos_token_id: 264"),
    ] {
        let error = with(key, value);
        assert!(
            matches!(&error, Error::Format { what, .. } if what.contains(expected)),
            "{key}: {error}"
        );
    }
}

/// The stream's pieces, the last of them from `finish`.
fn stream(tokenizer: &Arc<Tokenizer>, tokens: &[u32], skip: bool) -> Vec<String> {
    let mut stream = TextStream::new(tokenizer.clone(), skip);
    let mut pieces: Vec<String> = tokens
        .iter()
        .filter_map(|&token| stream.push(token).unwrap())
        .collect();
    pieces.push(stream.finish().unwrap());
    assert_eq!(stream.finish().unwrap(), "");
    pieces
}

const LETTERS: &[&str] = &[
    "h",
    "hello",
    " ",
    "  ",
    "\n",
    "é",
    "€",
    "日",
    "本",
    "語",
    "한",
    "😀",
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "\u{FFFD}",
    "<|im_start|>",
    "<|note|>",
    "1",
    "'s",
    "\u{0301}",
    "\0",
];

#[test]
fn pieces_of_any_text_are_whole_characters_and_add_up() {
    let tokenizer = Arc::new(build(&tiny::tokenizer_metadata("smollm")).unwrap());
    let mut rng = StdRng::seed_from_u64(11);
    for _ in 0..500 {
        let text: String = (0..rng.random_range(0..20))
            .map(|_| LETTERS[rng.random_range(0..LETTERS.len())])
            .collect();
        let tokens = encode(&tokenizer, &text);
        let pieces = stream(&tokenizer, &tokens, false);
        assert_eq!(pieces.concat(), text);
        if !text.contains(char::REPLACEMENT_CHARACTER) {
            assert!(!pieces.concat().contains(char::REPLACEMENT_CHARACTER));
            assert_eq!(pieces.last().unwrap(), "", "{text:?} was held back");
        }
        let shown = tokenizer.decode(&tokens, true).unwrap();
        assert_eq!(stream(&tokenizer, &tokens, true).concat(), shown);
    }
    // Three bytes, one character, one piece, at the last of them.
    let euro = encode(&tokenizer, "€");
    assert_eq!(euro.len(), 3);
    let mut pieces = TextStream::new(tokenizer, true);
    assert_eq!(pieces.push(euro[0]).unwrap(), None);
    assert_eq!(pieces.push(euro[1]).unwrap(), None);
    assert_eq!(pieces.push(euro[2]).unwrap(), Some("€".into()));
}

#[test]
fn pieces_of_random_tokens_add_up_to_the_whole_decode() {
    let tokenizer = Arc::new(build(&tiny::tokenizer_metadata("smollm")).unwrap());
    // Past the end too: a model's vocabulary may be padded.
    let vocabulary = tiny::vocabulary().len() as u32 + 8;
    let mut rng = StdRng::seed_from_u64(12);
    for _ in 0..500 {
        let tokens: Vec<u32> = (0..rng.random_range(0..40))
            .map(|_| rng.random_range(0..vocabulary))
            .collect();
        for skip in [false, true] {
            let whole = tokenizer.decode(&tokens, skip).unwrap();
            assert_eq!(stream(&tokenizer, &tokens, skip).concat(), whole);
        }
    }
}

/// The SentencePiece kind: `▁` is a space, the first of which is no text; bytes fall back to
/// tokens of their own, which are text once their run has ended.
#[test]
fn spaces_are_those_of_the_whole_decode() {
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "added_tokens": [{ "id": 0, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true }],
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ]},
        "model": { "type": "BPE", "vocab": { "<s>": 0, "▁Hello": 1, "▁world": 2, "<0xE2>": 3,
            "<0x82>": 4, "<0xAC>": 5, "▁": 6, "!": 7 }, "merges": [] },
    });
    let folder = tempfile::tempdir().unwrap();
    let path = tiny::write(folder.path(), "tokenizer.json", tokenizer.to_string());
    let tokenizer = Arc::new(tokenizer::from_file(path).unwrap());
    assert_eq!(
        stream(&tokenizer, &[0, 1, 2, 0, 6, 3, 4, 5, 7], true),
        ["Hello", " world", " ", "€!", ""]
    );
    assert_eq!(
        stream(&tokenizer, &[1, 3, 4], true),
        ["Hello", "\u{FFFD}\u{FFFD}"]
    );
    // What they are so far; half a character is nothing, and a piece that has left is no more.
    let mut pieces = TextStream::new(tokenizer, true);
    let waiting = [1, 3, 4, 5, 3, 7].map(|token| {
        pieces.push(token).unwrap();
        pieces.waiting().unwrap()
    });
    assert_eq!(waiting, ["", "", "", "€", "", ""]);
}

/// A `tokenizer.json` with the letters `a` and `b` as its tokens.
fn letters() -> serde_json::Value {
    serde_json::json!({
        "version": "1.0",
        "added_tokens": [],
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1 }, "merges": [] },
    })
}

fn read(tokenizer: &serde_json::Value) -> Result<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny::write(folder.path(), "tokenizer.json", tokenizer.to_string());
    tokenizer::from_file(path)
}

#[test]
fn prompts_are_neither_truncated_nor_padded() {
    let mut file = letters();
    file["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    });
    file["padding"] = serde_json::json!({
        "strategy": { "Fixed": 10 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
    });
    let tokenizer = read(&file).unwrap();
    assert_eq!(encode(&tokenizer, "bbbbbbbb"), [1; 8]);
    assert_eq!(encode(&tokenizer, "bb"), [1; 2]);
}

/// Files on which the `tokenizers` crate panics.
#[test]
fn contradictions_that_nobody_checks_are_errors() {
    let with = |pointer: &str, key: &str, value: serde_json::Value| {
        let mut file = letters();
        file.pointer_mut(pointer).unwrap()[key] = value;
        file
    };
    let mut prefix = with("/model", "merges", serde_json::json!(["a b"]));
    prefix["model"]["continuing_subword_prefix"] = serde_json::json!("##");
    let rules = serde_json::json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" });
    for file in [
        with("/model", "merges", serde_json::json!(["a b"])),
        prefix,
        with("", "normalizer", rules),
    ] {
        let error = read(&file).unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{error}");
    }
    let nothing = serde_json::json!({ "type": "BPEDecoder", "suffix": "" });
    let tokenizer = Arc::new(read(&with("", "decoder", nothing)).unwrap());
    let mut stream = TextStream::new(tokenizer, false);
    let error = stream.push(0).unwrap_err();
    assert!(matches!(error, Error::Tokenizer(_)), "{error}");
}

#[derive(serde::Deserialize)]
struct TokenizerGolden {
    text: String,
    ids: Vec<u32>,
}

#[derive(serde::Deserialize)]
struct ModelGolden {
    name: String,
    text: Option<String>,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

fn golden<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn smollm_gives_exactly_the_ids_of_llama_cpp() {
    let Some(path) = support::model_or_skip("smollm_gives_exactly_the_ids_of_llama_cpp") else {
        return;
    };
    let tokenizer = Arc::new(tokenizer::from_gguf(&GgufFile::open(path).unwrap()).unwrap());
    let texts = golden::<Vec<TokenizerGolden>>("tokenizer_smollm2.json");
    assert!(texts.len() >= 14);
    for TokenizerGolden { text, ids } in texts {
        assert_eq!(encode(&tokenizer, &text), ids, "{text:?}");
        // The file asks for no BOS.
        assert_eq!(
            tokenizer.encode(text.as_str(), true).unwrap().get_ids(),
            ids
        );
        assert_eq!(stream(&tokenizer, &ids, false).concat(), text);
    }
    let mut with_text = 0;
    for prompt in golden::<Vec<ModelGolden>>("smollm2_135m_instruct_f32.json") {
        if let Some(text) = &prompt.text {
            with_text += 1;
            assert_eq!(
                encode(&tokenizer, text),
                prompt.prompt_ids,
                "{}",
                prompt.name
            );
        }
        let answer = &prompt.greedy_ids;
        for skip in [false, true] {
            let whole = tokenizer.decode(answer, skip).unwrap();
            assert_eq!(
                stream(&tokenizer, answer, skip).concat(),
                whole,
                "{}",
                prompt.name
            );
        }
    }
    assert!(with_text > 0);
}
