//! Checkpoints that are not what their configuration says. Each is refused by an error that
//! names the file, the tensor or field, and what was expected, and before any weight is read:
//! the files are of the size of a real model.

use std::path::Path;
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use candle_paged_attn::load::gguf::{GgufFile, GgufWeights};
use candle_paged_attn::load::safetensors::SafetensorsWeights;
use candle_paged_attn::load::{LoadOptions, from_pretrained};
use candle_paged_attn::models::{spec_from_gguf, spec_from_hf};
use serde_json::json;

use crate::sparse::{Checkpoint, F16, Gguf, HIDDEN, LAYERS, VOCAB, shard_of};

/// Reading 13 GB takes longer.
const QUICK: Duration = Duration::from_secs(1);

/// Loads what cannot be loaded: the error is of the variant `kind` and names all of `named`.
fn assert_refused(what: &str, path: &Path, kind: &str, named: &[&str]) {
    let start = Instant::now();
    let result = from_pretrained(path, &LoadOptions::default());
    let took = start.elapsed();
    let Err(error) = result else {
        panic!("{what}: loaded");
    };
    assert!(took < QUICK, "{what}: {took:?}");
    let (debug, message) = (format!("{error:?}"), error.to_string());
    assert!(debug.starts_with(kind), "{what}: {debug} is no {kind}");
    for name in named {
        assert!(message.contains(name), "{what}: {message} lacks {name}");
    }
}

struct Case {
    what: &'static str,
    damage: fn(&mut Checkpoint),
    kind: &'static str,
    /// `FILE` stands for the file with the tensor [`Case::tensor`], `ALL` for the single file
    /// or the index.
    named: &'static [&'static str],
    tensor: &'static str,
}

const DOWN: &str = "model.layers.31.mlp.down_proj.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

const CASES: &[Case] = &[
    Case {
        what: "a missing tensor",
        damage: |c| drop(c.tensors.remove(DOWN)),
        kind: "Missing",
        named: &["ALL", DOWN],
        tensor: DOWN,
    },
    Case {
        what: "a wrong shape",
        damage: |c| c.add(DOWN, &[4096, 11_007]),
        kind: "Shape",
        named: &["FILE", DOWN, "[4096, 11008]", "[4096, 11007]"],
        tensor: DOWN,
    },
    Case {
        what: "a transposed matrix",
        damage: |c| c.add(DOWN, &[11_008, 4096]),
        kind: "Shape",
        named: &["FILE", DOWN, "[4096, 11008]", "[11008, 4096]"],
        tensor: DOWN,
    },
    Case {
        what: "an unknown quantisation",
        damage: |c| {
            let stored = ("F8_E4M3".to_string(), vec![4096, 11_008]);
            c.tensors.insert(DOWN.into(), stored);
        },
        kind: "Unsupported",
        named: &["FILE", DOWN, "F8_E4M3", "BF16"],
        tensor: DOWN,
    },
    Case {
        what: "a vocabulary larger than the embedding",
        damage: |c| c.config["vocab_size"] = json!(VOCAB + 1),
        kind: "Shape",
        named: &["FILE", EMBEDDING, "[32001, 4096]", "[32000, 4096]"],
        tensor: EMBEDDING,
    },
    Case {
        what: "query heads that the KV heads do not divide",
        damage: |c| c.config["num_key_value_heads"] = json!(5),
        kind: "InvalidArgument",
        named: &["config.json", "multiple of the key/value heads", "32 for 5"],
        tensor: EMBEDDING,
    },
    Case {
        what: "a width that the heads do not divide",
        damage: |c| c.config["num_attention_heads"] = json!(31),
        kind: "InvalidArgument",
        named: &["config.json", "hidden size", "31 attention heads", "4096"],
        tensor: EMBEDDING,
    },
    Case {
        what: "fewer KV heads than stored",
        damage: |c| c.config["num_key_value_heads"] = json!(8),
        kind: "Shape",
        named: &["FILE", "k_proj", "[1024, 4096]", "[4096, 4096]"],
        tensor: "model.layers.0.self_attn.k_proj.weight",
    },
    Case {
        what: "GPT-NeoX called llama",
        damage: |c| c.rename(|name| name.replace("model.", "gpt_neox.")),
        kind: "Missing",
        named: &["ALL", EMBEDDING],
        tensor: EMBEDDING,
    },
    Case {
        what: "Phi-3 called llama",
        damage: |c| {
            c.tensors
                .retain(|name, _| !name.contains("self_attn.k_proj"));
            c.rename(|name| name.replace("q_proj", "qkv_proj"));
        },
        kind: "Missing",
        named: &["ALL", "self_attn.q_proj.weight"],
        tensor: EMBEDDING,
    },
    Case {
        what: "Qwen3 called llama",
        damage: |c| {
            for layer in 0..LAYERS {
                for norm in ["q_norm", "k_norm"] {
                    c.add(
                        &format!("model.layers.{layer}.self_attn.{norm}.weight"),
                        &[128],
                    );
                }
            }
        },
        kind: "Unsupported",
        named: &["ALL", "model.layers.0.self_attn.k_norm.weight", "llama"],
        tensor: EMBEDDING,
    },
    Case {
        what: "llama called Qwen3",
        damage: |c| c.config["model_type"] = json!("qwen3"),
        kind: "Missing",
        named: &["ALL", "model.layers.0.self_attn.q_norm.weight"],
        tensor: EMBEDDING,
    },
    Case {
        what: "llama called Qwen2",
        damage: |c| c.config["model_type"] = json!("qwen2"),
        kind: "Missing",
        named: &["ALL", "model.layers.0.self_attn.q_proj.bias"],
        tensor: EMBEDDING,
    },
    Case {
        what: "biases of which the configuration knows nothing",
        damage: |c| c.add("model.layers.31.self_attn.q_proj.bias", &[HIDDEN]),
        kind: "Unsupported",
        named: &["ALL", "model.layers.31.self_attn.q_proj.bias"],
        tensor: EMBEDDING,
    },
    Case {
        what: "more layers than configured",
        damage: |c| c.config["num_hidden_layers"] = json!(31),
        kind: "Unsupported",
        named: &["ALL", "model.layers.31."],
        tensor: EMBEDDING,
    },
    Case {
        what: "fewer layers than configured",
        damage: |c| c.config["num_hidden_layers"] = json!(33),
        kind: "Missing",
        named: &["ALL", "model.layers.32."],
        tensor: EMBEDDING,
    },
    Case {
        what: "an untied head that is not there",
        damage: |c| drop(c.tensors.remove("lm_head.weight")),
        kind: "Missing",
        named: &["ALL", "lm_head.weight"],
        tensor: EMBEDDING,
    },
    Case {
        what: "an unknown architecture",
        damage: |c| c.config["model_type"] = json!("gpt_neox"),
        kind: "Unsupported",
        named: &["architecture", "gpt_neox", "llama"],
        tensor: EMBEDDING,
    },
    Case {
        what: "a quantised checkpoint",
        damage: |c| c.config["quantization_config"] = json!({"quant_method": "mxfp4"}),
        kind: "Unsupported",
        named: &["config.json", "quantization_config", "mxfp4"],
        tensor: EMBEDDING,
    },
];

