//! From `config.json` and GGUF metadata to a `ModelSpec`.

use std::collections::HashMap;

use candle_core::quantized::gguf_file::Value as Gguf;
use candle_core::{DType, Device};
use candle_paged_attn::models::{
    Activation, Decoder, FeedForward, ModelSpec, Norm, Presence, RopePairs, RopeScaling,
    WeightNames, spec_from_gguf, spec_from_hf,
};
use candle_paged_attn::{Error, Result};
use serde_json::{Value, json};

use crate::checkpoint::Tiny;

const PLACE: &str = "some/config.json";

/// What SmolLM2-135M ships.
fn smollm() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 100000,
        "tie_word_embeddings": true, "vocab_size": 49152, "attention_bias": false,
        "torch_dtype": "bfloat16", "pretraining_tp": 1,
    })
}

fn with(mut config: Value, field: &str, value: Value) -> Value {
    config[field] = value;
    config
}

fn rope(spec: &ModelSpec) -> (usize, f64, RopePairs, RopeScaling) {
    let rope = spec.layers[0].attention.rope.as_ref().unwrap();
    (rope.dim, rope.base, rope.pairs, rope.scaling.clone())
}

#[test]
fn smollm_config_becomes_its_spec() {
    let spec = spec_from_hf(&smollm(), PLACE).unwrap();
    assert_eq!(
        (spec.hidden, spec.vocab, spec.context_length),
        (576, 49152, 8192)
    );
    assert_eq!(spec.layers.len(), 30);
    assert_eq!(spec.head, Presence::Never);
    assert_eq!(spec.rope_divisors, Presence::Never);
    assert_eq!(spec.names, WeightNames::HF);
    assert_eq!(spec.final_norm, Norm::Rms { eps: 1e-5 });
    let attention = &spec.layers[29].attention;
    assert_eq!((attention.heads, attention.kv_heads), (9, 3));
    assert_eq!((attention.k_dim, attention.v_dim), (64, 64));
    assert_eq!(attention.scale, 0.125);
    assert_eq!(attention.bias, Presence::Never);
    let FeedForward::Gated {
        inner,
        activation,
        bias,
    } = spec.layers[0].feed_forward
    else {
        panic!("{:?}", spec.layers[0].feed_forward);
    };
    assert_eq!(
        (inner, activation, bias),
        (1536, Activation::Silu, Presence::Never)
    );
    assert_eq!(
        rope(&spec),
        (64, 100_000.0, RopePairs::Halves, RopeScaling::None)
    );
    // 30 layers of 3 heads of 64, K and V, in f32.
    let cache = spec.cache_spec(DType::F32).unwrap();
    assert_eq!(cache.groups.len(), 1);
    assert_eq!(cache.groups[0].bytes_per_token(), Some(46_080));
}

#[test]
fn optional_fields_have_the_defaults_of_transformers() {
    let mut config = smollm();
    for field in [
        "num_key_value_heads",
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
        "attention_bias",
        "hidden_act",
        "model_type",
    ] {
        config.as_object_mut().unwrap().remove(field);
    }
    let spec = spec_from_hf(&config, PLACE).unwrap();
    assert_eq!(spec.layers[0].attention.kv_heads, 9);
    assert_eq!(rope(&spec).1, 10_000.0);
    assert_eq!(spec.head, Presence::Always);
}

#[test]
fn head_dim_need_not_be_hidden_over_heads() {
    let spec = spec_from_hf(&with(smollm(), "head_dim", json!(128)), PLACE).unwrap();
    let attention = &spec.layers[0].attention;
    assert_eq!(
        (attention.k_dim, attention.v_dim, rope(&spec).0),
        (128, 128, 128)
    );
    assert_eq!(attention.scale, 1.0 / 128f64.sqrt());
}

#[test]
fn biases_are_asked_for() {
    let config = with(smollm(), "attention_bias", json!(true));
    let spec = spec_from_hf(&with(config, "mlp_bias", json!(true)), PLACE).unwrap();
    assert_eq!(spec.layers[0].attention.bias, Presence::Always);
    assert!(matches!(
        spec.layers[0].feed_forward,
        FeedForward::Gated {
            bias: Presence::Always,
            ..
        }
    ));
}

