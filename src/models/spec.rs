//! What a model is: everything the decoder has to know besides the weights.

use candle_core::DType;

use super::names::WeightNames;
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

/// A decoder as data. A model family is a function from its configuration to this, such as
/// [`llama::spec_from_hf`](super::llama::spec_from_hf); [`Decoder`](super::Decoder) runs it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Tokens in the vocabulary, the rows of the embedding.
    pub vocab: usize,
    /// Longest sequence in tokens that the model was made for.
    pub context_length: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The norm between the last layer and the head.
    pub final_norm: Norm,
    /// Whether the head has a matrix of its own; without one the embedding serves as head
    /// ("tied"), quantised if it is stored so.
    pub head: Presence,
    /// Whether the checkpoint corrects the rope frequencies (`rope_freqs` of a GGUF file: one
    /// divisor per frequency, the llama3 scaling worked out at conversion).
    pub rope_divisors: Presence,
    /// What the checkpoint calls its tensors.
    pub names: WeightNames,
}

/// One layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// The norm before attention.
    pub attention_norm: Norm,
    /// Attention.
    pub attention: AttentionSpec,
    /// The norm before the feed-forward network.
    pub feed_forward_norm: Norm,
    /// The feed-forward network.
    pub feed_forward: FeedForward,
}

/// A norm over the hidden dimension, with one weight per element. Computed in f32 whatever
/// the dtype of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Norm {
    /// `x / sqrt(mean(x²) + eps) · weight` (Zhang and Sennrich 2019, arXiv:1910.07467).
    Rms {
        /// Added to the mean square.
        eps: f64,
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
    /// Biases of the q, k, v and output projections.
    pub bias: Presence,
    /// The rotary position embedding of q and k.
    pub rope: RopeSpec,
}

/// The feed-forward network of one layer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum FeedForward {
    /// `down(silu(gate(x)) · up(x))` (SwiGLU: Shazeer 2020, arXiv:2002.05202).
    GatedSilu {
        /// Width between the projections.
        inner: usize,
        /// Biases of the three projections.
        bias: Presence,
    },
}

/// Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RopeSpec {
    /// Elements of a head that are rotated, even; the rest passes through.
    pub dim: usize,
    /// Base of the geometric row of frequencies: `base^(-2i / dim)`.
    pub base: f64,
    /// Which elements form a pair.
    pub pairs: RopePairs,
    /// How the frequencies are stretched for a longer context.
    pub scaling: RopeScaling,
}

/// Which two elements of a head rope turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RopePairs {
    /// `i` and `i + dim / 2`: checkpoints in Hugging Face's layout.
    Halves,
    /// `2i` and `2i + 1`: the paper, and GGUF files of the `llama` architecture, whose q and k
    /// rows are permuted to match.
    Neighbours,
}

/// How rope frequencies differ from the plain geometric row.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// They do not.
    None,
    /// All divided by `factor` (position interpolation: Chen et al. 2023, arXiv:2306.15595).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: wavelengths above `original_context / low_freq_factor` are divided by
    /// `factor`, those below `original_context / high_freq_factor` are kept, those between are
    /// blended (transformers, `_compute_llama3_parameters`).
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Where the low frequencies begin, in turns per original context.
        low_freq_factor: f64,
        /// Where the high frequencies begin, in turns per original context.
        high_freq_factor: f64,
        /// Context length before the extension.
        original_context: usize,
    },
}

const OP: &str = "model_spec";

impl ModelSpec {
    /// The paged cache this model needs, with K/V rows of `dtype`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unsupported dtype or head dimension.
    pub fn cache_spec(&self, dtype: DType) -> Result<CacheSpec> {
        let shapes: Vec<LayerShape> = self
            .layers
            .iter()
            .map(|layer| LayerShape {
                window: None,
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
        self.final_norm.check()?;
        for layer in &self.layers {
            layer.attention_norm.check()?;
            layer.attention.check()?;
            layer.feed_forward_norm.check()?;
            let FeedForward::GatedSilu { inner, .. } = layer.feed_forward;
            positive("feed-forward width", inner)?;
        }
        self.cache_spec(DType::F32).map(|_| ())
    }
}

impl Norm {
    fn check(self) -> Result<()> {
        let Self::Rms { eps } = self;
        if eps.is_finite() && eps >= 0.0 {
            return Ok(());
        }
        refuse("norm epsilon", "a number of at least 0", eps)
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
        self.rope.check(self.k_dim)
    }
}

impl RopeSpec {
    fn check(&self, k_dim: usize) -> Result<()> {
        if self.dim == 0 || !self.dim.is_multiple_of(2) || self.dim > k_dim {
            return refuse(
                "rope dimension",
                &format!("even, from 2 to the head dimension {k_dim}"),
                self.dim,
            );
        }
        let sound = |x: f64| x.is_finite() && x > 0.0;
        if !sound(self.base) {
            return refuse("rope base", "a number above 0", self.base);
        }
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } if sound(factor) => Ok(()),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            } if sound(factor)
                && sound(low)
                && high.is_finite()
                && high > low
                && original_context > 0 =>
            {
                Ok(())
            }
            bad => refuse(
                "rope scaling",
                "positive factors, high_freq_factor above low_freq_factor",
                format!("{bad:?}"),
            ),
        }
    }
}

fn positive(what: &str, value: usize) -> Result<()> {
    // Products of any two of these fit into 64 bits.
    if (1..=1 << 31).contains(&value) {
        return Ok(());
    }
    refuse(what, "1 to 2^31", value)
}

fn refuse(what: &str, expected: &str, got: impl ToString) -> Result<()> {
    Err(Error::InvalidArgument {
        op: OP,
        what: what.into(),
        expected: expected.into(),
        got: got.to_string(),
    })
}