#[test]
fn safetensors_that_are_not_what_the_configuration_says() {
    for case in CASES {
        let mut checkpoint = Checkpoint::llama();
        (case.damage)(&mut checkpoint);
        let shard = shard_of(case.tensor);
        for (all, file) in [
            ("model.safetensors", "model.safetensors"),
            ("model.safetensors.index.json", shard.as_str()),
        ] {
            let folder = tempfile::tempdir().unwrap();
            if all == file {
                checkpoint.write_single(folder.path());
            } else {
                checkpoint.write_sharded(folder.path());
            }
            let real = |name: &&'static str| match *name {
                "ALL" => folder.path().join(all).display().to_string(),
                "FILE" => folder.path().join(file).display().to_string(),
                name => name.to_string(),
            };
            let named: Vec<String> = case.named.iter().map(real).collect();
            let named: Vec<&str> = named.iter().map(String::as_str).collect();
            let what = format!("{}, {all}", case.what);
            assert_refused(&what, folder.path(), case.kind, &named);
        }
    }
}

#[test]
fn shards_that_are_not_what_the_index_says() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let index = at("model.safetensors.index.json");
    let index_name = index.display().to_string();
    let last = shard_of(DOWN);
    let sound = Checkpoint::llama();

    sound.write_sharded(folder.path());
    std::fs::remove_file(at(&last)).unwrap();
    let named = [index_name.as_str(), "shard", &last];
    assert_refused("a shard is missing", folder.path(), "Missing", &named);

    let mut other = sound.clone();
    other.tensors.remove(DOWN);
    other.write_sharded(folder.path());
    let text = std::fs::read_to_string(&index).unwrap();
    let mut lying: serde_json::Value = serde_json::from_str(&text).unwrap();
    lying["weight_map"][DOWN] = json!(last);
    std::fs::write(&index, lying.to_string()).unwrap();
    let named = [index_name.as_str(), DOWN, &last];
    assert_refused("a shard lacks a tensor", folder.path(), "Missing", &named);

    sound.write_sharded(folder.path());
    let text = std::fs::read_to_string(&index).unwrap();
    let mut short: serde_json::Value = serde_json::from_str(&text).unwrap();
    short["weight_map"].as_object_mut().unwrap().remove(DOWN);
    std::fs::write(&index, short.to_string()).unwrap();
    let named = [index_name.as_str(), DOWN];
    assert_refused("the index lacks a tensor", folder.path(), "Missing", &named);

    sound.write_sharded(folder.path());
    let shard = std::fs::OpenOptions::new().write(true).open(at(&last));
    shard.unwrap().set_len(1 << 30).unwrap();
    let shard = at(&last).display().to_string();
    let named = [shard.as_str(), "truncated"];
    assert_refused("a shard is cut", folder.path(), "Format", &named);
}

