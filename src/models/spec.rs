//! What a model is: everything the decoder has to know besides the weights.

use candle_core::DType;

use super::names::WeightNames;
use super::rope_spec::RopeSpec;
use crate::cache::{CacheSpec, LayerShape};
use crate::error::{Error, Result};

/// Whether a checkpoint holds an optional tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Presence {
    /// The model does without it, whatever the checkpoint holds.
    Never,
    /// The model needs it: a checkpoint without it is refused.
    Always,
    /// The checkpoint decides: what it stores is used.
    IfStored,
}

/// A decoder as data. A model family is a function from its configuration to this
/// ([`spec_from_hf`](super::spec_from_hf), [`spec_from_gguf`](super::spec_from_gguf));
/// [`Decoder`](super::Decoder) runs it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelSpec {
    /// What the configuration calls the family: its `model_type` or `general.architecture`.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Tokens in the vocabulary, the rows of the embedding.
    pub vocab: usize,
    /// Longest sequence in tokens that the model was made for. See
    /// [`ModelSpec::with_context_length`].
    pub context_length: usize,
    /// Factor of the embedded tokens.
    pub embedding_scale: f64,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The norm between the last layer and the head.
    pub final_norm: Norm,
    /// Whether the head has a matrix of its own; without one the embedding serves as head
    /// ("tied"), quantised if it is stored so.
    pub head: Presence,
    /// Whether the head has a bias.
    pub head_bias: Presence,
    /// Factor of the logits.
    pub logit_scale: f64,
    /// `cap · tanh(logit / cap)` (Gemma 2).
    pub logit_softcap: Option<f64>,
    /// Whether the checkpoint corrects the rope frequencies (`rope_freqs` of a GGUF file: one
    /// divisor per frequency, the llama3 scaling worked out at conversion).
    pub rope_divisors: Presence,
    /// What the checkpoint calls its tensors.
    pub names: WeightNames,
}

/// One layer. In sequence, with `n1` to `n4` the norms in the order of the fields, each of
/// which may be [`Norm::None`]:
///
/// `x ← x + scale · n2(attention(n1(x)))`, then `x ← x + scale · n4(feed_forward(n3(x)))`.
///
/// In parallel: `x ← x + scale · (n2(attention(n1(x))) + n4(feed_forward(n1(x))))`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// The norm before attention.
    pub attention_norm: Norm,
    /// Attention.
    pub attention: AttentionSpec,
    /// The norm of what attention adds.
    pub after_attention_norm: Norm,
    /// The norm before the feed-forward network.
    pub feed_forward_norm: Norm,
    /// The feed-forward network.
    pub feed_forward: FeedForward,
    /// The norm of what the feed-forward network adds.
    pub after_feed_forward_norm: Norm,
    /// Whether the feed-forward network reads what attention reads, and not what it adds.
    pub parallel: bool,
    /// Factor of what is added to the residual stream.
    pub residual_scale: f64,
}

/// A norm with one weight per element. Computed in f32 whatever the dtype of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Norm {
    /// No norm: x itself.
    None,
    /// `x / sqrt(mean(x²) + eps) · weight` (Zhang and Sennrich 2019, arXiv:1910.07467).
    Rms {
        /// Added to the mean square.
        eps: f64,
    },
    /// [`Norm::Rms`] with `weight + 1` for the weight (Gemma in Hugging Face's layout).
    RmsPlusOne {
        /// Added to the mean square.
        eps: f64,
    },
    /// `(x - mean(x)) / sqrt(var(x) + eps) · weight + bias` (Ba et al. 2016,
    /// arXiv:1607.06450).
    Layer {
        /// Added to the variance.
        eps: f64,
        /// Whether there are weights; 1 without.
        weight: Presence,
        /// Whether there are biases.
        bias: Presence,
    },
}

