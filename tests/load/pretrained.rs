//! One call from a path to a model, and what it answers when something is not there.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
};

use candle_core::{DType, quantized::gguf_file::Value};
use candle_paged_attn::{
    Error,
    load::{LoadOptions, LoadProgress, from_pretrained},
    models::CausalLm,
};
use serde_json::json;

use crate::{support, tiny};

fn gguf(folder: &Path, name: &str, metadata: &HashMap<String, Value>) -> std::path::PathBuf {
    tiny::write(
        folder,
        name,
        tiny::gguf_bytes(metadata, &tiny::llama_tensors()),
    )
}

fn load(path: &Path) -> candle_paged_attn::Result<candle_paged_attn::load::Pretrained> {
    from_pretrained(path, &LoadOptions::default())
}

/// A whole folder in the Hugging Face layout.
fn hf_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = gguf(folder.path(), "t.gguf", &with_vocab_size());
    let out = tempfile::tempdir().unwrap();
    support::write_hf_folder(&path, out.path()).unwrap();
    out
}

fn with_vocab_size() -> HashMap<String, Value> {
    let mut metadata = tiny::llama_metadata();
    let tokens = tiny::vocabulary().len() as u32;
    metadata.insert("llama.vocab_size".into(), Value::U32(tokens));
    metadata
}

#[test]
fn a_gguf_file_or_a_folder_that_holds_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = gguf(folder.path(), "t.gguf", &tiny::llama_metadata());
    for place in [path.as_path(), folder.path()] {
        let loaded = load(place).unwrap();
        assert_eq!(loaded.model.vocab_size(), tiny::vocabulary().len());
        assert_eq!(loaded.model.context_length(), tiny::CONTEXT as usize);
        // The file names <|bos|>; <|im_end|> is what its template ends a turn with.
        let ends = [tiny::id("<|bos|>"), tiny::id("<|im_end|>")];
        assert_eq!(loaded.eos_token_ids, ends);
        let ids = loaded.tokenizer.encode("hello", true).unwrap();
        assert_eq!(ids.get_ids(), [tiny::id("hello")]);
        assert!(loaded.chat_template.is_some());
        assert_eq!(loaded.path, path);
    }
    gguf(folder.path(), "u.gguf", &tiny::llama_metadata());
    let error = load(folder.path()).unwrap_err();
    assert!(
        matches!(&error, Error::ModelNotFound { tried, .. } if tried.contains("2 files")),
        "{error}"
    );
}

/// `<|end|>` ends a turn of Phi-3, and in GPT-OSS one message of a turn that `<|return|>` ends.
#[test]
fn the_end_of_a_message_is_not_that_of_an_answer() {
    const MESSAGES: &str = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}";
    let folder = tempfile::tempdir().unwrap();
    let ends = |names: [&str; 2]| {
        let renamed = |token: String| match token.as_str() {
            "<|im_start|>" => names[0].to_string(),
            "<|note|>" => names[1].to_string(),
            _ => token,
        };
        let tokens: Vec<String> = tiny::vocabulary().into_iter().map(renamed).collect();
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let mut metadata = tiny::llama_metadata();
        metadata.extend([
            ("tokenizer.ggml.tokens".into(), tiny::strings(&tokens)),
            (
                "tokenizer.chat_template".into(),
                Value::String(MESSAGES.into()),
            ),
        ]);
        load(&gguf(folder.path(), "t.gguf", &metadata))
            .unwrap()
            .eos_token_ids
    };
    let (bos, end) = (tiny::id("<|bos|>"), tiny::id("<|im_start|>"));
    assert_eq!(ends(["<|end|>", "<|note|>"]), [bos, end]);
    assert_eq!(ends(["<|end|>", "<|return|>"]), [bos]);
}

#[test]
fn a_hugging_face_folder() {
    let folder = hf_folder();
    let loaded = load(folder.path()).unwrap();
    assert_eq!(loaded.model.vocab_size(), tiny::vocabulary().len());
    assert_eq!(loaded.path, folder.path());
    let bos = tiny::id("<|bos|>");
    assert_eq!(loaded.eos_token_ids, [bos, tiny::id("<|im_end|>")]);
    let ids = loaded.tokenizer.encode("hello", true).unwrap();
    assert_eq!(ids.get_ids(), [tiny::id("hello")]);

    // The generation configuration wins over config.json.
    let write = |content: serde_json::Value| {
        tiny::write(folder.path(), "generation_config.json", content.to_string())
    };
    write(json!({ "eos_token_id": [7, 5] }));
    let ends = load(folder.path()).unwrap().eos_token_ids;
    assert_eq!(ends, [5, 7, tiny::id("<|im_end|>")]);
    write(json!({ "temperature": 1 }));
    let ends = load(folder.path()).unwrap().eos_token_ids;
    assert_eq!(ends, [bos, tiny::id("<|im_end|>")]);
    let path = write(json!({ "eos_token_id": "x" }));
    crate::assert_blames(&load(folder.path()).unwrap_err(), &path);
}

