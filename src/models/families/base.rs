//! What the families in Hugging Face's layout are made from: the decoder that all of them start
//! from, and the changes and fields that several share.

use super::super::names::WeightNames;
use super::super::rope_spec::{RopePairs, RopeScaling, RopeSpec};
use super::super::spec::{Activation, FeedForward, ModelSpec, Norm, Presence, QkNormOver};
use super::json::Json;
use super::rope::{self, Head, RopeDefaults};
use super::sizes::{self, Sizes};
use super::{always_if, unsupported};
use crate::error::{Error, Result};

/// What a family assumes where the configuration is silent.
#[derive(Clone, Copy)]
pub(super) struct Defaults {
    /// Whether the embedding serves as head.
    pub(super) tied: bool,
    /// Dimension of a head; `None` divides the hidden size by the heads.
    pub(super) head_dim: Option<usize>,
    /// The field of the activation, and the activation.
    pub(super) activation: (&'static str, Activation),
    pub(super) rope: RopeDefaults,
}

pub(super) const PLAIN: Defaults = Defaults {
    tied: false,
    head_dim: None,
    activation: ("hidden_act", Activation::Silu),
    rope: RopeDefaults {
        base: 10_000.0,
        turned: None,
    },
};

pub(super) const TIED: Defaults = Defaults {
    tied: true,
    ..PLAIN
};

pub(super) const GEMMA: Defaults = Defaults {
    head_dim: Some(256),
    activation: ("hidden_activation", Activation::GeluTanh),
    ..TIED
};

impl Defaults {
    pub(super) const fn with_head_dim(self, dim: usize) -> Self {
        Self {
            head_dim: Some(dim),
            ..self
        }
    }

    pub(super) const fn with_base(self, base: f64) -> Self {
        let rope = self.rope.with_base(base);
        Self { rope, ..self }
    }

    pub(super) const fn with_turned(self, turned: f64) -> Self {
        let rope = RopeDefaults {
            turned: Some(turned),
            ..self.rope
        };
        Self { rope, ..self }
    }
}

/// The decoder that all families start from.
pub(super) fn decoder(json: &Json<'_>, defaults: Defaults, norm: Norm) -> Result<ModelSpec> {
    let rope = rope::from_config(json, head(json, defaults)?, defaults.rope)?;
    decoder_with(json, defaults, norm, rope)
}

pub(super) fn head(json: &Json<'_>, defaults: Defaults) -> Result<Head> {
    let dim = match json.optional_count("head_dim")?.or(defaults.head_dim) {
        Some(dim) => dim,
        None => sizes::head_dim(
            json.count("hidden_size")?,
            json.count("num_attention_heads")?,
            json.place(),
        )?,
    };
    let context = json.count("max_position_embeddings")?;
    Ok(Head { dim, context })
}

pub(super) fn decoder_with(
    json: &Json<'_>,
    defaults: Defaults,
    norm: Norm,
    rope: RopeSpec,
) -> Result<ModelSpec> {
    let heads = json.count("num_attention_heads")?;
    let Head { dim, context } = head(json, defaults)?;
    let layers = json.count("num_hidden_layers")?;
    let sizes = Sizes {
        hidden: json.count("hidden_size")?,
        vocab: json.count("vocab_size")?,
        context_length: match rope.scaling {
            // Some files name the context that YaRN started from.
            RopeScaling::Yarn {
                factor,
                original_context,
                ..
            } => context.max((factor * original_context as f64) as usize),
            _ => context,
        },
        layers: sizes::check_layers(layers, "num_hidden_layers", json.place())?,
        heads,
        kv_heads: json.optional_count("num_key_value_heads")?.unwrap_or(heads),
        k_dim: dim,
        v_dim: dim,
    };
    let feed_forward = FeedForward::Gated {
        inner: json.count("intermediate_size")?,
        activation: activation(json, defaults.activation.0, defaults.activation.1)?,
        bias: Presence::Never,
    };
    let mut spec = sizes.decoder(norm, rope, feed_forward, WeightNames::HF);
    let tied = json.optional_flag("tie_word_embeddings")?;
    spec.head = always_if(!tied.unwrap_or(defaults.tied));
    Ok(spec)
}

pub(super) fn rms(json: &Json<'_>) -> Result<Norm> {
    let eps = json.number("rms_norm_eps")?;
    Ok(Norm::Rms { eps })
}

pub(super) fn layer_norm(eps: f64) -> Norm {
    Norm::Layer {
        eps,
        weight: Presence::Always,
        bias: Presence::Always,
    }
}

pub(super) fn activation(json: &Json<'_>, field: &str, default: Activation) -> Result<Activation> {
    match json.optional_text(field)? {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(other) => Err(unsupported(
            "activation",
            format!("{field} = {other} in {}", json.place()),
            "silu, gelu_pytorch_tanh, gelu_new",
        )),
    }
}

impl ModelSpec {
    /// The same biases on all projections of attention.
    pub(super) fn attention_bias(&mut self, stored: bool) {
        self.each_attention(|attention| {
            attention.bias = always_if(stored);
            attention.out_bias = always_if(stored);
        });
    }

