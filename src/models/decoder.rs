//! The decoder that runs any [`ModelSpec`].

use candle_core::{DType, Device, Tensor};

use super::CausalLm;
use super::layers::{AttentionLayer, FeedForwardLayer, Loader, NormLayer};
use super::linear::{Embedding, Linear};
use super::rope::{Angles, Rope};
use super::rope_spec::RopeSpec;
use super::spec::{LayerSpec, ModelSpec};
use super::weights::WeightSource;
use crate::cache::{CacheSpec, StepPlan};
use crate::error::{Error, Result};

const OP: &str = "forward";

/// A language model: a [`ModelSpec`] with its weights.
///
/// All sequences of a step run together as `[rows, hidden]`, whatever mixture of prompts and
/// single tokens they are; only attention knows which rows belong together. On a CPU the whole
/// step runs on candle's own thread pool.
#[derive(Debug, Clone)]
pub struct Decoder {
    spec: ModelSpec,
    device: Device,
    embedding: Embedding,
    ropes: Vec<Rope>,
    layers: Vec<Layer>,
    final_norm: NormLayer,
    head: Linear,
}

#[derive(Debug, Clone)]
struct Layer {
    attention_norm: NormLayer,
    attention: AttentionLayer,
    /// Index into [`Decoder::ropes`].
    rope: Option<usize>,
    after_attention_norm: NormLayer,
    feed_forward_norm: NormLayer,
    feed_forward: FeedForwardLayer,
    after_feed_forward_norm: NormLayer,
    parallel: bool,
    residual_scale: f64,
}

impl Decoder {
    /// Loads the weights of `spec` to `device`. Dense weights and the residual stream are of
    /// `dtype` (f32, f16 or bf16); quantised weights stay as they are stored. Projections of
    /// one input are stored as one matrix where their types allow.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a spec that contradicts itself or another dtype; before
    /// any weight is read what [`ModelSpec::check_weights`] answers; what reading answers.
    pub fn load(
        spec: ModelSpec,
        weights: &dyn WeightSource,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::InvalidArgument {
                op: "load_model",
                what: "dtype".into(),
                expected: "f32, f16 or bf16".into(),
                got: format!("{dtype:?}"),
            });
        }
        spec.check_weights(weights)?;
        Self::load_checked(spec, weights, dtype, device)
    }

    /// [`Self::load`] of weights that [`ModelSpec::check_weights`] has accepted, in a dtype that
    /// is one of the three.
    pub(crate) fn load_checked(
        spec: ModelSpec,
        weights: &dyn WeightSource,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let names = spec.names;
        let loader = Loader {
            weights,
            names: &names,
            hidden: spec.hidden,
            dtype,
            device,
        };
        let embedding = loader.matrix(names.embedding, spec.vocab, spec.hidden)?;
        let (embedding, head) = if spec.has_head(weights) {
            let head = loader.linear(names.head, spec.vocab, spec.hidden, spec.head_bias)?;
            (Embedding::new(embedding, dtype, device)?, head)
        } else {
            Embedding::with_head(embedding, dtype, device)?
        };
        let mut kinds: Vec<&RopeSpec> = Vec::new();
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (number, layer) in spec.layers.iter().enumerate() {
            let rope = layer.attention.rope.as_ref();
            let index = rope.map(|rope| {
                let known = kinds.iter().position(|kind| *kind == rope);
                known.unwrap_or_else(|| {
                    kinds.push(rope);
                    kinds.len() - 1
                })
            });
            layers.push(Layer::load(&loader, number, layer, index)?);
        }
        let ropes = kinds
            .into_iter()
            .map(|kind| load_rope(&loader, &spec, kind))
            .collect::<Result<_>>()?;
        let final_norm = NormLayer::load(&loader, names.final_norm, spec.final_norm, spec.hidden)?;
        Ok(Self {
            device: device.clone(),
            embedding,
            ropes,
            layers,
            final_norm,
            head,
            spec,
        })
    }

    /// What this model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Refuses what would be out of range, before anything is computed.
    fn check(&self, tokens: &Tensor, plan: &StepPlan) -> Result<()> {
        if tokens.id() != plan.tokens().id() {
            return Err(Error::InvalidArgument {
                op: OP,
                what: "tokens".into(),
                expected: "the tensor that `plan.tokens()` gives".into(),
                got: format!("another tensor, {:?}", tokens.dims()),
            });
        }
        let vocab = self.spec.vocab;
        if let Some(&token) = plan.token_ids().iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::TokenOutOfRange {
                op: OP,
                token,
                vocab,
            });
        }
        let max = self.spec.context_length;
        match plan.positions().iter().max() {
            Some(&last) if last as usize >= max => Err(Error::ContextLength {
                op: OP,
                len: last as usize + 1,
                max,
            }),
            _ => Ok(()),
        }
    }

    fn run(&self, tokens: &Tensor, plan: &StepPlan) -> Result<Tensor> {
        let angles = self
            .ropes
            .iter()
            .map(|rope| Ok(rope.angles(plan.positions(), &self.device)?))
            .collect::<Result<Vec<_>>>()?;
        let mut x = times(self.embedding.forward(tokens)?, self.spec.embedding_scale)?;
        for (number, layer) in self.layers.iter().enumerate() {
            x = layer.forward(number, &x, &angles, plan)?;
        }
        let wanted = plan.logit_rows();
        if wanted.is_empty() {
            return Ok(Tensor::zeros(
                (0, self.spec.vocab),
                DType::F32,
                &self.device,
            )?);
        }
        if wanted.len() != x.dim(0)? {
            x = x.index_select(&Tensor::new(wanted, &self.device)?, 0)?;
        }
        let x = self.final_norm.forward(&x.to_dtype(DType::F32)?)?;
        let logits = times(self.head.forward(&x)?, self.spec.logit_scale)?;
        Ok(match self.spec.logit_softcap {
            Some(cap) => ((logits / cap)?.tanh()? * cap)?,
            None => logits,
        })
    }
}

