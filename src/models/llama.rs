//! The Llama family: Llama 1 to 3, SmolLM and whatever else ships as `LlamaForCausalLM`.
//!
//! A field of the configuration that would change what the model computes is honoured or
//! refused, never skipped.

use std::collections::HashMap;

use candle_core::quantized::gguf_file;

use super::config::{Gguf, Json};
use super::names::WeightNames;
use super::spec::{
    AttentionSpec, FeedForward, LayerSpec, ModelSpec, Norm, Presence, RopePairs, RopeScaling,
    RopeSpec,
};
use crate::error::{Error, Result};

/// Rope base where the configuration names none, in both layouts.
const DEFAULT_ROPE_BASE: f64 = 10_000.0;
/// Layers of a model at most, far above any there is. A configuration is a claim, and a spec
/// takes memory for every layer claimed before the first missing weight can show that it lies.
const MAX_LAYERS: usize = 10_000;

/// The spec of a Llama model in Hugging Face's layout from its `config.json`; `place` names
/// the file in errors.
///
/// Reads the older `rope_theta` / `rope_scaling` and the newer `rope_parameters`; rope kinds
/// `default`, `linear` and `llama3`; biases by `attention_bias` and `mlp_bias`; a head
/// dimension other than `hidden_size / num_attention_heads`.
///
/// # Errors
/// [`Error::Missing`] for an absent field, [`Error::InvalidArgument`] for a value of the wrong
/// kind or numbers that do not fit together, [`Error::Unsupported`] for another activation,
/// rope kind or a quantised checkpoint.
pub fn spec_from_hf(config: &serde_json::Value, place: &str) -> Result<ModelSpec> {
    let json = Json::new(config, place);
    only("hidden_act", json.optional_text("hidden_act")?, "silu")?;
    if json.get("quantization_config").is_some() {
        return Err(unsupported(
            "checkpoint",
            format!("quantization_config in {place}"),
            "f32, f16 and bf16 tensors, or a GGUF file",
        ));
    }
    let hidden = json.count("hidden_size")?;
    let heads = json.count("num_attention_heads")?;
    let head_dim = match json.optional_count("head_dim")? {
        Some(dim) => dim,
        None => divide(hidden, heads, place)?,
    };
    let norm = Norm::Rms {
        eps: json.number("rms_norm_eps")?,
    };
    let layer = LayerSpec {
        attention_norm: norm,
        attention: AttentionSpec {
            heads,
            kv_heads: json.optional_count("num_key_value_heads")?.unwrap_or(heads),
            k_dim: head_dim,
            v_dim: head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            bias: always_if(json.flag("attention_bias")?),
            rope: rope_from_hf(&json, head_dim)?,
        },
        feed_forward_norm: norm,
        feed_forward: FeedForward::GatedSilu {
            inner: json.count("intermediate_size")?,
            bias: always_if(json.flag("mlp_bias")?),
        },
    };
    checked(ModelSpec {
        hidden,
        vocab: json.count("vocab_size")?,
        context_length: json.count("max_position_embeddings")?,
        layers: repeated(
            layer,
            json.count("num_hidden_layers")?,
            "num_hidden_layers",
            place,
        )?,
        final_norm: norm,
        head: always_if(!json.flag("tie_word_embeddings")?),
        rope_divisors: Presence::Never,
        names: WeightNames::HF,
    })
}

/// Rope of transformers 5 (`rope_parameters` holds everything) or of the releases before it
/// (`rope_theta` beside `rope_scaling`, whose kind was first called `type`).
fn rope_from_hf(json: &Json<'_>, head_dim: usize) -> Result<RopeSpec> {
    let parameters = match json.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => json.object("rope_scaling")?,
    };
    let mut base = json.optional_number("rope_theta")?;
    let mut scaling = RopeScaling::None;
    if let Some(parameters) = parameters {
        base = parameters.optional_number("rope_theta")?.or(base);
        if parameters
            .optional_number("partial_rotary_factor")?
            .is_some_and(|factor| factor != 1.0)
        {
            return Err(unsupported("rope", "partial_rotary_factor".into(), "1"));
        }
        let kind = match parameters.optional_text("rope_type")? {
            Some(kind) => kind,
            None => parameters.optional_text("type")?.unwrap_or("default"),
        };
        scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear {
                factor: parameters.number("factor")?,
            },
            "llama3" => RopeScaling::Llama3 {
                factor: parameters.number("factor")?,
                low_freq_factor: parameters.number("low_freq_factor")?,
                high_freq_factor: parameters.number("high_freq_factor")?,
                original_context: parameters.count("original_max_position_embeddings")?,
            },
            other => return Err(unknown_scaling(other, "default, linear, llama3")),
        };
    }
    Ok(RopeSpec {
        dim: head_dim,
        base: base.unwrap_or(DEFAULT_ROPE_BASE),
        pairs: RopePairs::Halves,
        scaling,
    })
}