#[test]
fn rope_scaling_of_every_generation_of_config() {
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    let fields = json!({
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    });
    let linear = RopeScaling::Linear { factor: 4.0 };
    for (field, value, base, scaling) in [
        ("rope_scaling", fields.clone(), 100_000.0, llama3.clone()),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 4.0}),
            100_000.0,
            linear.clone(),
        ),
        (
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 4}),
            100_000.0,
            linear,
        ),
        (
            "rope_scaling",
            json!({"rope_type": "default"}),
            100_000.0,
            RopeScaling::None,
        ),
        (
            "rope_parameters",
            with(fields, "rope_theta", json!(500000.0)),
            500_000.0,
            llama3,
        ),
        (
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 5e5}),
            500_000.0,
            RopeScaling::None,
        ),
    ] {
        let spec = spec_from_hf(&with(smollm(), field, value), PLACE).unwrap();
        assert_eq!(rope(&spec), (64, base, RopePairs::Halves, scaling));
    }
}

/// The error for `config`, which must name every text of `named`.
fn assert_refused(result: Result<ModelSpec>, kind: &str, named: &[&str]) {
    let error = result.expect_err("must be refused");
    let debug = format!("{error:?}");
    assert!(debug.starts_with(kind), "{debug} is not {kind}");
    let message = error.to_string();
    for name in named {
        assert!(message.contains(name), "{message:?} does not name {name:?}");
    }
}

#[test]
fn a_missing_field_is_named_with_its_place() {
    for field in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ] {
        let mut config = smollm();
        config.as_object_mut().unwrap().remove(field);
        assert_refused(spec_from_hf(&config, PLACE), "Missing", &[field, PLACE]);
    }
    assert_refused(
        spec_from_hf(&json!({}), PLACE),
        "Missing",
        &["model_type", PLACE],
    );
    let config = with(
        smollm(),
        "rope_scaling",
        json!({"rope_type": "llama3", "factor": 8.0}),
    );
    assert_refused(
        spec_from_hf(&config, PLACE),
        "Missing",
        &["low_freq_factor", "rope_scaling", PLACE],
    );
}

#[test]
fn what_would_change_the_result_is_refused() {
    for (field, value, named) in [
        ("model_type", json!("mamba"), ["mamba", "llama"]),
        ("hidden_act", json!("gelu"), ["gelu", "silu"]),
        (
            "rope_scaling",
            json!({"rope_type": "mrope", "factor": 2.0}),
            ["mrope", "llama3"],
        ),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 2.0, "twist": 3}),
            ["twist", "rope_scaling"],
        ),
        // Fields of other families, and of none.
        ("logits_scaling", json!(2.0), ["logits_scaling", PLACE]),
        ("sliding_window", json!(512), ["sliding_window", PLACE]),
        (
            "layer_types",
            json!(["sliding_attention"]),
            ["layer_types", "sliding_attention"],
        ),
        ("a_new_switch", json!(true), ["a_new_switch", "true"]),
        ("a_new_kind", json!("other"), ["a_new_kind", "other"]),
        (
            "rope_parameters",
            json!({"rope_type": "default", "partial_rotary_factor": 0.5}),
            ["partial_rotary_factor", "rope"],
        ),
        (
            "quantization_config",
            json!({"bits": 4}),
            ["quantization_config", PLACE],
        ),
    ] {
        let config = with(smollm(), field, value);
        assert_refused(spec_from_hf(&config, PLACE), "Unsupported", &named);
    }
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    for (field, value, named) in [
        ("num_key_value_heads", json!(2), ["query heads", "9 for 2"]),
        ("num_attention_heads", json!(7), ["hidden size", "576"]),
        ("hidden_size", json!("576"), ["hidden_size", PLACE]),
        ("hidden_size", json!(-1), ["hidden_size", "-1"]),
        ("num_hidden_layers", json!(0), ["num_hidden_layers", "0"]),
        (
            "num_hidden_layers",
            json!(u64::MAX),
            ["num_hidden_layers", "18446744073709551615"],
        ),
        (
            "num_hidden_layers",
            json!(10_001),
            ["at most 10000", "10001"],
        ),
        ("vocab_size", json!(1.5), ["vocab_size", "1.5"]),
        (
            "tie_word_embeddings",
            json!("yes"),
            ["tie_word_embeddings", "yes"],
        ),
        ("rope_scaling", json!("llama3"), ["rope_scaling", "llama3"]),
        ("head_dim", json!(20), ["k_dim", "20"]),
        ("rope_theta", json!(0), ["rope base", "0"]),
        (
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 0.0}),
            ["rope scaling", "0.0"],
        ),
    ] {
        let config = with(smollm(), field, value);
        assert_refused(spec_from_hf(&config, PLACE), "InvalidArgument", &named);
    }
}

