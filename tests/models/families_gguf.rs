//! Every family that llama.cpp writes, from GGUF files with its fields, names and permutations,
//! against transformers' logits of the checkpoint that they come from.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::Error;
use candle_paged_attn::load::gguf::{GgufFile, GgufWeights};
use candle_paged_attn::models::{Decoder, LinearWeight, WeightSource, spec_from_gguf};

use crate::checkpoint::distance;
use crate::gguf::permuted;
use crate::golden::Golden;
use crate::run::in_chunks;

const CLOSE: f64 = 1e-4;

/// The stored case and llama.cpp's name of its architecture.
pub const CASES: &[(&str, &str)] = &[
    ("llama_linear", "llama"),
    ("llama_yarn", "llama"),
    ("llama_bias_head_dim", "llama"),
    ("mixtral", "llama"),
    ("qwen2_no_window", "qwen2"),
    ("qwen2_moe_all_sparse", "qwen2moe"),
    ("qwen3", "qwen3"),
    ("qwen3_moe_all_sparse", "qwen3moe"),
    ("phi", "phi2"),
    ("phi3", "phi3"),
    ("phi3_longrope_long", "phi3"),
    ("phi3_longrope_short", "phi3"),
    ("gemma", "gemma"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3"),
    ("starcoder2_no_window", "starcoder2"),
    ("stablelm", "stablelm"),
    ("stablelm_parallel", "stablelm"),
    ("granite", "granite"),
    ("olmo", "olmo"),
    ("olmo2", "olmo2"),
    ("smollm3_every_fourth", "smollm3"),
    ("glm4", "glm4"),
    ("gpt_oss_limit_7", "gpt-oss"),
];

/// Architectures of which llama.cpp turns neighbours, and permutes q and k if the checkpoint
/// turns halves.
const PERMUTED: &[&str] = &["llama", "granite", "olmo", "smollm3"];

type Metadata = BTreeMap<String, Value>;
type Tensors = BTreeMap<String, Tensor>;

/// The fields that llama.cpp's converter writes.
pub fn metadata(golden: &Golden, arch: &str) -> Metadata {
    let config = &golden.config;
    let number = |field: &str| config[field].as_f64();
    let count = |field: &str| config[field].as_u64().map(|n| Value::U32(n as u32));
    let float = |field: &str| number(field).map(|x| Value::F32(x as f32));
    let heads = number("num_attention_heads").unwrap();
    let dim = number("head_dim").unwrap_or(number("hidden_size").unwrap() / heads);
    let mut fields = Metadata::new();
    fields.insert("general.architecture".into(), Value::String(arch.into()));
    let mut set = |field: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(format!("{arch}.{field}"), value);
        }
    };
    set("vocab_size", count("vocab_size"));
    set("context_length", count("max_position_embeddings"));
    set("embedding_length", count("hidden_size"));
    set("block_count", count("num_hidden_layers"));
    set("feed_forward_length", count("intermediate_size"));
    set("attention.head_count", count("num_attention_heads"));
    set("attention.head_count_kv", count("num_key_value_heads"));
    set("attention.key_length", Some(Value::U32(dim as u32)));
    set("attention.value_length", Some(Value::U32(dim as u32)));
    set("attention.layer_norm_rms_epsilon", float("rms_norm_eps"));
    let eps = float("layer_norm_eps").or(float("norm_epsilon"));
    let eps = eps.or((arch == "olmo").then_some(Value::F32(1e-5)));
    set("attention.layer_norm_epsilon", eps);
    set("attention.sliding_window", count("sliding_window"));
    set("attn_logit_softcapping", float("attn_logit_softcapping"));
    set("final_logit_softcapping", float("final_logit_softcapping"));
    set("attention.clamp_kqv", float("clip_qkv"));
    set("attention.scale", float("attention_multiplier"));
    set("embedding_scale", float("embedding_multiplier"));
    set("residual_scale", float("residual_multiplier"));
    set("logit_scale", float("logits_scaling"));
    let parallel = config["use_parallel_residual"].as_bool();
    set("use_parallel_residual", parallel.map(Value::Bool));
    set(
        "expert_count",
        count("num_local_experts").or(count("num_experts")),
    );
    set("expert_used_count", count("num_experts_per_tok"));
    if arch == "gpt-oss" {
        set("expert_feed_forward_length", count("intermediate_size"));
    }
    set("expert_feed_forward_length", count("moe_intermediate_size"));
    set(
        "expert_shared_feed_forward_length",
        count("shared_expert_intermediate_size"),
    );
    let rope = &config["rope_parameters"];
    let rope = rope.get("full_attention").unwrap_or(rope);
    let turned = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    set(
        "rope.dimension_count",
        Some(Value::U32((dim * turned) as u32)),
    );
    let base = rope["rope_theta"].as_f64().unwrap();
    set("rope.freq_base", Some(Value::F32(base as f32)));
    let original = rope["original_max_position_embeddings"].as_u64();
    let original = original.map(|n| Value::U32(n as u32));
    let kind = rope["rope_type"].as_str().unwrap();
    if kind == "linear" || kind == "yarn" {
        let factor = rope["factor"].as_f64().unwrap();
        set("rope.scaling.type", Some(Value::String(kind.into())));
        set("rope.scaling.factor", Some(Value::F32(factor as f32)));
    }
    if kind == "longrope" {
        // sqrt(1 + ln(128 / 32) / ln 32).
        let factor = (1.0f64 + 2.0 / 5.0).sqrt();
        set("rope.scaling.attn_factor", Some(Value::F32(factor as f32)));
    }
    set("rope.scaling.original_context_length", original);
    fields
}

