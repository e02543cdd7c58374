//! The parts of one layer: norm, attention, feed-forward network.

use candle_core::{DType, Device, Tensor};

use super::gated::silu_mul;
use super::linear::{Linear, Part, Projections};
use super::names::WeightNames;
use super::rope::Angles;
use super::spec::{AttentionSpec, FeedForward, Norm, Presence};
use super::weights::{LinearWeight, WeightSource};
use crate::PagedAttention;
use crate::cache::StepPlan;
use crate::error::{Error, Result};

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
        let got = match &weight {
            LinearWeight::Dense(weight) => weight.dims(),
            LinearWeight::Quantized(weight) => weight.shape().dims(),
        };
        if got == [out, inp] {
            return Ok(weight);
        }
        Err(Error::Shape {
            op: "load_model",
            tensor: name,
            expected: format!("[{out}, {inp}]"),
            got: got.to_vec(),
        })
    }

    fn part(&self, name: &str, out: usize, inp: usize, bias: Presence) -> Result<Part> {
        Ok(Part {
            weight: self.matrix(name, out, inp)?,
            bias: self.optional(&format!("{name}.bias"), &[out], bias)?,
            out,
        })
    }

    fn linear(&self, name: &str, out: usize, inp: usize, bias: Presence) -> Result<Linear> {
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
        let wanted = match presence {
            Presence::Never => false,
            Presence::Always => true,
            Presence::IfStored => self.weights.contains(name),
        };
        wanted
            .then(|| self.weights.tensor(name, shape, DType::F32))
            .transpose()
    }
}

/// A [`Norm`] with its weights.
#[derive(Debug, Clone)]
pub(super) struct NormLayer {
    norm: Norm,
    /// f32 `[hidden]`.
    weight: Tensor,
}

impl NormLayer {
    pub(super) fn load(loader: &Loader<'_>, name: &str, norm: Norm) -> Result<Self> {
        let name = format!("{name}.weight");
        let weight = loader
            .weights
            .tensor(&name, &[loader.hidden], DType::F32)?
            .to_device(loader.device)?;
        Ok(Self { norm, weight })
    }

    /// x `[rows, hidden]` to the same, of x's dtype, by way of f32: candle's own 16-bit norm
    /// rounds the root of the mean square as well.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Norm::Rms { eps } = self.norm;
        let x32 = x.to_dtype(DType::F32)?;
        let y = candle_nn::ops::rms_norm(&x32, &self.weight, eps as f32)?;
        Ok(y.to_dtype(x.dtype())?)
    }
}

/// Self-attention of one layer over the paged cache.
#[derive(Debug, Clone)]
pub(super) struct AttentionLayer {
    qkv: Projections<3>,
    o: Linear,
    paged: PagedAttention,
    heads: usize,
    kv_heads: usize,
    v_dim: usize,
}

impl AttentionLayer {
    pub(super) fn load(loader: &Loader<'_>, layer: usize, spec: &AttentionSpec) -> Result<Self> {
        let hidden = loader.hidden;
        let part = |name, heads: usize, dim: usize| {
            let name = loader.names.in_layer(layer, name);
            loader.part(&name, heads * dim, hidden, spec.bias)
        };
        let parts = [
            part(loader.names.q, spec.heads, spec.k_dim)?,
            part(loader.names.k, spec.kv_heads, spec.k_dim)?,
            part(loader.names.v, spec.kv_heads, spec.v_dim)?,
        ];
        let o = loader.names.in_layer(layer, loader.names.o);
        Ok(Self {
            qkv: Projections::new(parts, loader.dtype, loader.device)?,
            o: loader.linear(&o, hidden, spec.heads * spec.v_dim, spec.bias)?,
            paged: PagedAttention::new(spec.scale as f32),
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            v_dim: spec.v_dim,
        })
    }

    /// x `[rows, hidden]` to the same; row `r` stands where row `r` of `angles` says.
    pub(super) fn forward(
        &self,
        layer: usize,
        x: &Tensor,
        angles: &Angles,
        plan: &StepPlan,
    ) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let [q, k, v] = self.qkv.forward(x)?;
        let q = angles.apply(&q, self.heads)?;
        let k = angles.apply(&k, self.kv_heads)?;
        let v = v.reshape((rows, self.kv_heads, self.v_dim))?;
        let y = self.paged.forward(layer, &q, &k, &v, plan)?;
        self.o.forward(&y.reshape((rows, self.heads * self.v_dim))?)
    }
}

/// The feed-forward network of one layer.
#[derive(Debug, Clone)]
pub(super) struct FeedForwardLayer {
    gate_up: Projections<2>,
    down: Linear,
}

impl FeedForwardLayer {
    pub(super) fn load(loader: &Loader<'_>, layer: usize, spec: &FeedForward) -> Result<Self> {
        let FeedForward::GatedSilu { inner, bias } = *spec;
        let name = |name| loader.names.in_layer(layer, name);
        let parts = [
            loader.part(&name(loader.names.gate), inner, loader.hidden, bias)?,
            loader.part(&name(loader.names.up), inner, loader.hidden, bias)?,
        ];
        Ok(Self {
            gate_up: Projections::new(parts, loader.dtype, loader.device)?,
            down: loader.linear(&name(loader.names.down), loader.hidden, inner, bias)?,
        })
    }

    /// x `[rows, hidden]` to the same.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = self.gate_up.forward(x)?;
        self.down.forward(&silu_mul(&gate, &up)?)
    }
}