/// Before every layer gets a copy of the lists.
#[test]
fn long_rope_lists_of_another_length_are_refused() {
    let mut config = with(smollm(), "num_hidden_layers", json!(10_000));
    for (short, long, named) in [
        (100_000, 32, ["short_factor", "100000"]),
        (32, 31, ["long_factor", "31"]),
    ] {
        config["rope_scaling"] = json!({
            "type": "longrope", "short_factor": vec![1.0; short], "long_factor": vec![1.0; long],
        });
        assert_refused(spec_from_hf(&config, PLACE), "InvalidArgument", &named);
    }
}

#[test]
fn long_values_do_not_bury_the_message() {
    let long = json!(vec![1; 1_000_000]);
    let gguf = || Gguf::Array(vec![Gguf::U8(1); 1_000_000]);
    for result in [
        spec_from_hf(&with(smollm(), "hidden_size", long.clone()), PLACE),
        spec_from_hf(&with(smollm(), "alien", long), PLACE),
        spec_from_hf(
            &with(smollm(), "model_type", json!("x".repeat(1_000_000))),
            PLACE,
        ),
        gguf_with("llama.context_length", gguf()),
        gguf_with("llama.alien", gguf()),
    ] {
        let message = result.unwrap_err().to_string();
        assert!(message.len() < 1000, "{} bytes", message.len());
    }
}

#[test]
fn the_limit_of_an_old_llama_is_a_note() {
    let config = with(smollm(), "max_sequence_length", json!(2048));
    assert_eq!(
        spec_from_hf(&config, PLACE).unwrap(),
        spec_from_hf(&smollm(), PLACE).unwrap()
    );
}

#[test]
fn the_largest_number_of_layers_is_still_accepted() {
    let config = with(smollm(), "num_hidden_layers", json!(10_000));
    assert_eq!(spec_from_hf(&config, PLACE).unwrap().layers.len(), 10_000);
}

/// The metadata of the SmolLM2 GGUF file.
fn smollm_gguf() -> HashMap<String, Gguf> {
    let tokens = vec![Gguf::String("x".into()); 49152];
    [
        ("general.architecture", Gguf::String("llama".into())),
        ("llama.embedding_length", Gguf::U32(576)),
        ("llama.block_count", Gguf::U32(30)),
        ("llama.feed_forward_length", Gguf::U32(1536)),
        ("llama.attention.head_count", Gguf::U32(9)),
        ("llama.attention.head_count_kv", Gguf::U32(3)),
        ("llama.attention.layer_norm_rms_epsilon", Gguf::F32(1e-5)),
        ("llama.rope.dimension_count", Gguf::U32(64)),
        ("llama.rope.freq_base", Gguf::F32(100_000.0)),
        ("llama.context_length", Gguf::U32(8192)),
        ("tokenizer.ggml.tokens", Gguf::Array(tokens)),
    ]
    .into_iter()
    .map(|(field, value)| (field.to_string(), value))
    .collect()
}

fn gguf_with(field: &str, value: Gguf) -> Result<ModelSpec> {
    let mut meta = smollm_gguf();
    meta.insert(field.into(), value);
    spec_from_gguf(&meta, "model.gguf")
}

#[test]
fn smollm_gguf_becomes_the_same_spec_in_ggufs_layout() {
    let spec = spec_from_gguf(&smollm_gguf(), "model.gguf").unwrap();
    let hf = spec_from_hf(&smollm(), PLACE).unwrap();
    assert_eq!(
        (
            spec.hidden,
            spec.vocab,
            spec.context_length,
            spec.layers.len()
        ),
        (hf.hidden, hf.vocab, hf.context_length, hf.layers.len())
    );
    assert_eq!(
        (spec.head, spec.rope_divisors),
        (Presence::IfStored, Presence::IfStored)
    );
    assert_eq!(spec.names, WeightNames::GGUF);
    let (attention, hf) = (&spec.layers[0].attention, &hf.layers[0].attention);
    assert_eq!(
        (
            attention.heads,
            attention.kv_heads,
            attention.k_dim,
            attention.v_dim
        ),
        (hf.heads, hf.kv_heads, hf.k_dim, hf.v_dim)
    );
    assert_eq!(attention.bias, Presence::IfStored);
    assert_eq!(
        rope(&spec),
        (64, 100_000.0, RopePairs::Neighbours, RopeScaling::None)
    );
}