/// The tensors under llama.cpp's names.
pub fn tensors(golden: &Golden, arch: &str) -> Tensors {
    let heads = golden.config["num_attention_heads"].as_u64().unwrap() as usize;
    let kv_heads = golden.config["num_key_value_heads"].as_u64().unwrap() as usize;
    let gemma = arch.starts_with("gemma");
    // Gemma 2 and 3 scale by the head dimension alone; what their configuration has more goes
    // into q.
    let q_scale = golden.config["query_pre_attn_scalar"]
        .as_f64()
        .map(|scalar| (16.0 / scalar).sqrt());
    let mut out = Tensors::new();
    let mut experts: BTreeMap<(String, String), BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (name, tensor) in golden.weights().tensors() {
        let mut tensor = tensor.to_dtype(DType::F32).unwrap();
        for (part, heads) in [("q_proj", heads), ("k_proj", kv_heads)] {
            if PERMUTED.contains(&arch) && name.contains(part) {
                tensor = permuted(&tensor, heads);
            }
        }
        if gemma && name.ends_with("norm.weight") {
            tensor = (tensor + 1.0).unwrap();
        }
        if let Some(scale) = q_scale
            && (name.contains("q_norm") || (arch == "gemma2" && name.contains("q_proj")))
        {
            tensor = (tensor * scale).unwrap();
        }
        if name.contains("shared_expert_gate") {
            tensor = tensor.flatten_all().unwrap();
        }
        let name = renamed(&name, arch);
        if let Some((layer, rest)) = name.split_once(".expert.") {
            let (number, rest) = rest.split_once('.').unwrap();
            let key = (layer.to_string(), rest.to_string());
            let number = number.parse().unwrap();
            experts.entry(key).or_default().insert(number, tensor);
        } else if let Some(layer) = name.strip_suffix(".mlp.experts.gate_up_proj") {
            let halves = every_other(&tensor.transpose(1, 2).unwrap().contiguous().unwrap());
            for (half, name) in halves.into_iter().zip(["gate", "up"]) {
                out.insert(format!("{layer}.ffn_{name}_exps.weight"), half);
            }
        } else if let Some(layer) = name.strip_suffix(".mlp.experts.gate_up_proj_bias") {
            for (half, name) in every_other(&tensor).into_iter().zip(["gate", "up"]) {
                out.insert(format!("{layer}.ffn_{name}_exps.bias"), half);
            }
        } else if let Some(layer) = name.strip_suffix(".mlp.experts.down_proj") {
            let tensor = tensor.transpose(1, 2).unwrap().contiguous().unwrap();
            out.insert(format!("{layer}.ffn_down_exps.weight"), tensor);
        } else if let Some(layer) = name.strip_suffix(".mlp.experts.down_proj_bias") {
            out.insert(format!("{layer}.ffn_down_exps.bias"), tensor);
        } else {
            out.insert(name, tensor);
        }
    }
    for ((layer, rest), each) in experts {
        let each: Vec<Tensor> = each.into_values().collect();
        let (part, ending) = rest.rsplit_once('.').unwrap();
        let name = format!("{layer}.ffn_{part}_exps.{ending}");
        out.insert(name, Tensor::stack(&each, 0).unwrap());
    }
    let rope = &golden.config["rope_parameters"];
    for (field, name) in [
        ("short_factor", "rope_factors_short.weight"),
        ("long_factor", "rope_factors_long.weight"),
    ] {
        if let Some(list) = rope[field].as_array() {
            let list: Vec<f32> = list.iter().map(|x| x.as_f64().unwrap() as f32).collect();
            out.insert(name.into(), Tensor::new(list, &Device::Cpu).unwrap());
        }
    }
    out
}

/// The even and the odd entries of dimension 1.
fn every_other(x: &Tensor) -> [Tensor; 2] {
    let half = x.dim(1).unwrap() as u32 / 2;
    [0, 1].map(|first| {
        let order: Vec<u32> = (0..half).map(|i| 2 * i + first).collect();
        x.index_select(&Tensor::new(order, &Device::Cpu).unwrap(), 1)
            .unwrap()
    })
}

