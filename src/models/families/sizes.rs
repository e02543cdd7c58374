//! The spec that most families start from, and what is said of several layers at once.

use super::super::names::WeightNames;
use super::super::rope_spec::RopeSpec;
use super::super::spec::{
    AttentionSpec, FeedForward, LayerSpec, ModelSpec, Norm, Presence, QkNormOver,
};
use super::OP;
use crate::error::{Error, Result};

/// Layers of a model at most, far above any there is. A configuration is a claim, and a spec
/// takes memory for every layer claimed before the first missing weight can show that it lies.
const MAX_LAYERS: usize = 10_000;

/// The numbers that every decoder has.
pub(super) struct Sizes {
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    pub(super) context_length: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) k_dim: usize,
    pub(super) v_dim: usize,
}

impl Sizes {
    /// A decoder like Llama: a norm before attention and one before the feed-forward network,
    /// scores scaled by the root of the head dimension, and nothing that a family would have
    /// to add.
    pub(super) fn decoder(
        &self,
        norm: Norm,
        rope: RopeSpec,
        feed_forward: FeedForward,
        names: WeightNames,
    ) -> ModelSpec {
        let layer = LayerSpec {
            attention_norm: norm,
            attention: AttentionSpec {
                heads: self.heads,
                kv_heads: self.kv_heads,
                k_dim: self.k_dim,
                v_dim: self.v_dim,
                scale: 1.0 / (self.k_dim as f64).sqrt(),
                softcap: None,
                window: None,
                bias: Presence::Never,
                out_bias: Presence::Never,
                clip: None,
                qk_norm: Norm::None,
                qk_norm_over: QkNormOver::Head,
                rope: Some(rope),
                sinks: false,
            },
            after_attention_norm: Norm::None,
            feed_forward_norm: norm,
            feed_forward,
            after_feed_forward_norm: Norm::None,
            parallel: false,
            residual_scale: 1.0,
        };
        ModelSpec {
            family: "",
            hidden: self.hidden,
            vocab: self.vocab,
            context_length: self.context_length,
            embedding_scale: 1.0,
            layers: vec![layer; self.layers],
            final_norm: norm,
            head: Presence::IfStored,
            head_bias: Presence::Never,
            logit_scale: 1.0,
            logit_softcap: None,
            rope_divisors: Presence::Never,
            names,
        }
    }
}

impl ModelSpec {
    /// Changes the attention of every layer.
    pub(super) fn each_attention(&mut self, change: impl Fn(&mut AttentionSpec)) {
        for layer in &mut self.layers {
            change(&mut layer.attention);
        }
    }

    /// Puts norms around attention and feed-forward network, before and after.
    pub(super) fn sandwich(&mut self, norm: Norm) {
        for layer in &mut self.layers {
            layer.after_attention_norm = norm;
            layer.after_feed_forward_norm = norm;
        }
    }

    /// Norms behind attention and feed-forward network, none before.
    pub(super) fn norms_behind(&mut self, norm: Norm) {
        self.sandwich(norm);
        for layer in &mut self.layers {
            layer.attention_norm = Norm::None;
            layer.feed_forward_norm = Norm::None;
        }
    }

    /// Attention and feed-forward network read the same norm.
    pub(super) fn in_parallel(&mut self) {
        for layer in &mut self.layers {
            layer.parallel = true;
            layer.feed_forward_norm = Norm::None;
        }
    }

    /// Gives `window` to the layers that `windowed` says.
    pub(super) fn set_windows(&mut self, window: Option<usize>, windowed: impl Fn(usize) -> bool) {
        for (number, layer) in self.layers.iter_mut().enumerate() {
            layer.attention.window = window.filter(|_| windowed(number));
        }
    }
}

/// The number of layers that `field` of a configuration claims.
pub(super) fn check_layers(count: usize, field: &str, place: &str) -> Result<usize> {
    if count <= MAX_LAYERS {
        return Ok(count);
    }
    Err(Error::InvalidArgument {
        op: OP,
        what: format!("{field} in {place}"),
        expected: format!("at most {MAX_LAYERS} layers"),
        got: count.to_string(),
    })
}

/// The dimension of a head where the configuration names none.
pub(super) fn head_dim(hidden: usize, heads: usize, place: &str) -> Result<usize> {
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    Err(Error::InvalidArgument {
        op: OP,
        what: format!("hidden size in {place}"),
        expected: format!("a multiple of the {heads} attention heads"),
        got: hidden.to_string(),
    })
}