    pub(super) fn qkv_bias(&mut self, stored: bool) {
        self.each_attention(|attention| attention.bias = always_if(stored));
    }

    pub(super) fn qk_norm(&mut self, norm: Norm, over: QkNormOver) {
        self.each_attention(|attention| {
            attention.qk_norm = norm;
            attention.qk_norm_over = over;
        });
    }

    pub(super) fn feed_forward(&mut self, change: impl Fn(&mut FeedForward)) {
        for layer in &mut self.layers {
            change(&mut layer.feed_forward);
        }
    }

    pub(super) fn feed_forward_bias(&mut self, stored: bool) {
        self.feed_forward(|network| {
            if let FeedForward::Gated { bias, .. } | FeedForward::Plain { bias, .. } = network {
                *bias = always_if(stored);
            }
        });
    }

    /// Drops the gate.
    pub(super) fn plain_feed_forward(&mut self, bias: bool) {
        self.feed_forward(|network| {
            if let FeedForward::Gated {
                inner, activation, ..
            } = *network
            {
                *network = FeedForward::Plain {
                    inner,
                    activation,
                    bias: always_if(bias),
                };
            }
        });
    }

    pub(super) fn neighbours(&mut self) {
        self.each_attention(|attention| {
            if let Some(rope) = &mut attention.rope {
                rope.pairs = RopePairs::Neighbours;
            }
        });
    }
}

/// Windows by `layer_types`, or else by the rule `windowed` of the family.
pub(super) fn windows(
    json: &Json<'_>,
    spec: &mut ModelSpec,
    window: Option<usize>,
    windowed: impl Fn(usize) -> bool,
) -> Result<()> {
    match sliding_layers(json, spec.layers.len())? {
        Some(sliding) => {
            if window.is_none() && sliding.contains(&true) {
                return Err(json.missing("sliding_window"));
            }
            spec.set_windows(window, |layer| sliding[layer]);
        }
        None => spec.set_windows(window, windowed),
    }
    Ok(())
}

/// `layer_types`: for each layer whether it is a sliding one.
fn sliding_layers(json: &Json<'_>, layers: usize) -> Result<Option<Vec<bool>>> {
    let expected = "a list of full_attention and sliding_attention";
    let types = json.list("layer_types", expected, |kind| match kind.as_str()? {
        "full_attention" => Some(false),
        "sliding_attention" => Some(true),
        _ => None,
    })?;
    for_each_layer(json, "layer_types", types, layers)
}

/// Refuses a list with another number of items than the model has layers.
pub(super) fn for_each_layer<T>(
    json: &Json<'_>,
    field: &str,
    list: Option<Vec<T>>,
    layers: usize,
) -> Result<Option<Vec<T>>> {
    match list {
        Some(list) if list.len() != layers => Err(Error::InvalidArgument {
            op: super::OP,
            what: format!("{field} in {}", json.place()),
            expected: format!("one item for each of the {layers} layers"),
            got: format!("{} items", list.len()),
        }),
        list => Ok(list),
    }
}

/// `sliding_window`; a configuration without the field means `default`, one with null or 0
/// means none.
pub(super) fn sliding_window(json: &Json<'_>, default: Option<usize>) -> Result<Option<usize>> {
    let window = json.size("sliding_window")?;
    Ok(if json.has("sliding_window") {
        window
    } else {
        default
    })
}
