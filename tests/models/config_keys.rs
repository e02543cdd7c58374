//! No key of a configuration that would change the result is ignored: for each family and each
//! key that any family knows, two values give two specs, or one of them is refused.

use std::collections::{BTreeMap, HashMap};

use candle_core::quantized::gguf_file::Value as Gguf;
use candle_paged_attn::models::{ModelSpec, spec_from_gguf, spec_from_hf};
use candle_paged_attn::{Error, Result};
use serde_json::{Value, json};

use crate::families_gguf;
use crate::golden::{Golden, NAMES};

const PLACE: &str = "some/config.json";

/// Keys that do not enter the forward pass of any class of transformers.
const NOTES: &[&str] = &[
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "embedding_dropout",
    "eos_token_id",
    "initial_context_length",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "residual_dropout",
    "hidden_dropout",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "transformers_version",
    "use_cache",
];

/// What two values of a key come to.
fn same(a: &Result<ModelSpec>, b: &Result<ModelSpec>) -> bool {
    matches!((a, b), (Ok(a), Ok(b)) if a == b)
}

/// Another value of the same kind.
fn other(value: &Value) -> Value {
    match value {
        Value::Null => json!("alien"),
        Value::Bool(flag) => json!(!flag),
        Value::Number(n) if n.is_u64() => json!(n.as_u64().unwrap() + 1),
        Value::Number(n) => json!(n.as_f64().unwrap() * 1.5 + 0.25),
        Value::String(_) => json!("alien"),
        Value::Array(items) => match items.first() {
            Some(Value::Number(n)) => {
                let mut items = items.clone();
                items[0] = json!(n.as_f64().unwrap() + 0.5);
                Value::Array(items)
            }
            _ => json!(["alien"]),
        },
        Value::Object(fields) => {
            let mut fields = fields.clone();
            fields.insert("alien".into(), json!(1));
            Value::Object(fields)
        }
    }
}

/// Whether the class in transformers does not read a key either, given the rest of the case.
fn idle(config: &Value, key: &str) -> bool {
    let family = config["model_type"].as_str().unwrap();
    let rope = &config["rope_parameters"];
    match key {
        // They read `hidden_activation`.
        "hidden_act" => matches!(family, "gemma2" | "gemma3_text"),
        // Of the scalings that start from it alone.
        "original_max_position_embeddings" => ["default", "linear", "dynamic", "proportional"]
            .iter()
            .any(|kind| rope["rope_type"] == *kind || rope["full_attention"]["rope_type"] == *kind),
        // The one of `rope_parameters` has precedence.
        "partial_rotary_factor" => !rope["partial_rotary_factor"].is_null(),
        // There are `layer_types`, or the class of the mixture never reads it.
        "max_window_layers" => {
            !config["layer_types"].is_null() || config["sliding_window"].is_null()
        }
        // No window that could be used, or all layers are listed as full.
        "use_sliding_window" => {
            let listed = config["layer_types"].as_array();
            config["sliding_window"].is_null()
                || listed.is_some_and(|types| types.iter().all(|kind| kind == "full_attention"))
        }
        "sliding_window" => config["use_sliding_window"] == false,
        // No layer without experts.
        "intermediate_size" => config["mlp_only_layers"] == json!([]),
        // The layers are listed.
        "no_rope_layer_interval" => !config["no_rope_layers"].is_null(),
        _ => false,
    }
}

/// The same of a field in GGUF.
fn idle_in_gguf(arch: &str, field: &str) -> bool {
    match field {
        // Of YaRN alone.
        "rope.scaling.original_context_length" => true,
        // No layer without experts.
        "feed_forward_length" => matches!(arch, "qwen2moe" | "qwen3moe" | "gpt-oss"),
        _ => false,
    }
}

#[test]
fn every_key_of_every_family_counts_or_is_refused() {
    let configs: Vec<(&str, Value)> = NAMES
        .iter()
        .map(|name| (*name, Golden::read(name).config))
        .collect();
    let mut values: BTreeMap<&String, &Value> = BTreeMap::new();
    for (_, config) in &configs {
        for (key, value) in config.as_object().unwrap() {
            if !NOTES.contains(&key.as_str()) && !key.starts_with('_') {
                let known = values.entry(key).or_insert(value);
                if known.is_null() {
                    *known = value;
                }
            }
        }
    }
    let mut ignored = Vec::new();
    for (name, config) in &configs {
        for (key, value) in &values {
            let value = config.get(key.as_str()).unwrap_or(value);
            let with = |value: Value| {
                let mut config = config.clone();
                config[key.as_str()] = value;
                spec_from_hf(&config, PLACE)
            };
            if same(&with(value.clone()), &with(other(value))) && !idle(config, key) {
                ignored.push(format!("{name}: {key} = {value} or {}", other(value)));
            }
        }
    }
    assert!(ignored.is_empty(), "{ignored:#?}");
}

