//! The families in GGUF files, from their metadata. Fields and tensors are llama.cpp's, whose
//! converters permute q and k where rope turns neighbours and add 1 to Gemma's norms.

use super::super::names::WeightNames;
use super::super::rope_spec::{LongRopeDivisors, RopePairs, RopeScaling};
use super::super::spec::{
    Activation, Experts, FeedForward, LayerSpec, ModelSpec, Norm, Presence, QkNormOver,
};
use super::metadata::Gguf;
use super::rope;
use super::sizes::{self, Sizes};
use super::unsupported;
use crate::error::Result;

type Family = fn(&Gguf<'_>) -> Result<ModelSpec>;

/// `general.architecture` and the family.
pub(super) const FAMILIES: &[(&str, Family)] = &[
    ("llama", llama),
    ("qwen2", qwen),
    ("qwen2moe", qwen2moe),
    ("qwen3", qwen3),
    ("qwen3moe", qwen3moe),
    ("phi2", phi2),
    ("phi3", phi3),
    ("gemma", gemma),
    ("gemma2", gemma2),
    ("gemma3", gemma3),
    ("starcoder2", starcoder2),
    ("stablelm", stablelm),
    ("granite", granite),
    ("olmo", olmo),
    ("olmo2", olmo2),
    ("smollm3", smollm3),
    ("glm4", glm4),
    ("gpt-oss", gpt_oss),
];

/// The decoder that all families start from: biases where the file has them.
fn decoder(gguf: &Gguf<'_>, norm: Norm, pairs: RopePairs) -> Result<ModelSpec> {
    let hidden = gguf.count("embedding_length")?;
    let heads = gguf.count("attention.head_count")?;
    let dim = |field| match gguf.size(field)? {
        Some(dim) => Ok(dim),
        None => sizes::head_dim(hidden, heads, gguf.place()),
    };
    let (k_dim, v_dim) = (dim("attention.key_length")?, dim("attention.value_length")?);
    let context = gguf.count("context_length")?;
    // The files do not say how YaRN rounds. GPT-OSS, which alone was made without rounding,
    // is known by its name.
    let truncate = gguf.architecture() != "gpt-oss";
    let rope = rope::from_gguf(gguf, k_dim, pairs, truncate)?;
    let layers = gguf.count("block_count")?;
    let layers_field = format!("{}.block_count", gguf.architecture());
    let sizes = Sizes {
        hidden,
        vocab: match gguf.array_len("tokenizer.ggml.tokens")? {
            Some(tokens) => tokens,
            None => gguf
                .optional_count("vocab_size")?
                .ok_or_else(|| gguf.missing("tokenizer.ggml.tokens"))?,
        },
        context_length: context,
        layers: sizes::check_layers(layers, &layers_field, gguf.place())?,
        heads,
        kv_heads: gguf.size("attention.head_count_kv")?.unwrap_or(heads),
        k_dim,
        v_dim,
    };
    let feed_forward = FeedForward::Gated {
        inner: gguf.count("feed_forward_length")?,
        activation: Activation::Silu,
        bias: Presence::IfStored,
    };
    let mut spec = sizes.decoder(norm, rope, feed_forward, WeightNames::GGUF);
    spec.rope_divisors = Presence::IfStored;
    spec.each_attention(|attention| {
        attention.bias = Presence::IfStored;
        attention.out_bias = Presence::IfStored;
    });
    Ok(spec)
}

fn rms(gguf: &Gguf<'_>) -> Result<Norm> {
    let eps = gguf.number("attention.layer_norm_rms_epsilon")?;
    Ok(Norm::Rms { eps })
}

fn layer_norm(gguf: &Gguf<'_>) -> Result<Norm> {
    Ok(Norm::Layer {
        eps: gguf.number("attention.layer_norm_epsilon")?,
        weight: Presence::Always,
        bias: Presence::IfStored,
    })
}

/// The experts of a file, each `inner` wide.
fn experts(gguf: &Gguf<'_>, inner: usize, renormalise: bool) -> Result<Experts> {
    Ok(Experts {
        count: gguf.count("expert_count")?,
        used: gguf.count("expert_used_count")?,
        inner,
        activation: Activation::Silu,
        bias: Presence::Never,
        renormalise,
        shared: None,
    })
}

impl ModelSpec {
    fn with_experts(mut self, experts: &Experts) -> Self {
        for layer in &mut self.layers {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
        self
    }

    fn with_gate(mut self, by: Activation) -> Self {
        for layer in &mut self.layers {
            if let FeedForward::Gated { activation, .. } = &mut layer.feed_forward {
                *activation = by;
            }
        }
        self
    }

    fn without_gate(mut self, by: Activation) -> Self {
        for layer in &mut self.layers {
            if let FeedForward::Gated { inner, bias, .. } = layer.feed_forward {
                layer.feed_forward = FeedForward::Plain {
                    inner,
                    activation: by,
                    bias,
                };
            }
        }
        self
    }

    fn with_qk_norm(mut self, norm: Norm, over: QkNormOver) -> Self {
        self.each_attention(|attention| {
            attention.qk_norm = norm;
            attention.qk_norm_over = over;
        });
        self
    }
}

/// Llama 1 to 3, Mistral, Mixtral, Yi, SmolLM2 and whatever else is converted to `llama`.
fn llama(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let spec = decoder(gguf, rms(gguf)?, RopePairs::Neighbours)?;
    if gguf.size("expert_count")?.is_none() {
        return Ok(spec);
    }
    let inner = gguf.count("feed_forward_length")?;
    Ok(spec.with_experts(&experts(gguf, inner, true)?))
}

fn qwen(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    decoder(gguf, rms(gguf)?, RopePairs::Halves)
}

fn qwen2moe(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let inner = gguf.count("expert_feed_forward_length")?;
    let mut experts = experts(gguf, inner, false)?;
    experts.shared = Some(gguf.count("expert_shared_feed_forward_length")?);
    Ok(qwen(gguf)?.with_experts(&experts))
}

fn qwen3(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    Ok(qwen(gguf)?.with_qk_norm(rms(gguf)?, QkNormOver::Head))
}

fn qwen3moe(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let inner = gguf.count("expert_feed_forward_length")?;
    Ok(qwen3(gguf)?.with_experts(&experts(gguf, inner, true)?))
}

/// Phi-1, Phi-1.5 and Phi-2.
fn phi2(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let spec = decoder(gguf, layer_norm(gguf)?, RopePairs::Halves)?;
    let mut spec = spec.without_gate(Activation::GeluTanh);
    spec.in_parallel();
    spec.head_bias = Presence::IfStored;
    spec.names.qkv = Some("attn_qkv");
    Ok(spec)
}

/// Phi-3 and Phi-4. Files with LongRoPE say how much it enlarges cosines and sines, others do
/// not.
fn phi3(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(gguf, rms(gguf)?, RopePairs::Halves)?;
    let window = gguf.size("attention.sliding_window")?;
    spec.set_windows(window, |_| true);
    if let Some(attention_factor) = gguf.factor("rope.scaling.attn_factor")? {
        let plain = |layer: &LayerSpec| {
            let rope = layer.attention.rope.as_ref();
            rope.is_none_or(|rope| rope.scaling == RopeScaling::None)
        };
        if !spec.layers.iter().all(plain) {
            return Err(unsupported(
                "rope scaling",
                format!(
                    "rope.scaling.attn_factor beside another scaling in {}",
                    gguf.place()
                ),
                "LongRoPE alone",
            ));
        }
        let scaling = RopeScaling::LongRope {
            divisors: LongRopeDivisors::Stored,
            original_context: gguf.count("rope.scaling.original_context_length")?,
            attention_factor,
        };
        spec.each_attention(|attention| {
            if let Some(rope) = &mut attention.rope {
                rope.scaling = scaling.clone();
            }
        });
    }
    spec.names.qkv = Some("attn_qkv");
    spec.names.gate_up = Some("ffn_up");
    Ok(spec)
}

fn gemma(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(gguf, rms(gguf)?, RopePairs::Halves)?.with_gate(Activation::GeluTanh);
    spec.embedding_scale = (spec.hidden as f64).sqrt();
    Ok(spec)
}

/// What Gemma 2 and 3 share. Their largest models, of `scaled_by_width` layers, scale the
/// scores by the width of the stream for each head, which only the number of layers tells.
fn gemma_sandwich(gguf: &Gguf<'_>, scaled_by_width: usize) -> Result<ModelSpec> {
    let mut spec = gemma(gguf)?;
    spec.sandwich(rms(gguf)?);
    let softcap = gguf.factor("attn_logit_softcapping")?;
    spec.logit_softcap = gguf.factor("final_logit_softcapping")?;
    let width = (spec.layers.len() == scaled_by_width).then_some(spec.hidden as f64);
    spec.each_attention(|attention| {
        attention.softcap = softcap;
        if let Some(width) = width {
            attention.scale = (width / attention.heads as f64).powf(-0.5);
        }
    });
    Ok(spec)
}

/// A window in all but every `pattern`-th layer.
fn set_pattern(gguf: &Gguf<'_>, spec: &mut ModelSpec, pattern: usize) -> Result<()> {
    let pattern = gguf
        .size("attention.sliding_window_pattern")?
        .unwrap_or(pattern);
    let window = gguf.count("attention.sliding_window")?;
    spec.set_windows(Some(window), |layer| !(layer + 1).is_multiple_of(pattern));
    Ok(())
}

fn gemma2(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let mut spec = gemma_sandwich(gguf, 46)?;
    set_pattern(gguf, &mut spec, 2)?;
    Ok(spec)
}

/// Gemma 3: layers with a window have a rope of their own, without scaling.
fn gemma3(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let norm = rms(gguf)?;
    let mut spec = gemma_sandwich(gguf, 62)?.with_qk_norm(norm, QkNormOver::Head);
    set_pattern(gguf, &mut spec, 6)?;
    let base = gguf.factor("rope.freq_base_swa")?.unwrap_or(10_000.0);
    spec.each_attention(|attention| {
        if let (Some(_), Some(rope)) = (attention.window, &mut attention.rope) {
            rope.base = base;
            rope.scaling = RopeScaling::None;
        }
    });
    Ok(spec)
}

fn starcoder2(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let spec = decoder(gguf, layer_norm(gguf)?, RopePairs::Halves)?;
    Ok(spec.without_gate(Activation::GeluTanh))
}

fn stablelm(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(gguf, layer_norm(gguf)?, RopePairs::Halves)?;
    if gguf.flag("use_parallel_residual")? {
        spec.in_parallel();
    }
    Ok(spec)
}

/// Granite 3: Llama with multipliers.
fn granite(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(gguf, rms(gguf)?, RopePairs::Neighbours)?;
    spec.embedding_scale = gguf.factor("embedding_scale")?.unwrap_or(1.0);
    spec.logit_scale = 1.0 / gguf.factor("logit_scale")?.unwrap_or(1.0);
    if let Some(scale) = gguf.factor("attention.scale")? {
        spec.each_attention(|attention| attention.scale = scale);
    }
    if let Some(scale) = gguf.factor("residual_scale")? {
        for layer in &mut spec.layers {
            layer.residual_scale = scale;
        }
    }
    Ok(spec)
}

/// OLMo: norms without weights, and a limit to q, k and v.
fn olmo(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let norm = Norm::Layer {
        eps: gguf.number("attention.layer_norm_epsilon")?,
        weight: Presence::Never,
        bias: Presence::Never,
    };
    let mut spec = decoder(gguf, norm, RopePairs::Neighbours)?;
    let clip = gguf.factor("attention.clamp_kqv")?;
    spec.each_attention(|attention| attention.clip = clip);
    Ok(spec)
}

/// OLMo 2: norms behind attention and feed-forward network, and of whole q and k.
fn olmo2(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let norm = rms(gguf)?;
    let spec = decoder(gguf, norm, RopePairs::Halves)?;
    let mut spec = spec.with_qk_norm(norm, QkNormOver::Heads);
    spec.norms_behind(norm);
    Ok(spec)
}

/// SmolLM3: every fourth layer has no rope.
fn smollm3(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let mut spec = decoder(gguf, rms(gguf)?, RopePairs::Neighbours)?;
    for layer in spec.layers.iter_mut().skip(3).step_by(4) {
        layer.attention.rope = None;
    }
    Ok(spec)
}

/// GLM-4-0414: norms on both sides.
fn glm4(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let norm = rms(gguf)?;
    let mut spec = decoder(gguf, norm, RopePairs::Neighbours)?;
    spec.sandwich(norm);
    spec.names.qkv = Some("attn_qkv");
    spec.names.gate_up = Some("ffn_up");
    Ok(spec)
}

/// GPT-OSS. The files do not hold the numbers of its activation; they are those of the models.
fn gpt_oss(gguf: &Gguf<'_>) -> Result<ModelSpec> {
    let inner = gguf.count("expert_feed_forward_length")?;
    let mut experts = experts(gguf, inner, true)?;
    experts.activation = Activation::ClampedSwiglu {
        alpha: 1.702,
        limit: 7.0,
    };
    experts.bias = Presence::Always;
    let mut spec = decoder(gguf, rms(gguf)?, RopePairs::Halves)?.with_experts(&experts);
    set_pattern(gguf, &mut spec, 2)?;
    spec.each_attention(|attention| attention.sinks = true);
    spec.names.feed_forward_norm = "post_attention_norm";
    Ok(spec)
}
