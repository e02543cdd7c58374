//! The parts of one layer: norm, attention, feed-forward network.

use candle_core::{DType, Device, Tensor};

use super::experts::ExpertsLayer;
use super::inventory;
use super::linear::{Linear, Part, Projections};
use super::names::WeightNames;
use super::rope::Angles;
use super::spec::{Activation, AttentionSpec, FeedForward, Norm, Presence, QkNormOver};
use super::weights::{LinearWeight, WeightSource};
use crate::PagedAttention;
use crate::cache::StepPlan;
use crate::error::{Error, Result};
use crate::ops::{self, AttentionOptions, Gate};

/// The checkpoint, and what its weights become.
pub(super) struct Loader<'a> {
    pub(super) weights: &'a dyn WeightSource,
    pub(super) names: &'a WeightNames,
    pub(super) hidden: usize,
    pub(super) dtype: DType,
    pub(super) device: &'a Device,
}

impl Loader<'_> {
    /// The matrix `name`, `[out, inp]`, on trust of nobody.
    pub(super) fn matrix(&self, name: &str, out: usize, inp: usize) -> Result<LinearWeight> {
        let name = format!("{name}.weight");
        let weight = self.weights.linear(&name, out, inp)?;
        check_dims(weight, &name, out, inp)
    }

    /// `count` matrices `[out, inp]` of one tensor, one above the other.
    pub(super) fn stacked(
        &self,
        name: &str,
        count: usize,
        out: usize,
        inp: usize,
    ) -> Result<LinearWeight> {
        let name = format!("{name}.weight");
        let weight = self.weights.stacked(&name, count, out, inp)?;
        check_dims(weight, &name, count * out, inp)
    }

    fn part(&self, name: &str, out: usize, inp: usize, bias: Presence) -> Result<Part> {
        Ok(Part {
            weight: self.matrix(name, out, inp)?,
            bias: self.optional(&format!("{name}.bias"), &[out], bias)?,
            out,
        })
    }

    /// Projections of the residual stream, `outs` wide: the matrices `names`, or the pieces of
    /// the matrix `fused`.
    pub(super) fn parts<const N: usize>(
        &self,
        fused: Option<String>,
        names: [String; N],
        outs: [usize; N],
        bias: Presence,
    ) -> Result<[Part; N]> {
        let parts = match inventory::fused(self.weights, fused, &names) {
            Some(fused) => {
                let whole = self.part(&fused, outs.iter().sum(), self.hidden, bias)?;
                cut(whole, &outs, self.device)?
            }
            None => names
                .iter()
                .zip(outs)
                .map(|(name, out)| self.part(name, out, self.hidden, bias))
                .collect::<Result<_>>()?,
        };
        parts
            .try_into()
            .map_err(|parts: Vec<Part>| Error::Invariant {
                op: "load_model",
                what: format!("{} parts of {N} projections", parts.len()),
            })
    }

    pub(super) fn linear(
        &self,
        name: &str,
        out: usize,
        inp: usize,
        bias: Presence,
    ) -> Result<Linear> {
        let part = self.part(name, out, inp, bias)?;
        Linear::new(part.weight, part.bias, self.dtype, self.device)
    }

    /// An f32 tensor that the model can do without.
    pub(super) fn optional(
        &self,
        name: &str,
        shape: &[usize],
        presence: Presence,
    ) -> Result<Option<Tensor>> {
        presence
            .asks(self.weights, name)
            .then(|| self.weights.tensor(name, shape, DType::F32))
            .transpose()
    }
}

fn check_dims(weight: LinearWeight, name: &str, out: usize, inp: usize) -> Result<LinearWeight> {
    if weight.dims() == [out, inp] {
        return Ok(weight);
    }
    Err(Error::Shape {
        op: "load_model",
        tensor: name.into(),
        expected: format!("[{out}, {inp}]"),
        got: weight.dims().to_vec(),
    })
}

/// Cuts a matrix into pieces of `outs` rows.
pub(super) fn cut(whole: Part, outs: &[usize], device: &Device) -> Result<Vec<Part>> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(outs.len());
    for &out in outs {
        parts.push(Part {
            weight: whole.weight.rows(start, out, device)?,
            bias: match &whole.bias {
                Some(bias) => Some(bias.narrow(0, start, out)?),
                None => None,
            },
            out,
        });
        start += out;
    }
    Ok(parts)
}

/// A [`Norm`] with its weights, f32.
#[derive(Debug, Clone)]
pub(super) enum NormLayer {
    None,
    Rms {
        eps: f64,
        weight: Tensor,
    },
    Layer {
        eps: f64,
        weight: Tensor,
        bias: Tensor,
    },
}