#[test]
fn every_field_of_every_gguf_architecture_counts_or_is_refused() {
    let files: Vec<(&str, HashMap<String, Gguf>)> = families_gguf::CASES
        .iter()
        .map(|(name, arch)| {
            let fields = families_gguf::metadata(&Golden::read(name), arch);
            (*arch, fields.into_iter().collect())
        })
        .collect();
    let mut values: BTreeMap<&str, &Gguf> = BTreeMap::new();
    for (arch, fields) in &files {
        for (key, value) in fields {
            if let Some(field) = key.strip_prefix(&format!("{arch}.")) {
                values.insert(field, value);
            }
        }
    }
    let mut ignored = Vec::new();
    for (arch, fields) in &files {
        for (field, value) in &values {
            let key = format!("{arch}.{field}");
            let value = fields.get(&key).unwrap_or(value);
            let another = match value {
                Gguf::U32(n) => Gguf::U32(n + 1),
                Gguf::F32(x) => Gguf::F32(x * 1.5 + 0.25),
                Gguf::Bool(flag) => Gguf::Bool(!flag),
                _ => Gguf::String("alien".into()),
            };
            let with = |value: &Gguf| {
                let mut fields = fields.clone();
                fields.insert(key.clone(), value.clone());
                spec_from_gguf(&fields, "tiny.gguf")
            };
            if same(&with(value), &with(&another)) && !idle_in_gguf(arch, field) {
                ignored.push(format!("{key} = {value:?} or {another:?}"));
            }
        }
    }
    assert!(ignored.is_empty(), "{ignored:#?}");
}

/// Values that some checkpoint has and this crate does not run, by the name of the key.
#[test]
fn values_that_cannot_be_run_are_named() {
    for (name, key, value) in [
        ("llama", "hidden_act", json!("relu2")),
        ("llama", "hidden_act", json!("gelu")),
        ("llama", "attention_bias", json!("yes")),
        ("llama", "mlp_bias", json!(1)),
        ("llama", "head_dim", json!(12)),
        ("llama", "tie_word_embeddings", json!("yes")),
        ("llama", "sliding_window", json!(16)),
        ("llama", "partial_rotary_factor", json!(0.5)),
        ("llama", "attn_logit_softcapping", json!(50.0)),
        (
            "llama",
            "quantization_config",
            json!({"quant_method": "awq"}),
        ),
        ("llama", "pruned_heads", json!({"0": [1]})),
        ("llama", "layer_types", json!(["sliding_attention"])),
        ("mistral_window", "attention_bias", json!(true)),
        ("mistral_window", "layer_types", json!(["full_attention"])),
        ("mixtral", "hidden_act", json!("relu2")),
        ("qwen2", "use_sliding_window", json!("yes")),
        ("qwen2", "use_mrope", json!(true)),
        ("qwen2", "layer_types", json!(["chunked_attention"])),
        ("qwen2", "layer_types", json!(["full_attention"])),
        ("gemma2", "hidden_activation", json!("relu2")),
        ("gemma3", "use_bidirectional_attention", json!(true)),
        ("gemma3", "attn_logit_softcapping", json!("no")),
        ("phi3", "sliding_window", json!("wide")),
        ("stablelm", "qk_layernorm", json!("yes")),
        ("starcoder2", "norm_type", json!("rms_norm")),
        ("starcoder2", "mlp_type", json!("gated")),
        ("smollm3", "no_rope_layers", json!([1, 2, 1])),
        ("smollm3", "layer_types", json!(["sliding_attention"])),
        (
            "gpt_oss",
            "quantization_config",
            json!({"quant_method": "mxfp4"}),
        ),
        ("olmo", "clip_qkv", json!("tight")),
    ] {
        let mut config = Golden::read(name).config;
        config[key] = value.clone();
        let error = match spec_from_hf(&config, PLACE) {
            Ok(_) => panic!("{name}: {key} = {value} is taken"),
            Err(error) => error,
        };
        let typed = matches!(
            error,
            Error::Unsupported { .. } | Error::InvalidArgument { .. } | Error::Missing { .. }
        );
        let message = error.to_string();
        // A head dimension is refused as what it is in the cache.
        let named = message.contains(key) || (key == "head_dim" && message.contains("k_dim"));
        assert!(
            typed && named && message.contains(PLACE),
            "{name}: {message}"
        );
    }
}