#[test]
fn gguf_fields_beyond_the_usual_ones() {
    let spec = gguf_with("llama.attention.key_length", Gguf::U32(128)).unwrap();
    let attention = &spec.layers[0].attention;
    assert_eq!(
        (attention.k_dim, attention.v_dim, rope(&spec).0),
        (128, 64, 64)
    );
    let spec = gguf_with("llama.attention.value_length", Gguf::U64(32)).unwrap();
    assert_eq!(spec.layers[0].attention.v_dim, 32);

    let linear = RopeScaling::Linear { factor: 4.0 };
    let spec = gguf_with("llama.rope.scaling.factor", Gguf::F32(4.0)).unwrap();
    assert_eq!(rope(&spec).3, linear);
    let spec = gguf_with("llama.rope.scale_linear", Gguf::F32(4.0)).unwrap();
    assert_eq!(rope(&spec).3, linear);
    let spec = gguf_with("llama.rope.scaling.type", Gguf::String("none".into())).unwrap();
    assert_eq!(rope(&spec).3, RopeScaling::None);

    let mut meta = smollm_gguf();
    meta.remove("tokenizer.ggml.tokens");
    meta.insert("llama.vocab_size".into(), Gguf::U32(49_000));
    assert_eq!(spec_from_gguf(&meta, "model.gguf").unwrap().vocab, 49_000);
}

#[test]
fn gguf_metadata_that_cannot_be_run_is_refused() {
    for field in [
        "general.architecture",
        "llama.embedding_length",
        "llama.block_count",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.context_length",
        "tokenizer.ggml.tokens",
    ] {
        let mut meta = smollm_gguf();
        meta.remove(field);
        let result = spec_from_gguf(&meta, "model.gguf");
        assert_refused(result, "Missing", &[field, "model.gguf"]);
    }
    for (field, value, named) in [
        (
            "general.architecture",
            Gguf::String("rwkv7".into()),
            ["rwkv7", "llama"],
        ),
        (
            "llama.rope.scaling.type",
            Gguf::String("longrope".into()),
            ["longrope", "linear"],
        ),
        (
            "llama.attention.sliding_window",
            Gguf::U32(4096),
            ["sliding_window", "4096"],
        ),
        ("llama.logit_scale", Gguf::F32(0.5), ["logit_scale", "0.5"]),
        ("llama.a_new_field", Gguf::U32(7), ["a_new_field", "7"]),
        (
            "llama.attention.causal",
            Gguf::Bool(false),
            ["causal", "false"],
        ),
    ] {
        assert_refused(gguf_with(field, value), "Unsupported", &named);
    }
    for (field, value, named) in [
        (
            "llama.attention.head_count_kv",
            Gguf::U32(2),
            ["query heads", "9 for 2"],
        ),
        (
            "llama.rope.dimension_count",
            Gguf::U32(63),
            ["rope dimension", "63"],
        ),
        (
            "llama.rope.dimension_count",
            Gguf::U32(66),
            ["rope dimension", "66"],
        ),
        (
            "llama.block_count",
            Gguf::F32(30.0),
            ["llama.block_count", "model.gguf"],
        ),
        (
            "llama.block_count",
            Gguf::U64(u64::MAX),
            ["llama.block_count", "18446744073709551615"],
        ),
        (
            "llama.block_count",
            Gguf::U32(10_001),
            ["at most 10000", "10001"],
        ),
        (
            "llama.attention.head_count",
            Gguf::I32(-9),
            ["head_count", "-9"],
        ),
    ] {
        assert_refused(gguf_with(field, value), "InvalidArgument", &named);
    }
    // Neutral values are no reason to refuse.
    gguf_with("llama.expert_count", Gguf::U32(0)).unwrap();
    gguf_with("llama.attention.causal", Gguf::Bool(true)).unwrap();
}

#[test]
fn loading_names_the_tensor_that_is_missing_or_misshapen() {
    let tiny = Tiny::new(1);
    let spec = spec_from_hf(&tiny.config(), PLACE).unwrap();
    let weights = tiny.weights(1);
    for name in [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    ] {
        let mut weights = weights.clone();
        weights.0.remove(name);
        let result = Decoder::load(spec.clone(), &weights, DType::F32, &Device::Cpu);
        match result {
            Err(Error::Missing { what, .. }) => assert_eq!(what, format!("tensor `{name}`")),
            other => panic!("{name}: {other:?}"),
        }
    }
    let mut short = weights.clone();
    let name = "model.layers.1.self_attn.k_proj.weight";
    let narrowed = short.dense(name).narrow(0, 0, 16).unwrap();
    short.insert(name, narrowed);
    match Decoder::load(spec.clone(), &short, DType::F32, &Device::Cpu) {
        Err(Error::Shape { tensor, got, .. }) => {
            assert_eq!((tensor.as_str(), got), (name, vec![16, 32]));
        }
        other => panic!("{other:?}"),
    }
    match Decoder::load(spec, &weights, DType::F64, &Device::Cpu) {
        Err(Error::InvalidArgument { what, got, .. }) => {
            assert_eq!((what.as_str(), got.as_str()), ("dtype", "F64"));
        }
        other => panic!("{other:?}"),
    }
}