impl NormLayer {
    /// The norm over `width` elements whose weight is called `name`.
    pub(super) fn load(loader: &Loader<'_>, name: &str, norm: Norm, width: usize) -> Result<Self> {
        let device = loader.device;
        let tensor = |ending, presence| {
            let name = format!("{name}.{ending}");
            match loader.optional(&name, &[width], presence)? {
                Some(tensor) => Ok::<_, Error>(Some(tensor.to_device(device)?)),
                None => Ok(None),
            }
        };
        let filled = |tensor: Option<Tensor>, with: f32| match tensor {
            Some(tensor) => Ok::<_, Error>(tensor),
            None => Ok(Tensor::full(with, width, device)?),
        };
        Ok(match norm {
            Norm::None => Self::None,
            Norm::Rms { eps } => Self::Rms {
                eps,
                weight: filled(tensor("weight", Presence::Always)?, 1.0)?,
            },
            Norm::RmsPlusOne { eps } => Self::Rms {
                eps,
                weight: (filled(tensor("weight", Presence::Always)?, 0.0)? + 1.0)?,
            },
            Norm::Layer { eps, weight, bias } => Self::Layer {
                eps,
                weight: filled(tensor("weight", weight)?, 1.0)?,
                bias: filled(tensor("bias", bias)?, 0.0)?,
            },
        })
    }

    /// x `[rows, width]` to the same, of x's dtype; the arithmetic is in f32.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::None => x.clone(),
            Self::Rms { eps, weight } => ops::rms_norm(x, weight, *eps as f32)?,
            Self::Layer { eps, weight, bias } => {
                let x32 = x.to_dtype(DType::F32)?.contiguous()?;
                candle_nn::ops::layer_norm(&x32, weight, bias, *eps as f32)?.to_dtype(x.dtype())?
            }
        })
    }
}

/// Self-attention of one layer over the paged cache.
#[derive(Debug, Clone)]
pub(super) struct AttentionLayer {
    qkv: Projections<3>,
    q_norm: NormLayer,
    k_norm: NormLayer,
    qk_norm_over: QkNormOver,
    clip: Option<f64>,
    o: Linear,
    paged: PagedAttention,
    heads: usize,
    kv_heads: usize,
    v_dim: usize,
}

impl AttentionLayer {
    pub(super) fn load(loader: &Loader<'_>, layer: usize, spec: &AttentionSpec) -> Result<Self> {
        let names = loader.names;
        let name = |name| names.in_layer(layer, name);
        let (q_width, k_width) = (spec.heads * spec.k_dim, spec.kv_heads * spec.k_dim);
        let parts = loader.parts(
            names.qkv.map(name),
            [names.q, names.k, names.v].map(name),
            [q_width, k_width, spec.kv_heads * spec.v_dim],
            spec.bias,
        )?;
        let norm = |norm, width| {
            let width = match spec.qk_norm_over {
                QkNormOver::Head => spec.k_dim,
                QkNormOver::Heads => width,
            };
            NormLayer::load(loader, &name(norm), spec.qk_norm, width)
        };
        let mut options = AttentionOptions::new(spec.scale as f32);
        if let Some(cap) = spec.softcap {
            options = options.with_softcap(cap as f32);
        }
        if spec.sinks {
            let sinks = loader
                .weights
                .tensor(&name(names.sinks), &[spec.heads], DType::F32)?;
            options = options.with_sinks(sinks.to_vec1::<f32>()?);
        }
        Ok(Self {
            qkv: Projections::new(parts, loader.dtype, loader.device)?,
            q_norm: norm(names.q_norm, q_width)?,
            k_norm: norm(names.k_norm, k_width)?,
            qk_norm_over: spec.qk_norm_over,
            clip: spec.clip,
            o: loader.linear(
                &name(names.o),
                loader.hidden,
                spec.heads * spec.v_dim,
                spec.out_bias,
            )?,
            paged: PagedAttention::with_options(options),
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            v_dim: spec.v_dim,
        })
    }