/// Self-attention of one layer: `heads` query heads share `kv_heads` heads of K and V.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct AttentionSpec {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Dimension of a query and of a key head.
    pub k_dim: usize,
    /// Dimension of a value head.
    pub v_dim: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// `s ← cap · tanh(s / cap)` of the scaled scores (Gemma 2).
    pub softcap: Option<f64>,
    /// Keys that a query sees, itself included; `None` sees all before it. Layers of one
    /// window form a group of the cache.
    pub window: Option<usize>,
    /// Biases of the q, k and v projections.
    pub bias: Presence,
    /// Bias of the output projection.
    pub out_bias: Presence,
    /// q, k and v are limited to `-clip` to `clip` (OLMo).
    pub clip: Option<f64>,
    /// The norm of q and of k, before rope.
    pub qk_norm: Norm,
    /// What the norm of q and of k runs over.
    pub qk_norm_over: QkNormOver,
    /// The rotary position embedding of q and k; `None` leaves them without positions.
    pub rope: Option<RopeSpec>,
    /// Whether each query head has a sink: a logit that takes part in the softmax without a
    /// value (GPT-OSS).
    pub sinks: bool,
}

/// What one norm of q or k runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum QkNormOver {
    /// Each head alone; all heads share the weights.
    Head,
    /// All heads together.
    Heads,
}

/// The feed-forward network of one layer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum FeedForward {
    /// `down(activation(gate(x)) · up(x))` (Shazeer 2020, arXiv:2002.05202).
    Gated {
        /// Width between the projections.
        inner: usize,
        /// What the gate goes through.
        activation: Activation,
        /// Biases of the three projections.
        bias: Presence,
    },
    /// `down(activation(up(x)))`.
    Plain {
        /// Width between the projections.
        inner: usize,
        /// What lies between the projections.
        activation: Activation,
        /// Biases of the two projections.
        bias: Presence,
    },
    /// A mixture of gated networks.
    Experts(Experts),
}

/// A mixture of experts: each row goes through the `used` experts of which the router gives
/// the largest logits, and their outputs are added, weighted by the softmax of the logits.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Experts {
    /// Experts there are.
    pub count: usize,
    /// Experts that each row goes through.
    pub used: usize,
    /// Width between the projections of an expert.
    pub inner: usize,
    /// What the gate of an expert goes through.
    pub activation: Activation,
    /// Biases of the router and of the experts.
    pub bias: Presence,
    /// Whether the weights of the chosen experts are made to sum to 1; without, the softmax
    /// is over all.
    pub renormalise: bool,
    /// Width of an expert that every row goes through, times the sigmoid of a gate of its own
    /// (Qwen2-MoE).
    pub shared: Option<usize>,
}

/// A nonlinearity.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `x / 2 · (1 + tanh(sqrt(2 / π) · (x + 0.044715 x³)))`.
    GeluTanh,
    /// GPT-OSS: `gate ← min(gate, limit)`, `up ← clamp(up, -limit, limit)`, and
    /// `gate · sigmoid(alpha · gate) · (up + 1)`. Of gated networks alone.
    ClampedSwiglu {
        /// Factor of the gate under the sigmoid.
        alpha: f64,
        /// Where gate and up are cut.
        limit: f64,
    },
}

const OP: &str = "model_spec";

impl ModelSpec {
    /// This model limited to sequences of `length` tokens; a limit above its own changes
    /// nothing. With [`RopeScaling::LongRope`](super::RopeScaling::LongRope) a limit within
    /// the original context also chooses the short divisors.
    pub fn with_context_length(mut self, length: usize) -> Self {
        self.context_length = self.context_length.min(length);
        self
    }

    /// The paged cache this model needs, with K/V rows of `dtype`: a group for each
    /// combination of window, KV heads and dims.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unsupported dtype or head dimension.
    pub fn cache_spec(&self, dtype: DType) -> Result<CacheSpec> {
        let shapes: Vec<LayerShape> = self
            .layers
            .iter()
            .map(|layer| LayerShape {
                window: layer.attention.window,
                kv_heads: layer.attention.kv_heads,
                k_dim: layer.attention.k_dim,
                v_dim: layer.attention.v_dim,
            })
            .collect();
        CacheSpec::from_layers(&shapes, dtype)
    }

