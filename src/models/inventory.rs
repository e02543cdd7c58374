//! Whether a checkpoint holds the model of a spec, told from the names and shapes of its
//! tensors: what does not fit is refused before any weight is read.

use std::collections::BTreeSet;

use super::names::{ExpertNames, WeightNames};
use super::rope_spec::{LongRopeDivisors, RopeScaling, RopeSpec};
use super::spec::{
    AttentionSpec, Experts, FeedForward, LayerSpec, ModelSpec, Norm, Presence, QkNormOver,
};
use super::weights::WeightSource;
use crate::error::{Error, Result};

impl ModelSpec {
    /// Checks that `weights` are those of this model: every tensor it needs is there, of the
    /// right shape and of a type that can be read, and there is none it would leave unused,
    /// which would make it another model. Reads no weight. Answers how many tensors the model
    /// reads.
    ///
    /// Left unused without harm are a head beside tied embeddings, rope frequencies (they
    /// follow from the configuration), and the LongRoPE divisors of the other length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a spec that contradicts itself; [`Error::Missing`],
    /// [`Error::Shape`], [`Error::Unsupported`] for a dtype or a tensor too many, or what
    /// `weights` answers; each names the checkpoint and the tensor.
    pub fn check_weights(&self, weights: &dyn WeightSource) -> Result<usize> {
        self.check()?;
        let mut inventory = Inventory {
            weights,
            names: &self.names,
            hidden: self.hidden,
            needed: BTreeSet::new(),
        };
        inventory.model(self)?;
        let extra = weights.names().into_iter().filter(|name| {
            !inventory.needed.contains(*name) && !without_effect(name, self, weights)
        });
        match extra.min() {
            Some(extra) => Err(Error::Unsupported {
                what: "tensor",
                got: format!(
                    "`{extra}` in {}, which {} does not read",
                    weights.place(),
                    self.family
                ),
                supported: "the tensors of this family and configuration alone".into(),
            }),
            None => Ok(inventory.needed.len()),
        }
    }

    /// Whether the head is a matrix of its own in `weights`.
    pub(super) fn has_head(&self, weights: &dyn WeightSource) -> bool {
        self.head
            .asks(weights, &format!("{}.weight", self.names.head))
    }

    /// The tensor with divisors for the frequencies of `rope`, and whether there is one.
    pub(super) fn divisors_of(&self, rope: &RopeSpec) -> (String, Presence) {
        let names = &self.names;
        let (name, presence) = match &rope.scaling {
            RopeScaling::LongRope {
                divisors: LongRopeDivisors::Stored,
                original_context,
                ..
            } if self.context_length > *original_context => (names.rope_long, Presence::Always),
            RopeScaling::LongRope {
                divisors: LongRopeDivisors::Stored,
                ..
            } => (names.rope_short, Presence::Always),
            _ => (names.rope_divisors, self.rope_divisors),
        };
        (format!("{name}.weight"), presence)
    }
}

impl Presence {
    /// Whether the tensor `name` is to be read from `weights`.
    pub(super) fn asks(self, weights: &dyn WeightSource, name: &str) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::IfStored => weights.contains(name),
        }
    }
}

/// The name of a matrix that holds the matrices `names`, where a checkpoint fuses them, or
/// where it has neither, so that the error is about the name that the family uses.
pub(super) fn fused(
    weights: &dyn WeightSource,
    fused: Option<String>,
    names: &[String],
) -> Option<String> {
    let has = |name: &String| weights.contains(&format!("{name}.weight"));
    fused.filter(|fused| has(fused) || !names.iter().any(has))
}

/// Tensors that checkpoints hold and that change nothing.
fn without_effect(name: &str, spec: &ModelSpec, weights: &dyn WeightSource) -> bool {
    let names = &spec.names;
    let named = |known: &str| name.strip_suffix(".weight") == Some(known);
    // Old checkpoints keep what follows from the base.
    name.ends_with(".rotary_emb.inv_freq")
        || named(names.rope_short)
        || named(names.rope_long)
        // transformers, too, takes the embedding where the configuration ties the two.
        || (named(names.head) && !spec.has_head(weights))
}

/// Collects what a model reads, checking each tensor.
struct Inventory<'a> {
    weights: &'a dyn WeightSource,
    names: &'a WeightNames,
    hidden: usize,
    needed: BTreeSet<String>,
}