    /// x `[rows, hidden]` to the same; row `r` stands where row `r` of `angles` says, nowhere
    /// without.
    pub(super) fn forward(
        &self,
        layer: usize,
        x: &Tensor,
        angles: Option<&Angles>,
        plan: &StepPlan,
    ) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let [mut q, mut k, mut v] = self.qkv.forward(x)?;
        if let Some(clip) = self.clip {
            for x in [&mut q, &mut k, &mut v] {
                *x = x.clamp(-clip, clip)?;
            }
        }
        let q = self.place(&q, &self.q_norm, self.heads, angles)?;
        let k = self.place(&k, &self.k_norm, self.kv_heads, angles)?;
        let v = v.reshape((rows, self.kv_heads, self.v_dim))?;
        let y = self.paged.forward(layer, &q, &k, &v, plan)?;
        self.o.forward(&y.reshape((rows, self.heads * self.v_dim))?)
    }

    /// q or k `[rows, heads * dim]`, normed and turned, as `[rows, heads, dim]`.
    fn place(
        &self,
        x: &Tensor,
        norm: &NormLayer,
        heads: usize,
        angles: Option<&Angles>,
    ) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        let normed = match (norm, self.qk_norm_over) {
            (NormLayer::None, _) => x.clone(),
            (norm, QkNormOver::Heads) => norm.forward(x)?,
            (norm, QkNormOver::Head) => norm
                .forward(&x.reshape((rows * heads, width / heads))?)?
                .reshape((rows, width))?,
        };
        Ok(match angles {
            Some(angles) => angles.apply(&normed, heads)?,
            None => normed.reshape((rows, heads, width / heads))?,
        })
    }
}

/// The feed-forward network of one layer.
#[derive(Debug, Clone)]
pub(super) enum FeedForwardLayer {
    Gated(GatedLayer),
    Plain {
        up: Linear,
        activation: Activation,
        down: Linear,
    },
    Experts(ExpertsLayer),
}

impl FeedForwardLayer {
    pub(super) fn load(loader: &Loader<'_>, layer: usize, spec: &FeedForward) -> Result<Self> {
        let names = loader.names;
        let name = |name| names.in_layer(layer, name);
        let hidden = loader.hidden;
        Ok(match *spec {
            FeedForward::Gated {
                inner,
                activation,
                bias,
            } => {
                let fused = names.gate_up.map(name);
                let names = [names.gate, names.up, names.down].map(name);
                Self::Gated(GatedLayer::load(
                    loader, fused, names, inner, activation, bias,
                )?)
            }
            FeedForward::Plain {
                inner,
                activation,
                bias,
            } => Self::Plain {
                up: loader.linear(&name(names.up), inner, hidden, bias)?,
                activation,
                down: loader.linear(&name(names.down), hidden, inner, bias)?,
            },
            FeedForward::Experts(ref experts) => {
                Self::Experts(ExpertsLayer::load(loader, layer, experts)?)
            }
        })
    }

    /// x `[rows, hidden]` to the same.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Gated(network) => network.forward(x),
            Self::Plain {
                up,
                activation,
                down,
            } => {
                let x = up.forward(x)?;
                let x = match activation {
                    Activation::Silu => x.silu()?,
                    // candle's `gelu` is the one with tanh.
                    Activation::GeluTanh | Activation::ClampedSwiglu { .. } => x.gelu()?,
                };
                down.forward(&x)
            }
            Self::Experts(experts) => experts.forward(x),
        }
    }
}

/// A gated feed-forward network: all of a layer, or one expert.
#[derive(Debug, Clone)]
pub(super) struct GatedLayer {
    gate_up: Projections<2>,
    activation: Activation,
    down: Linear,
}

impl GatedLayer {
    /// The network of the matrices gate, up and down of `names`; gate and up may lie in the
    /// matrix `fused`.
    pub(super) fn load(
        loader: &Loader<'_>,
        fused: Option<String>,
        [gate, up, down]: [String; 3],
        inner: usize,
        activation: Activation,
        bias: Presence,
    ) -> Result<Self> {
        let gate_up = loader.parts(fused, [gate, up], [inner; 2], bias)?;
        let down = loader.part(&down, loader.hidden, inner, bias)?;
        Self::new(loader, gate_up, down, activation)
    }

    pub(super) fn new(
        loader: &Loader<'_>,
        gate_up: [Part; 2],
        down: Part,
        activation: Activation,
    ) -> Result<Self> {
        Ok(Self {
            gate_up: Projections::new(gate_up, loader.dtype, loader.device)?,
            activation,
            down: Linear::new(down.weight, down.bias, loader.dtype, loader.device)?,
        })
    }

    /// x `[rows, hidden]` to the same.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = self.gate_up.forward(x)?;
        let gate_kind = match self.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
            Activation::ClampedSwiglu { alpha, limit } => Gate::ClampedSwiglu {
                alpha: alpha as f32,
                limit: limit as f32,
            },
        };
        self.down.forward(&ops::gated(gate_kind, &gate, &up)?)
    }
}