    /// Checks that the numbers fit together, so that the decoder need not.
    pub(crate) fn check(&self) -> Result<()> {
        for (what, value) in [
            ("hidden size", self.hidden),
            ("vocabulary size", self.vocab),
            ("context length", self.context_length),
        ] {
            positive(what, value)?;
        }
        for (what, value) in [
            ("embedding scale", Some(self.embedding_scale)),
            ("logit scale", Some(self.logit_scale)),
            ("logit softcap", self.logit_softcap),
        ] {
            above_zero(what, value)?;
        }
        self.final_norm.check()?;
        for layer in &self.layers {
            layer.check()?;
        }
        self.cache_spec(DType::F32).map(|_| ())
    }
}

impl LayerSpec {
    fn check(&self) -> Result<()> {
        for norm in [
            self.attention_norm,
            self.after_attention_norm,
            self.feed_forward_norm,
            self.after_feed_forward_norm,
        ] {
            norm.check()?;
        }
        above_zero("residual scale", Some(self.residual_scale))?;
        self.attention.check()?;
        self.feed_forward.check()
    }
}

impl Norm {
    fn check(self) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Rms { eps } | Self::RmsPlusOne { eps } | Self::Layer { eps, .. } => {
                if eps.is_finite() && eps >= 0.0 {
                    return Ok(());
                }
                refuse("norm epsilon", "a number of at least 0", eps)
            }
        }
    }
}

impl AttentionSpec {
    fn check(&self) -> Result<()> {
        positive("query heads", self.heads)?;
        positive("key/value heads", self.kv_heads)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return refuse(
                "query heads",
                "a multiple of the key/value heads",
                format!("{} for {}", self.heads, self.kv_heads),
            );
        }
        for (what, value) in [
            ("attention scale", Some(self.scale)),
            ("attention softcap", self.softcap),
            ("clip of q, k and v", self.clip),
        ] {
            above_zero(what, value)?;
        }
        self.qk_norm.check()?;
        match &self.rope {
            Some(rope) => rope.check(self.k_dim),
            None => Ok(()),
        }
    }
}

impl FeedForward {
    fn check(&self) -> Result<()> {
        let (inner, activation) = match self {
            Self::Gated {
                inner, activation, ..
            } => (*inner, *activation),
            Self::Plain {
                inner, activation, ..
            } => {
                if matches!(activation, Activation::ClampedSwiglu { .. }) {
                    return refuse(
                        "activation",
                        "one of a single input",
                        format!("{activation:?}"),
                    );
                }
                (*inner, *activation)
            }
            Self::Experts(experts) => {
                if !(1..=experts.count).contains(&experts.used) {
                    return refuse(
                        "experts of each row",
                        &format!("1 to the {} there are", experts.count),
                        experts.used,
                    );
                }
                positive("experts", experts.count)?;
                positive("shared feed-forward width", experts.shared.unwrap_or(1))?;
                (experts.inner, experts.activation)
            }
        };
        if let Activation::ClampedSwiglu { alpha, limit } = activation {
            above_zero("alpha of the activation", Some(alpha))?;
            above_zero("limit of the activation", Some(limit))?;
        }
        positive("feed-forward width", inner)
    }
}

fn positive(what: &str, value: usize) -> Result<()> {
    // Products of any two of these fit into 64 bits.
    if (1..=1 << 31).contains(&value) {
        return Ok(());
    }
    refuse(what, "1 to 2^31", value)
}

fn above_zero(what: &str, value: Option<f64>) -> Result<()> {
    match value {
        Some(value) if !(value.is_finite() && value > 0.0) => {
            refuse(what, "a number above 0", value)
        }
        _ => Ok(()),
    }
}

pub(super) fn refuse(what: &str, expected: &str, got: impl ToString) -> Result<()> {
    Err(Error::InvalidArgument {
        op: OP,
        what: what.into(),
        expected: expected.into(),
        got: got.to_string(),
    })
}