impl Inventory<'_> {
    fn model(&mut self, spec: &ModelSpec) -> Result<()> {
        let names = self.names;
        self.matrix(names.embedding, spec.vocab, spec.hidden)?;
        if spec.has_head(self.weights) {
            self.linear(names.head, spec.vocab, spec.hidden, spec.head_bias)?;
        }
        for (number, layer) in spec.layers.iter().enumerate() {
            self.layer(number, layer)?;
            if let Some(rope) = &layer.attention.rope {
                let (name, presence) = spec.divisors_of(rope);
                self.tensor(name, &[rope.dim / 2], presence)?;
            }
        }
        self.norm(names.final_norm.into(), spec.final_norm, spec.hidden)
    }

    fn layer(&mut self, number: usize, spec: &LayerSpec) -> Result<()> {
        let names = self.names;
        for (name, norm) in [
            (names.attention_norm, spec.attention_norm),
            (names.after_attention_norm, spec.after_attention_norm),
            (names.feed_forward_norm, spec.feed_forward_norm),
            (names.after_feed_forward_norm, spec.after_feed_forward_norm),
        ] {
            self.norm(names.in_layer(number, name), norm, self.hidden)?;
        }
        self.attention(number, &spec.attention)?;
        match spec.feed_forward {
            FeedForward::Gated { inner, bias, .. } => {
                let fused = names.gate_up.map(|name| names.in_layer(number, name));
                let names = [names.gate, names.up, names.down].map(|n| names.in_layer(number, n));
                self.gated(fused, names, inner, bias)
            }
            FeedForward::Plain { inner, bias, .. } => {
                let (up, down) = (names.up, names.down);
                self.linear(&names.in_layer(number, up), inner, self.hidden, bias)?;
                self.linear(&names.in_layer(number, down), self.hidden, inner, bias)
            }
            FeedForward::Experts(ref experts) => self.experts(number, experts),
        }
    }

    fn attention(&mut self, number: usize, spec: &AttentionSpec) -> Result<()> {
        let names = self.names;
        let name = |name: &str| names.in_layer(number, name);
        let (q_width, k_width) = (spec.heads * spec.k_dim, spec.kv_heads * spec.k_dim);
        self.parts(
            names.qkv.map(name),
            [names.q, names.k, names.v].map(name),
            [q_width, k_width, spec.kv_heads * spec.v_dim],
            spec.bias,
        )?;
        for (norm, whole) in [(names.q_norm, q_width), (names.k_norm, k_width)] {
            let width = match spec.qk_norm_over {
                QkNormOver::Head => spec.k_dim,
                QkNormOver::Heads => whole,
            };
            self.norm(name(norm), spec.qk_norm, width)?;
        }
        if spec.sinks {
            self.tensor(name(names.sinks), &[spec.heads], Presence::Always)?;
        }
        let width = spec.heads * spec.v_dim;
        self.linear(&name(names.o), self.hidden, width, spec.out_bias)
    }

    fn experts(&mut self, number: usize, spec: &Experts) -> Result<()> {
        let names = self.names;
        let name = |name: &str| names.in_layer(number, name);
        let (count, hidden, inner, bias) = (spec.count, self.hidden, spec.inner, spec.bias);
        self.linear(&name(names.router), count, hidden, bias)?;
        match names.experts {
            ExpertNames::Each {
                prefix,
                gate,
                up,
                down,
            } => {
                for expert in 0..count {
                    let names = [gate, up, down].map(|n| name(&format!("{prefix}{expert}.{n}")));
                    self.gated(None, names, inner, bias)?;
                }
            }
            ExpertNames::Stacked { gate, up, down } => {
                for (part, out, inp) in [
                    (gate, inner, hidden),
                    (up, inner, hidden),
                    (down, hidden, inner),
                ] {
                    let name = name(part);
                    self.tensor(
                        format!("{name}.weight"),
                        &[count, out, inp],
                        Presence::Always,
                    )?;
                    self.tensor(format!("{name}.bias"), &[count, out], bias)?;
                }
            }
            ExpertNames::Interleaved { gate_up, down } => {
                for (part, inp, out) in [(gate_up, hidden, 2 * inner), (down, inner, hidden)] {
                    let name = name(part);
                    self.tensor(format!("{name}_bias"), &[count, out], bias)?;
                    self.tensor(name, &[count, inp, out], Presence::Always)?;
                }
            }
        }
        if let Some(inner) = spec.shared {
            let gate = format!("{}.weight", name(names.shared_gate));
            self.tensor(
                gate,
                names.experts.shared_gate_shape(&[1, hidden]),
                Presence::Always,
            )?;
            self.gated(None, names.shared.map(name), inner, bias)?;
        }
        Ok(())
    }

    fn gated(
        &mut self,
        fused: Option<String>,
        [gate, up, down]: [String; 3],
        inner: usize,
        bias: Presence,
    ) -> Result<()> {
        self.parts(fused, [gate, up], [inner; 2], bias)?;
        self.linear(&down, self.hidden, inner, bias)
    }

    fn parts<const N: usize>(
        &mut self,
        whole: Option<String>,
        names: [String; N],
        outs: [usize; N],
        bias: Presence,
    ) -> Result<()> {
        match fused(self.weights, whole, &names) {
            Some(whole) => self.linear(&whole, outs.iter().sum(), self.hidden, bias),
            None => names
                .iter()
                .zip(outs)
                .try_for_each(|(name, out)| self.linear(name, out, self.hidden, bias)),
        }
    }

    fn norm(&mut self, name: String, norm: Norm, width: usize) -> Result<()> {
        let (weight, bias) = match norm {
            Norm::None => (Presence::Never, Presence::Never),
            Norm::Rms { .. } | Norm::RmsPlusOne { .. } => (Presence::Always, Presence::Never),
            Norm::Layer { weight, bias, .. } => (weight, bias),
        };
        self.tensor(format!("{name}.weight"), &[width], weight)?;
        self.tensor(format!("{name}.bias"), &[width], bias)
    }

    fn matrix(&mut self, name: &str, out: usize, inp: usize) -> Result<()> {
        self.tensor(format!("{name}.weight"), &[out, inp], Presence::Always)
    }

    fn linear(&mut self, name: &str, out: usize, inp: usize, bias: Presence) -> Result<()> {
        self.matrix(name, out, inp)?;
        self.tensor(format!("{name}.bias"), &[out], bias)
    }

    fn tensor(&mut self, name: String, shape: &[usize], presence: Presence) -> Result<()> {
        if presence.asks(self.weights, &name) {
            self.weights.check(&name, shape)?;
            self.needed.insert(name);
        }
        Ok(())
    }
}
