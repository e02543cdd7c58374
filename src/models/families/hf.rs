//! The families in Hugging Face's layout, from `config.json`. Each is what transformers' class
//! of the same name computes; defaults are those of its configuration class.

use super::super::names::{ExpertNames, WeightNames};
use super::super::rope_spec::RopeSpec;
use super::super::spec::{Activation, Experts, FeedForward, ModelSpec, Norm, Presence, QkNormOver};
use super::base::{
    Defaults, GEMMA, PLAIN, TIED, activation, decoder, decoder_with, for_each_layer, head,
    layer_norm, rms, sliding_window, windows,
};
use super::json::Json;
use super::rope;
use crate::error::{Error, Result};

type Family = fn(&Json<'_>) -> Result<ModelSpec>;

/// `model_type`, the class in `architectures`, and the family.
pub(super) const FAMILIES: &[(&str, &str, Family)] = &[
    ("llama", "LlamaForCausalLM", llama),
    ("mistral", "MistralForCausalLM", mistral),
    ("mixtral", "MixtralForCausalLM", mixtral),
    ("qwen2", "Qwen2ForCausalLM", qwen2),
    ("qwen2_moe", "Qwen2MoeForCausalLM", qwen2_moe),
    ("qwen3", "Qwen3ForCausalLM", qwen3),
    ("qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe),
    ("phi3", "Phi3ForCausalLM", phi3),
    ("phi", "PhiForCausalLM", phi),
    ("gemma", "GemmaForCausalLM", gemma),
    ("gemma2", "Gemma2ForCausalLM", gemma2),
    ("gemma3_text", "Gemma3ForCausalLM", gemma3),
    ("starcoder2", "Starcoder2ForCausalLM", starcoder2),
    ("stablelm", "StableLmForCausalLM", stablelm),
    ("granite", "GraniteForCausalLM", granite),
    ("olmo", "OlmoForCausalLM", olmo),
    ("olmo2", "Olmo2ForCausalLM", olmo2),
    ("smollm3", "SmolLM3ForCausalLM", smollm3),
    ("glm4", "Glm4ForCausalLM", glm4),
    ("helium", "HeliumForCausalLM", helium),
    ("gpt_oss", "GptOssForCausalLM", gpt_oss),
];

/// The window of Qwen's configurations, which name one and then say whether it is used.
fn qwen_window(json: &Json<'_>) -> Result<Option<usize>> {
    let used = json.flag("use_sliding_window")?;
    Ok(sliding_window(json, Some(4096))?.filter(|_| used))
}

/// Llama 1 to 3, Yi, SmolLM2 and whatever else ships as `LlamaForCausalLM`.
fn llama(json: &Json<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(json, PLAIN, rms(json)?)?;
    spec.attention_bias(json.flag("attention_bias")?);
    spec.feed_forward_bias(json.flag("mlp_bias")?);
    Ok(spec)
}

fn mistral(json: &Json<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(json, PLAIN, rms(json)?)?;
    spec.set_windows(sliding_window(json, Some(4096))?, |_| true);
    Ok(spec)
}

fn mixtral(json: &Json<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(json, PLAIN.with_base(1e6), rms(json)?)?;
    spec.set_windows(sliding_window(json, None)?, |_| true);
    let experts = Experts {
        count: json.count("num_local_experts")?,
        used: json.count("num_experts_per_tok")?,
        inner: json.count("intermediate_size")?,
        activation: activation(json, "hidden_act", Activation::Silu)?,
        bias: Presence::Never,
        renormalise: true,
        shared: None,
    };
    spec.feed_forward(|network| *network = FeedForward::Experts(experts.clone()));
    spec.names = WeightNames {
        router: "block_sparse_moe.gate",
        experts: ExpertNames::Each {
            prefix: "block_sparse_moe.experts.",
            gate: "w1",
            up: "w3",
            down: "w2",
        },
        ..WeightNames::HF
    };
    Ok(spec)
}

/// Qwen2 and Qwen2.5: the layers from `max_window_layers` on have a window.
fn qwen2(json: &Json<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(json, PLAIN, rms(json)?)?;
    spec.qkv_bias(true);
    let first = json.optional_number("max_window_layers")?.unwrap_or(28.0);
    windows(json, &mut spec, qwen_window(json)?, |layer| {
        layer as f64 >= first
    })?;
    Ok(spec)
}

fn qwen2_moe(json: &Json<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(json, PLAIN, rms(json)?)?;
    spec.qkv_bias(json.optional_flag("qkv_bias")?.unwrap_or(true));
    let end = json.optional_number("max_window_layers")?.unwrap_or(28.0);
    windows(json, &mut spec, qwen_window(json)?, |layer| {
        layer % 2 == 0 && (layer as f64) < end
    })?;
    let shared = json.count("shared_expert_intermediate_size")?;
    qwen_experts(json, &mut spec, Some(shared))?;
    Ok(spec)
}

fn qwen3(json: &Json<'_>) -> Result<ModelSpec> {
    let norm = rms(json)?;
    let mut spec = decoder(json, PLAIN.with_head_dim(128), norm)?;
    spec.attention_bias(json.flag("attention_bias")?);
    spec.qk_norm(norm, QkNormOver::Head);
    let first = json.optional_number("max_window_layers")?.unwrap_or(28.0);
    windows(json, &mut spec, qwen_window(json)?, |layer| {
        layer as f64 >= first
    })?;
    Ok(spec)
}

fn qwen3_moe(json: &Json<'_>) -> Result<ModelSpec> {
    let norm = rms(json)?;
    let mut spec = decoder(json, PLAIN, norm)?;
    spec.attention_bias(json.flag("attention_bias")?);
    spec.qk_norm(norm, QkNormOver::Head);
    spec.set_windows(qwen_window(json)?, |_| true);
    // Files hold it; the class does not read it.
    json.get("max_window_layers");
    qwen_experts(json, &mut spec, None)?;
    Ok(spec)
}

/// Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name.
fn qwen_experts(json: &Json<'_>, spec: &mut ModelSpec, shared: Option<usize>) -> Result<()> {
    let experts = Experts {
        // transformers 5 writes Qwen3's under the other name.
        count: match json.optional_count("num_local_experts")? {
            Some(count) => count,
            None => json.count("num_experts")?,
        },
        used: json.count("num_experts_per_tok")?,
        inner: json.count("moe_intermediate_size")?,
        activation: activation(json, "hidden_act", Activation::Silu)?,
        bias: Presence::Never,
        renormalise: json.flag("norm_topk_prob")?,
        shared,
    };
    let step = json.optional_count("decoder_sparse_step")?.unwrap_or(1);
    let dense = json
        .list("mlp_only_layers", "a list of layer numbers", |layer| {
            layer.as_u64()
        })?
        .unwrap_or_default();
    for (number, layer) in spec.layers.iter_mut().enumerate() {
        if (number + 1).is_multiple_of(step) && !dense.contains(&(number as u64)) {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(())
}

/// Phi-3, Phi-3.5 and Phi-4.
fn phi3(json: &Json<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(json, PLAIN.with_turned(1.0), rms(json)?)?;
    // Files hold it without a scaling, too.
    json.get("original_max_position_embeddings");
    spec.set_windows(sliding_window(json, None)?, |_| true);
    spec.names = WeightNames {
        qkv: Some("self_attn.qkv_proj"),
        gate_up: Some("mlp.gate_up_proj"),
        ..WeightNames::HF
    };
    Ok(spec)
}

/// Phi-1, Phi-1.5 and Phi-2.
fn phi(json: &Json<'_>) -> Result<ModelSpec> {
    let eps = json.optional_number("layer_norm_eps")?.unwrap_or(1e-5);
    let norm = layer_norm(eps);
    let defaults = Defaults {
        activation: ("hidden_act", Activation::GeluTanh),
        ..PLAIN.with_turned(0.5)
    };
    let mut spec = decoder(json, defaults, norm)?;
    spec.attention_bias(true);
    if json.flag("qk_layernorm")? {
        spec.qk_norm(norm, QkNormOver::Head);
    }
    spec.plain_feed_forward(true);
    spec.in_parallel();
    spec.head_bias = spec.head;
    spec.names = WeightNames {
        final_norm: "model.final_layernorm",
        o: "self_attn.dense",
        q_norm: "self_attn.q_layernorm",
        k_norm: "self_attn.k_layernorm",
        up: "mlp.fc1",
        down: "mlp.fc2",
        ..WeightNames::HF
    };
    Ok(spec)
}

fn plus_one(json: &Json<'_>) -> Result<Norm> {
    let eps = json.number("rms_norm_eps")?;
    Ok(Norm::RmsPlusOne { eps })
}

/// What the Gemmas share.
fn gemma_decoder(json: &Json<'_>, norm: Norm, rope: RopeSpec) -> Result<ModelSpec> {
    let mut spec = decoder_with(json, GEMMA, norm, rope)?;
    spec.attention_bias(json.flag("attention_bias")?);
    spec.embedding_scale = (spec.hidden as f64).sqrt();
    // The older name, which the classes read for the first Gemma alone.
    json.get("hidden_act");
    Ok(spec)
}

fn gemma(json: &Json<'_>) -> Result<ModelSpec> {
    let rope = rope::from_config(json, head(json, GEMMA)?, GEMMA.rope)?;
    let mut spec = gemma_decoder(json, plus_one(json)?, rope)?;
    // Early files say `gelu` and mean the approximation with tanh, as transformers reads them.
    if json.get("hidden_activation").is_none() && json.optional_text("hidden_act")? != Some("gelu")
    {
        let by = activation(json, "hidden_act", Activation::GeluTanh)?;
        spec.feed_forward(|network| {
            if let FeedForward::Gated { activation, .. } = network {
                *activation = by;
            }
        });
    }
    Ok(spec)
}

fn gemma2(json: &Json<'_>) -> Result<ModelSpec> {
    let rope = rope::from_config(json, head(json, GEMMA)?, GEMMA.rope)?;
    let mut spec = gemma_sandwich(json, rope)?;
    let window = sliding_window(json, Some(4096))?;
    windows(json, &mut spec, window, |layer| layer % 2 == 0)?;
    Ok(spec)
}

/// What Gemma 2 and 3 share: norms on both sides, a scale of its own, soft caps.
fn gemma_sandwich(json: &Json<'_>, rope: RopeSpec) -> Result<ModelSpec> {
    let norm = plus_one(json)?;
    let mut spec = gemma_decoder(json, norm, rope)?;
    spec.sandwich(norm);
    let scalar = json.optional_number("query_pre_attn_scalar")?;
    let softcap = json.optional_number("attn_logit_softcapping")?;
    spec.each_attention(|attention| {
        attention.scale = scalar.unwrap_or(256.0).powf(-0.5);
        attention.softcap = softcap;
    });
    spec.logit_softcap = json.optional_number("final_logit_softcapping")?;
    spec.names = WeightNames {
        feed_forward_norm: "pre_feedforward_layernorm",
        ..WeightNames::HF
    };
    Ok(spec)
}

/// Gemma 3, its text model: layers with a window have a rope of their own.
fn gemma3(json: &Json<'_>) -> Result<ModelSpec> {
    let head = head(json, GEMMA)?;
    let (global, local) = (GEMMA.rope.with_base(1e6), GEMMA.rope);
    let [global, local] = match json.object("rope_parameters")? {
        Some(both) => {
            let read = |kind, defaults| match both.object(kind)? {
                Some(parameters) => rope::from_parameters(&parameters, head, None, defaults),
                None => Ok(rope::plain(head, defaults)),
            };
            let ropes = [
                read("full_attention", global)?,
                read("sliding_attention", local)?,
            ];
            both.finish()?;
            ropes
        }
        None => {
            let base = json.optional_number("rope_local_base_freq")?;
            let local = local.with_base(base.unwrap_or(local.base));
            [
                rope::from_config(json, head, global)?,
                rope::plain(head, local),
            ]
        }
    };
    let mut spec = gemma_sandwich(json, global)?;
    spec.qk_norm(plus_one(json)?, QkNormOver::Head);
    let private = json.optional_count("_sliding_window_pattern")?;
    let pattern = json.optional_count("sliding_window_pattern")?.or(private);
    let pattern = pattern.unwrap_or(6);
    let window = sliding_window(json, Some(4096))?;
    windows(json, &mut spec, window, |layer| {
        !(layer + 1).is_multiple_of(pattern)
    })?;
    spec.each_attention(|attention| {
        if attention.window.is_some() {
            attention.rope = Some(local.clone());
        }
    });
    Ok(spec)
}

fn starcoder2(json: &Json<'_>) -> Result<ModelSpec> {
    let eps = json.optional_number("norm_epsilon")?.unwrap_or(1e-5);
    let defaults = Defaults {
        activation: ("hidden_act", Activation::GeluTanh),
        ..TIED
    };
    let mut spec = decoder(json, defaults, layer_norm(eps))?;
    let bias = json.optional_flag("use_bias")?.unwrap_or(true);
    spec.attention_bias(bias);
    spec.plain_feed_forward(bias);
    spec.set_windows(sliding_window(json, None)?, |_| true);
    spec.names = WeightNames {
        up: "mlp.c_fc",
        down: "mlp.c_proj",
        ..WeightNames::HF
    };
    Ok(spec)
}

/// StableLM, but for the norms of q and k of its 12B model.
fn stablelm(json: &Json<'_>) -> Result<ModelSpec> {
    let eps = json.optional_number("layer_norm_eps")?.unwrap_or(1e-5);
    let mut spec = decoder(json, PLAIN.with_turned(0.25), layer_norm(eps))?;
    spec.qkv_bias(json.flag("use_qkv_bias")?);
    if json.flag("use_parallel_residual")? {
        spec.in_parallel();
    }
    Ok(spec)
}

/// Granite 3: Llama with multipliers.
fn granite(json: &Json<'_>) -> Result<ModelSpec> {
    let mut spec = llama(json)?;
    let multiplier = |field: &str| Ok::<_, Error>(json.optional_number(field)?.unwrap_or(1.0));
    spec.embedding_scale = multiplier("embedding_multiplier")?;
    spec.logit_scale = 1.0 / multiplier("logits_scaling")?;
    let scale = multiplier("attention_multiplier")?;
    spec.each_attention(|attention| attention.scale = scale);
    let residual = multiplier("residual_multiplier")?;
    for layer in &mut spec.layers {
        layer.residual_scale = residual;
    }
    Ok(spec)
}

/// OLMo: norms without weights, and a limit to q, k and v.
fn olmo(json: &Json<'_>) -> Result<ModelSpec> {
    let norm = Norm::Layer {
        eps: 1e-5,
        weight: Presence::Never,
        bias: Presence::Never,
    };
    let mut spec = decoder(json, PLAIN, norm)?;
    spec.attention_bias(json.flag("attention_bias")?);
    let clip = json.optional_number("clip_qkv")?;
    spec.each_attention(|attention| attention.clip = clip);
    Ok(spec)
}

/// OLMo 2: norms behind attention and feed-forward network, and of whole q and k.
fn olmo2(json: &Json<'_>) -> Result<ModelSpec> {
    let norm = rms(json)?;
    let mut spec = decoder(json, PLAIN, norm)?;
    spec.attention_bias(json.flag("attention_bias")?);
    spec.norms_behind(norm);
    spec.qk_norm(norm, QkNormOver::Heads);
    Ok(spec)
}

/// SmolLM3: some layers have no rope, and those may have a window.
fn smollm3(json: &Json<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(json, TIED.with_base(2e6), rms(json)?)?;
    spec.attention_bias(json.flag("attention_bias")?);
    spec.feed_forward_bias(json.flag("mlp_bias")?);
    let layers = spec.layers.len();
    let interval = json.optional_count("no_rope_layer_interval")?.unwrap_or(4);
    let listed = json.list("no_rope_layers", "a list of 0 and 1", |has_rope| {
        has_rope.as_u64().filter(|&n| n <= 1).map(|n| n == 1)
    })?;
    let has_rope = match for_each_layer(json, "no_rope_layers", listed, layers)? {
        Some(listed) => listed,
        None => (1..=layers).map(|n| !n.is_multiple_of(interval)).collect(),
    };
    for (layer, &has_rope) in spec.layers.iter_mut().zip(&has_rope) {
        layer.attention.rope = layer.attention.rope.take().filter(|_| has_rope);
    }
    let used = json.flag("use_sliding_window")?;
    let window = sliding_window(json, None)?.filter(|_| used);
    // Files hold it; the class does not read it.
    json.get("max_window_layers");
    windows(json, &mut spec, window, |layer| !has_rope[layer])?;
    Ok(spec)
}

/// GLM-4-0414: norms on both sides, neighbours turned in half of each head.
fn glm4(json: &Json<'_>) -> Result<ModelSpec> {
    let norm = rms(json)?;
    let defaults = PLAIN.with_head_dim(128).with_turned(0.5);
    let mut spec = decoder(json, defaults, norm)?;
    spec.qkv_bias(json.optional_flag("attention_bias")?.unwrap_or(true));
    spec.sandwich(norm);
    spec.neighbours();
    spec.names = WeightNames {
        after_attention_norm: "post_self_attn_layernorm",
        after_feed_forward_norm: "post_mlp_layernorm",
        gate_up: Some("mlp.gate_up_proj"),
        ..WeightNames::HF
    };
    Ok(spec)
}

/// Helium: Llama with neighbours turned.
fn helium(json: &Json<'_>) -> Result<ModelSpec> {
    let defaults = PLAIN.with_head_dim(128).with_base(1e5);
    let mut spec = decoder(json, defaults, rms(json)?)?;
    spec.qkv_bias(json.flag("attention_bias")?);
    spec.feed_forward_bias(json.flag("mlp_bias")?);
    spec.neighbours();
    Ok(spec)
}

/// GPT-OSS: sinks, alternating windows, experts with biases and a clamped activation.
fn gpt_oss(json: &Json<'_>) -> Result<ModelSpec> {
    let defaults = PLAIN.with_head_dim(64).with_base(150_000.0);
    let mut spec = decoder(json, defaults, rms(json)?)?;
    spec.attention_bias(json.optional_flag("attention_bias")?.unwrap_or(true));
    spec.each_attention(|attention| attention.sinks = true);
    let window = sliding_window(json, Some(128))?;
    windows(json, &mut spec, window, |layer| layer % 2 == 0)?;
    // An older name of `num_experts_per_tok`, which files hold beside it.
    let used = json.optional_count("experts_per_token")?;
    let experts = Experts {
        count: json.count("num_local_experts")?,
        used: match json.optional_count("num_experts_per_tok")?.or(used) {
            Some(used) => used,
            None => return Err(json.missing("num_experts_per_tok")),
        },
        inner: json.count("intermediate_size")?,
        activation: Activation::ClampedSwiglu {
            alpha: json.optional_number("swiglu_alpha")?.unwrap_or(1.702),
            limit: json.optional_number("swiglu_limit")?.unwrap_or(7.0),
        },
        bias: Presence::Always,
        renormalise: true,
        shared: None,
    };
    spec.feed_forward(|network| *network = FeedForward::Experts(experts.clone()));
    spec.names = WeightNames {
        router: "mlp.router",
        experts: ExpertNames::Interleaved {
            gate_up: "mlp.experts.gate_up_proj",
            down: "mlp.experts.down_proj",
        },
        ..WeightNames::HF
    };
    Ok(spec)
}