/// The spec of a GGUF model of the `llama` architecture from its metadata; `place` names the
/// file in errors.
///
/// Rope turns neighbours, since the files hold q and k rows permuted for it. The tensor
/// `rope_freqs.weight` divides the frequencies, biases are added, and `output.weight` is the
/// head, each where the file has it.
///
/// # Errors
/// As [`spec_from_hf`]; [`Error::Unsupported`] also for experts, a sliding window and rope
/// scaling other than `none` and `linear`.
pub fn spec_from_gguf(meta: &HashMap<String, gguf_file::Value>, place: &str) -> Result<ModelSpec> {
    let gguf = Gguf::new(meta, place);
    for (field, neutral) in [
        ("llama.expert_count", 0.0),
        ("llama.attention.sliding_window", 0.0),
        ("llama.attention.clamp_kqv", 0.0),
        ("llama.attention.scale", 0.0),
        ("llama.attention.causal", 1.0),
        ("llama.embedding_scale", 0.0),
        ("llama.residual_scale", 0.0),
        ("llama.logit_scale", 0.0),
        ("llama.rope.scaling.attn_factor", 1.0),
    ] {
        gguf.refuse_unless(field, neutral)?;
    }
    let hidden = gguf.count("llama.embedding_length")?;
    let heads = gguf.count("llama.attention.head_count")?;
    let k_dim = match gguf.optional_count("llama.attention.key_length")? {
        Some(dim) => dim,
        None => divide(hidden, heads, place)?,
    };
    let v_dim = match gguf.optional_count("llama.attention.value_length")? {
        Some(dim) => dim,
        None => divide(hidden, heads, place)?,
    };
    let norm = Norm::Rms {
        eps: gguf.number("llama.attention.layer_norm_rms_epsilon")?,
    };
    let layer = LayerSpec {
        attention_norm: norm,
        attention: AttentionSpec {
            heads,
            kv_heads: gguf
                .optional_count("llama.attention.head_count_kv")?
                .unwrap_or(heads),
            k_dim,
            v_dim,
            scale: 1.0 / (k_dim as f64).sqrt(),
            bias: Presence::IfStored,
            rope: rope_from_gguf(&gguf, k_dim)?,
        },
        feed_forward_norm: norm,
        feed_forward: FeedForward::GatedSilu {
            inner: gguf.count("llama.feed_forward_length")?,
            bias: Presence::IfStored,
        },
    };
    let vocab = match gguf.array_len("tokenizer.ggml.tokens")? {
        Some(tokens) => tokens,
        None => gguf
            .optional_count("llama.vocab_size")?
            .ok_or_else(|| gguf.missing("tokenizer.ggml.tokens or llama.vocab_size"))?,
    };
    checked(ModelSpec {
        hidden,
        vocab,
        context_length: gguf.count("llama.context_length")?,
        layers: repeated(
            layer,
            gguf.count("llama.block_count")?,
            "llama.block_count",
            place,
        )?,
        final_norm: norm,
        head: Presence::IfStored,
        rope_divisors: Presence::IfStored,
        names: WeightNames::GGUF,
    })
}

fn rope_from_gguf(gguf: &Gguf<'_>, k_dim: usize) -> Result<RopeSpec> {
    // Files from before `rope.scaling.type` say `scale_linear` and mean it.
    let old_factor = gguf.optional_number("llama.rope.scale_linear")?;
    let factor = gguf
        .optional_number("llama.rope.scaling.factor")?
        .or(old_factor);
    let kind = gguf.optional_text("llama.rope.scaling.type")?;
    let scaling = match (kind, factor) {
        (Some("none"), _) | (None | Some("linear"), None) => RopeScaling::None,
        // A factor of 0 means "not set" in llama.cpp.
        (None | Some("linear"), Some(factor)) if factor == 0.0 || factor == 1.0 => {
            RopeScaling::None
        }
        (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
        (Some(other), _) => return Err(unknown_scaling(other, "none, linear")),
    };
    Ok(RopeSpec {
        dim: gguf
            .optional_count("llama.rope.dimension_count")?
            .unwrap_or(k_dim),
        base: gguf
            .optional_number("llama.rope.freq_base")?
            .unwrap_or(DEFAULT_ROPE_BASE),
        pairs: RopePairs::Neighbours,
        scaling,
    })
}

fn checked(spec: ModelSpec) -> Result<ModelSpec> {
    spec.check()?;
    Ok(spec)
}

/// `count` layers, as `field` of the configuration claims.
fn repeated(layer: LayerSpec, count: usize, field: &str, place: &str) -> Result<Vec<LayerSpec>> {
    if count > MAX_LAYERS {
        return Err(Error::InvalidArgument {
            op: "model_config",
            what: format!("{field} in {place}"),
            expected: format!("at most {MAX_LAYERS} layers"),
            got: count.to_string(),
        });
    }
    Ok(vec![layer; count])
}

fn always_if(stored: bool) -> Presence {
    if stored {
        Presence::Always
    } else {
        Presence::Never
    }
}

fn divide(hidden: usize, heads: usize, place: &str) -> Result<usize> {
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    Err(Error::InvalidArgument {
        op: "model_config",
        what: format!("hidden size in {place}"),
        expected: format!("a multiple of the {heads} attention heads"),
        got: hidden.to_string(),
    })
}

fn only(what: &'static str, got: Option<&str>, supported: &str) -> Result<()> {
    match got {
        Some(got) if got != supported => Err(unsupported(what, got.to_string(), supported)),
        _ => Ok(()),
    }
}

fn unknown_scaling(got: &str, supported: &str) -> Error {
    unsupported("rope scaling", got.to_string(), supported)
}

fn unsupported(what: &'static str, got: String, supported: &str) -> Error {
    Error::Unsupported {
        what,
        got,
        supported: supported.to_string(),
    }
}