#[test]
fn sound_checkpoints_pass_the_check() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = Checkpoint::llama();
    let spec = spec_from_hf(&checkpoint.config, "config.json").unwrap();
    // Old files keep what follows from the base.
    checkpoint.add("model.layers.0.self_attn.rotary_emb.inv_freq", &[64]);
    checkpoint.write_single(folder.path());
    let open = || SafetensorsWeights::open(folder.path(), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(spec.check_weights(&open()).unwrap(), 9 * LAYERS + 3);
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    checkpoint.write_sharded(folder.path());
    assert_eq!(spec.check_weights(&open()).unwrap(), 9 * LAYERS + 3);
    // transformers ties what the configuration ties, whatever the file holds.
    checkpoint.config["tie_word_embeddings"] = json!(true);
    let spec = spec_from_hf(&checkpoint.config, "config.json").unwrap();
    assert_eq!(spec.check_weights(&open()).unwrap(), 9 * LAYERS + 2);

    let path = folder.path().join("model.gguf");
    Gguf::llama().write(&path);
    let file = GgufFile::open(&path).unwrap();
    let spec = spec_from_gguf(file.metadata(), "model.gguf").unwrap();
    let weights = GgufWeights::new(file, None, &Device::Cpu).unwrap();
    assert_eq!(spec.check_weights(&weights).unwrap(), 9 * LAYERS + 3);
}

#[test]
fn gguf_files_that_are_not_what_their_metadata_says() {
    const DOWN: &str = "blk.31.ffn_down.weight";
    type Damage = fn(&mut Gguf);
    let cases: &[(&str, Damage, &str, &[&str])] = &[
        (
            "a missing tensor",
            |g| drop(g.tensors.remove(DOWN)),
            "Missing",
            &["model.gguf", DOWN],
        ),
        (
            "a wrong shape",
            |g| drop(g.tensors.insert(DOWN.into(), (F16, vec![4096, 11_007]))),
            "Shape",
            &["model.gguf", DOWN, "[4096, 11008]", "[4096, 11007]"],
        ),
        (
            "MXFP4",
            |g| drop(g.tensors.insert(DOWN.into(), (39, vec![4096, 11_008]))),
            "Unsupported",
            &["model.gguf", DOWN, "39 (MXFP4)", "Q4_0"],
        ),
        (
            "IQ4_XS",
            |g| drop(g.tensors.insert(DOWN.into(), (23, vec![4096, 11_008]))),
            "Unsupported",
            &["model.gguf", DOWN, "23 (IQ4_XS)", "Q4_0"],
        ),
        (
            "a type that ggml does not know",
            |g| drop(g.tensors.insert(DOWN.into(), (77, vec![4096, 11_008]))),
            "Unsupported",
            &["model.gguf", DOWN, "77", "Q4_0"],
        ),
        (
            "a vocabulary larger than the embedding",
            |g| g.tokens += 1,
            "Shape",
            &["model.gguf", "token_embd.weight", "[32001, 4096]"],
        ),
        (
            "query heads that the KV heads do not divide",
            |g| {
                let _ = g.counts.insert("attention.head_count_kv", 5);
            },
            "InvalidArgument",
            &["model.gguf", "multiple of the key/value heads", "32 for 5"],
        ),
        (
            "a width that the heads do not divide",
            |g| {
                let _ = g.counts.insert("attention.head_count", 31);
            },
            "InvalidArgument",
            &["model.gguf", "31 attention heads", "4096"],
        ),
        (
            "llama called Qwen3",
            |g| g.arch = "qwen3",
            "Missing",
            &["model.gguf", "blk.0.attn_q_norm.weight"],
        ),
        (
            "Qwen3 called llama",
            |g| {
                let norm = (F16, vec![128]);
                g.tensors.insert("blk.9.attn_q_norm.weight".into(), norm);
            },
            "Unsupported",
            &["model.gguf", "blk.9.attn_q_norm.weight", "llama"],
        ),
        (
            "fewer layers than stored",
            |g| {
                let _ = g.counts.insert("block_count", 31);
            },
            "Unsupported",
            &["model.gguf", "blk.31."],
        ),
        (
            "more layers than stored",
            |g| {
                let _ = g.counts.insert("block_count", 33);
            },
            "Missing",
            &["model.gguf", "blk.32."],
        ),
        (
            "an unknown architecture",
            |g| g.arch = "gptneox",
            "Unsupported",
            &["architecture", "gptneox", "llama"],
        ),
        (
            "an unknown field",
            |g| {
                let _ = g.counts.insert("attention.q_lora_rank", 512);
            },
            "Unsupported",
            &["model.gguf", "llama.attention.q_lora_rank", "512"],
        ),
        (
            "one of several files",
            |g| {
                let _ = g.counts.insert("/split.count", 3);
            },
            "Unsupported",
            &["model.gguf", "split.count", "3 files"],
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (what, damage, kind, named) in cases {
        let mut gguf = Gguf::llama();
        damage(&mut gguf);
        gguf.write(&path);
        assert_refused(what, &path, kind, named);
    }
    Gguf::llama().write(&path);
    let file = std::fs::OpenOptions::new().write(true).open(&path);
    file.unwrap().set_len(8 << 30).unwrap();
    let named = ["model.gguf", "truncated", ".weight"];
    assert_refused("a cut file", &path, "Format", &named);
}