/// The frequencies of `rope`, with the divisors that the checkpoint holds for them.
fn load_rope(loader: &Loader<'_>, spec: &ModelSpec, rope: &RopeSpec) -> Result<Rope> {
    let (name, presence) = spec.divisors_of(rope);
    let divisors = loader
        .optional(&name, &[rope.dim / 2], presence)?
        .map(|divisors| divisors.to_vec1::<f32>())
        .transpose()?;
    Ok(Rope::new(rope, spec.context_length, divisors.as_deref()))
}

/// `x · factor`, and x itself for the factor that most models have.
fn times(x: Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 {
        return Ok(x);
    }
    Ok((x * factor)?)
}

impl Layer {
    fn load(
        loader: &Loader<'_>,
        number: usize,
        spec: &LayerSpec,
        rope: Option<usize>,
    ) -> Result<Self> {
        let names = loader.names;
        let norm = |name, norm| {
            NormLayer::load(loader, &names.in_layer(number, name), norm, loader.hidden)
        };
        Ok(Self {
            attention_norm: norm(names.attention_norm, spec.attention_norm)?,
            attention: AttentionLayer::load(loader, number, &spec.attention)?,
            rope,
            after_attention_norm: norm(names.after_attention_norm, spec.after_attention_norm)?,
            feed_forward_norm: norm(names.feed_forward_norm, spec.feed_forward_norm)?,
            feed_forward: FeedForwardLayer::load(loader, number, &spec.feed_forward)?,
            after_feed_forward_norm: norm(
                names.after_feed_forward_norm,
                spec.after_feed_forward_norm,
            )?,
            parallel: spec.parallel,
            residual_scale: spec.residual_scale,
        })
    }

    fn forward(
        &self,
        number: usize,
        x: &Tensor,
        angles: &[Angles],
        plan: &StepPlan,
    ) -> Result<Tensor> {
        let normed = self.attention_norm.forward(x)?;
        let angles = self.rope.map(|rope| &angles[rope]);
        let attended = self.attention.forward(number, &normed, angles, plan)?;
        let attended = self.after_attention_norm.forward(&attended)?;
        let x = (x + times(attended, self.residual_scale)?)?;
        let normed = if self.parallel {
            normed
        } else {
            self.feed_forward_norm.forward(&x)?
        };
        let fed = self.feed_forward.forward(&normed)?;
        let fed = self.after_feed_forward_norm.forward(&fed)?;
        Ok((x + times(fed, self.residual_scale)?)?)
    }
}

impl CausalLm for Decoder {
    /// # Errors
    /// [`Error::TokenOutOfRange`] and [`Error::ContextLength`], before any work;
    /// [`Error::InvalidArgument`] if `tokens` are not the plan's; those of the ops.
    fn forward(&self, tokens: &Tensor, plan: &StepPlan) -> Result<Tensor> {
        self.check(tokens, plan)?;
        self.device.with_context(|| self.run(tokens, plan))
    }

    fn cache_spec(&self, dtype: DType) -> Result<CacheSpec> {
        self.spec.cache_spec(dtype)
    }

    fn vocab_size(&self) -> usize {
        self.spec.vocab
    }

    fn context_length(&self) -> usize {
        self.spec.context_length
    }
}