#[test]
fn a_config_without_a_needed_field_is_named() {
    let folder = hf_folder();
    let path = folder.path().join("config.json");
    let whole = std::fs::read_to_string(&path).unwrap();
    for field in [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ] {
        let mut config: serde_json::Value = serde_json::from_str(&whole).unwrap();
        config.as_object_mut().unwrap().remove(field).unwrap();
        if field == "model_type" {
            config.as_object_mut().unwrap().remove("architectures");
        }
        std::fs::write(&path, config.to_string()).unwrap();
        let error = load(folder.path()).expect_err(field);
        assert!(
            matches!(&error, Error::Missing { place, what }
                if place.ends_with("config.json") && what.contains(field)),
            "{field}: {error}"
        );
    }
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    crate::assert_blames(&load(folder.path()).unwrap_err(), &path);
}

#[test]
fn an_unknown_architecture_is_named() {
    let folder = hf_folder();
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config["model_type"] = json!("mamba");
    config["architectures"] = json!(["MambaForCausalLM"]);
    std::fs::write(&path, config.to_string()).unwrap();
    let mut metadata = tiny::llama_metadata();
    metadata.insert("general.architecture".into(), Value::String("mamba".into()));
    let gguf = gguf(folder.path(), "t.gguf", &metadata);
    for place in [folder.path(), &gguf] {
        let error = load(place).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "architecture", got, supported }
                if got.contains("mamba") && supported.contains("llama")),
            "{error}"
        );
    }
}

#[test]
fn missing_files_tensors_and_wrong_shapes_are_named() {
    let folder = hf_folder();
    let tokenizer = folder.path().join("tokenizer.json");
    let sound = std::fs::read(&tokenizer).unwrap();
    std::fs::write(&tokenizer, &sound[..sound.len() / 2]).unwrap();
    crate::assert_blames(&load(folder.path()).unwrap_err(), &tokenizer);
    std::fs::remove_file(&tokenizer).unwrap();
    let error = load(folder.path()).unwrap_err();
    assert!(
        matches!(&error, Error::Missing { what, .. } if what == "tokenizer.json"),
        "{error}"
    );

    let mut tensors = tiny::llama_tensors();
    let lost = tensors.pop().unwrap().0;
    let bytes = tiny::gguf_bytes(&tiny::llama_metadata(), &tensors);
    let path = tiny::write(folder.path(), "lost.gguf", bytes);
    let error = load(&path).unwrap_err();
    assert!(
        matches!(&error, Error::Missing { place, what }
            if what.contains(lost) && place.ends_with("lost.gguf")),
        "{error}"
    );
    let mut metadata = tiny::llama_metadata();
    let inner = Value::U32(tiny::INNER as u32 * 2);
    metadata.insert("llama.feed_forward_length".into(), inner);
    let error = load(&gguf(folder.path(), "shape.gguf", &metadata)).unwrap_err();
    assert!(
        matches!(&error, Error::Shape { tensor, .. } if tensor.contains("ffn_")),
        "{error}"
    );
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_embedding_has_rows() {
    let folder = hf_folder();
    let path = folder.path().join("tokenizer.json");
    let rows = tiny::vocabulary().len();
    let write = |words: usize| {
        let vocab: serde_json::Map<_, _> =
            (0..words).map(|n| (format!("word{n}"), json!(n))).collect();
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": [{
                "id": words, "content": "<image>", "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false,
            }],
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "word0" },
        });
        std::fs::write(&path, tokenizer.to_string()).unwrap();
    };
    write(rows + 1);
    let error = load(folder.path()).unwrap_err();
    assert!(
        matches!(&error, Error::InvalidArgument { what, expected, got, .. }
            if what.contains("tokenizer.json")
                && expected.contains(&rows.to_string())
                && got == &(rows + 1).to_string()),
        "{error}"
    );
    // An added token may lie past the embedding, as that for images in Gemma 3.
    write(rows);
    load(folder.path()).unwrap();
}

#[test]
fn an_observer_is_told_of_every_tensor() {
    let folder = hf_folder();
    let gguf = gguf(folder.path(), "t.gguf", &tiny::llama_metadata());
    for place in [folder.path(), &gguf] {
        let told: Arc<Mutex<Vec<(usize, usize)>>> = Arc::default();
        let log = told.clone();
        let options = LoadOptions::default().with_progress(move |progress| {
            let LoadProgress::Weights { tensors, total } = progress else {
                panic!("{progress:?}");
            };
            log.lock().unwrap().push((tensors, total));
        });
        from_pretrained(place, &options).unwrap();
        let total = tiny::llama_shapes().len();
        let expected: Vec<_> = (0..=total).map(|read| (read, total)).collect();
        assert_eq!(*told.lock().unwrap(), expected, "{}", place.display());
    }
}

#[test]
fn a_model_that_is_nowhere_and_a_dtype_that_is_none() {
    let folder = tempfile::tempdir().unwrap();
    for (place, expected) in [
        (folder.path().join("nothing.gguf"), "no such file"),
        (folder.path().to_path_buf(), "neither config.json nor"),
        // No hub id.
        ("models/nothing.gguf".into(), "no such file"),
    ] {
        let error = load(&place).unwrap_err();
        assert!(
            matches!(&error, Error::ModelNotFound { model, tried }
                if model == &place.display().to_string() && tried.contains(expected)),
            "{error}"
        );
    }
    let path = gguf(folder.path(), "t.gguf", &tiny::llama_metadata());
    let options = LoadOptions::default().with_dtype(DType::I64);
    let error = from_pretrained(&path, &options).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    let text = tiny::write(folder.path(), "notes.txt", "not a model");
    crate::assert_blames(&load(&text).unwrap_err(), &text);
}