fn renamed(name: &str, arch: &str) -> String {
    // The norms around attention and feed-forward network go by other names in each family.
    let norms: &[(&str, &str)] = match arch {
        "gemma2" | "gemma3" => &[
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ],
        "olmo2" => &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ],
        "glm4" => &[
            ("post_self_attn_layernorm", "post_attention_norm"),
            ("post_mlp_layernorm", "post_ffw_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ],
        "gpt-oss" => &[("post_attention_layernorm", "post_attention_norm")],
        _ => &[("post_attention_layernorm", "ffn_norm")],
    };
    let names = [
        ("model.embed_tokens", "token_embd"),
        ("model.final_layernorm", "output_norm"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.dense", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.sinks", "attn_sinks.weight"),
        ("mlp.router", "ffn_gate_inp"),
        ("block_sparse_moe.gate.", "ffn_gate_inp."),
        ("mlp.gate.", "ffn_gate_inp."),
        ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
        ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.fc1", "ffn_up"),
        ("mlp.fc2", "ffn_down"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ];
    let mut name = name.to_string();
    // Experts of their own tensors are stacked afterwards: `blk.0.expert.3.gate.weight`.
    if name.contains(".experts.") && name.ends_with(".weight") {
        for (hf, ours) in [
            ("block_sparse_moe.experts", "expert"),
            ("mlp.experts", "expert"),
            ("w1", "gate"),
            ("w3", "up"),
            ("w2", "down"),
            ("gate_proj", "gate"),
            ("up_proj", "up"),
            ("down_proj", "down"),
        ] {
            name = name.replace(hf, ours);
        }
        return name.replace("model.layers.", "blk.");
    }
    for (hf, ggml) in norms.iter().chain(&names) {
        name = name.replace(hf, ggml);
    }
    name
}

/// The file of a stored case, in a folder of its own.
pub fn file(golden: &Golden, arch: &str) -> (tempfile::TempDir, GgufFile) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write(&path, &metadata(golden, arch), &tensors(golden, arch));
    let file = GgufFile::open(&path).unwrap();
    (folder, file)
}

pub fn write(path: &Path, metadata: &Metadata, tensors: &Tensors) {
    let stored: Vec<QTensor> = tensors
        .values()
        .map(|tensor| QTensor::quantize(tensor, GgmlDType::F32).unwrap())
        .collect();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let names = tensors.keys().map(String::as_str);
    let tensors: Vec<(&str, &QTensor)> = names.zip(&stored).collect();
    let mut file = std::fs::File::create(path).unwrap();
    gguf_file::write(&mut file, &metadata, &tensors).unwrap();
}

fn load(golden: &Golden, arch: &str, context: usize) -> Decoder {
    let (_folder, file) = file(golden, arch);
    let spec = spec_from_gguf(file.metadata(), "tiny.gguf").unwrap();
    let weights = GgufWeights::new(file, None, &Device::Cpu).unwrap();
    let spec = spec.with_context_length(context);
    Decoder::load(spec, &weights, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn gguf_files_give_the_logits_of_transformers() {
    let mut failed = Vec::new();
    for (name, arch) in CASES {
        let golden = Golden::read(name);
        let context = if *name == "phi3_longrope_short" {
            32
        } else {
            usize::MAX
        };
        let model = load(&golden, arch, context);
        for chunk in [golden.prompt.len(), 3] {
            let got = golden.pick(&in_chunks(&model, &golden.prompt, chunk));
            let far = distance(&got, &golden.logits);
            println!("{name}, chunks of {chunk}: {far:.1e}");
            if far > CLOSE {
                failed.push(format!("{name}, chunks of {chunk}: {far:.1e}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Experts of a file come as one matrix, one above the other, in the blocks they are stored in.
#[test]
fn stacked_experts_stay_quantised() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let dense = Tensor::rand(-1f32, 1.0, (3, 4, 64), &Device::Cpu).unwrap();
    let stored = QTensor::quantize(&dense, GgmlDType::Q8_0).unwrap();
    let want = stored.dequantize(&Device::Cpu).unwrap();
    let want = want.reshape((12, 64)).unwrap().to_vec2::<f32>().unwrap();
    let mut file = std::fs::File::create(&path).unwrap();
    gguf_file::write(&mut file, &[], &[("experts.weight", &stored)]).unwrap();
    let file = GgufFile::open(&path).unwrap();
    let weights = GgufWeights::new(file, None, &Device::Cpu).unwrap();
    let LinearWeight::Quantized(got) = weights.stacked("experts.weight", 3, 4, 64).unwrap() else {
        panic!("dense");
    };
    let got = got.dequantize(&Device::Cpu).unwrap();
    assert_eq!(got.to_vec2::<f32>().unwrap(), want);
    let error = weights.stacked("experts.weight", 4, 3, 64).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
}
