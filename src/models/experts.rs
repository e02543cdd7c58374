//! A mixture of experts, batched by expert: each expert runs once per step, over all rows
//! that were sent to it, whichever sequences they are of.

use candle_core::{DType, Tensor};

use super::layers::{GatedLayer, Loader, cut};
use super::linear::{Linear, Part};
use super::names::ExpertNames;
use super::spec::Experts;
use super::weights::LinearWeight;
use crate::error::{Error, Result};

/// [`Experts`] with their weights.
#[derive(Debug, Clone)]
pub(super) struct ExpertsLayer {
    router: Linear,
    experts: Vec<GatedLayer>,
    used: usize,
    renormalise: bool,
    shared: Option<Shared>,
}

/// An expert that every row goes through, and its gate.
#[derive(Debug, Clone)]
struct Shared {
    gate: Linear,
    network: GatedLayer,
}

/// Which experts each row of a step goes through.
struct Routes {
    /// The rows of each expert, ascending.
    rows: Vec<Vec<u32>>,
    /// For each row and each of its experts, ascending: where its output stands when the
    /// outputs of all experts are put one after the other.
    places: Vec<u32>,
    /// The weights of those outputs.
    weights: Vec<f32>,
}

impl ExpertsLayer {
    pub(super) fn load(loader: &Loader<'_>, layer: usize, spec: &Experts) -> Result<Self> {
        let names = loader.names;
        let name = |name: &str| names.in_layer(layer, name);
        let router = loader.linear(&name(names.router), spec.count, loader.hidden, spec.bias)?;
        let experts = match names.experts {
            ExpertNames::Each {
                prefix,
                gate,
                up,
                down,
            } => (0..spec.count)
                .map(|expert| {
                    let names = [gate, up, down].map(|n| name(&format!("{prefix}{expert}.{n}")));
                    GatedLayer::load(loader, None, names, spec.inner, spec.activation, spec.bias)
                })
                .collect::<Result<_>>()?,
            ExpertNames::Stacked { gate, up, down } => {
                let (hidden, inner) = (loader.hidden, spec.inner);
                let gate = stacked(loader, spec, &name(gate), inner, hidden)?;
                let up = stacked(loader, spec, &name(up), inner, hidden)?;
                let down = stacked(loader, spec, &name(down), hidden, inner)?;
                networks(loader, spec, gate.into_iter().zip(up), down)?
            }
            ExpertNames::Interleaved { gate_up, down } => {
                let gate_up = interleaved(loader, spec, &name(gate_up))?;
                let down = transposed(loader, spec, &name(down), loader.hidden, spec.inner)?
                    .into_iter()
                    .map(|(weight, bias)| Part {
                        weight: LinearWeight::Dense(weight),
                        bias,
                        out: loader.hidden,
                    })
                    .collect();
                networks(loader, spec, gate_up.into_iter(), down)?
            }
        };
        let shared = match spec.shared {
            Some(inner) => Some(Shared {
                gate: shared_gate(loader, &name(names.shared_gate))?,
                network: GatedLayer::load(
                    loader,
                    None,
                    names.shared.map(name),
                    inner,
                    spec.activation,
                    spec.bias,
                )?,
            }),
            None => None,
        };
        Ok(Self {
            router,
            experts,
            used: spec.used,
            renormalise: spec.renormalise,
            shared,
        })
    }

    /// x `[rows, hidden]` to the same. Copies the logits of the router to the host.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, hidden) = x.dims2()?;
        let logits = self.router.forward(&x.to_dtype(DType::F32)?)?;
        let routes = self.route(&logits.to_vec2::<f32>()?);
        let outputs = self
            .experts
            .iter()
            .zip(&routes.rows)
            .filter(|(_, rows)| !rows.is_empty())
            .map(|(expert, rows)| {
                let rows = Tensor::new(rows.as_slice(), x.device())?;
                expert.forward(&x.index_select(&rows, 0)?)
            })
            .collect::<Result<Vec<_>>>()?;
        let outputs = Tensor::cat(&outputs, 0)?.to_dtype(DType::F32)?;
        let places = Tensor::new(routes.places, x.device())?;
        let weights = Tensor::from_vec(routes.weights, (rows, self.used, 1), x.device())?;
        let mut y = outputs
            .index_select(&places, 0)?
            .reshape((rows, self.used, hidden))?
            .broadcast_mul(&weights)?
            .sum(1)?;
        if let Some(shared) = &self.shared {
            let open = candle_nn::ops::sigmoid(&shared.gate.forward(&x.to_dtype(DType::F32)?)?)?;
            let shared = shared.network.forward(x)?.to_dtype(DType::F32)?;
            y = (y + shared.broadcast_mul(&open)?)?;
        }
        Ok(y.to_dtype(x.dtype())?)
    }

    fn route(&self, logits: &[Vec<f32>]) -> Routes {
        let mut rows = vec![Vec::new(); self.experts.len()];
        let mut choices = Vec::with_capacity(logits.len() * self.used);
        for (row, logits) in logits.iter().enumerate() {
            for (expert, weight) in self.choose(logits) {
                choices.push((expert, rows[expert].len(), weight));
                rows[expert].push(row as u32);
            }
        }
        let firsts: Vec<usize> = rows
            .iter()
            .scan(0, |next, rows| {
                let first = *next;
                *next += rows.len();
                Some(first)
            })
            .collect();
        let (places, weights) = choices
            .into_iter()
            .map(|(expert, at, weight)| ((firsts[expert] + at) as u32, weight))
            .unzip();
        Routes {
            rows,
            places,
            weights,
        }
    }

    /// The experts of a row, ascending, and their weights.
    fn choose(&self, logits: &[f32]) -> Vec<(usize, f32)> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let top = logits[order[0]];
        let sum = |experts: &[usize]| {
            experts
                .iter()
                .map(|&e| (logits[e] - top).exp())
                .sum::<f32>()
        };
        let total = if self.renormalise {
            sum(&order[..self.used])
        } else {
            sum(&order)
        };
        order.truncate(self.used);
        order.sort_unstable();
        order
            .into_iter()
            .map(|expert| (expert, (logits[expert] - top).exp() / total))
            .collect()
    }
}

fn networks(
    loader: &Loader<'_>,
    spec: &Experts,
    gate_up: impl Iterator<Item = (Part, Part)>,
    down: Vec<Part>,
) -> Result<Vec<GatedLayer>> {
    gate_up
        .zip(down)
        .map(|((gate, up), down)| GatedLayer::new(loader, [gate, up], down, spec.activation))
        .collect()
}

/// The matrices `[out, inp]` of all experts from one tensor, with the biases `[count, out]`
/// beside it.
fn stacked(
    loader: &Loader<'_>,
    spec: &Experts,
    name: &str,
    out: usize,
    inp: usize,
) -> Result<Vec<Part>> {
    let bias = loader.optional(&format!("{name}.bias"), &[spec.count, out], spec.bias)?;
    let whole = Part {
        weight: loader.stacked(name, spec.count, out, inp)?,
        bias: bias.map(|bias| bias.flatten_all()).transpose()?,
        out: spec.count * out,
    };
    cut(whole, &vec![out; spec.count], loader.device)
}

/// The matrices `[out, inp]` and biases `[out]` of all experts from a tensor
/// `[count, inp, out]`.
fn transposed(
    loader: &Loader<'_>,
    spec: &Experts,
    name: &str,
    out: usize,
    inp: usize,
) -> Result<Vec<(Tensor, Option<Tensor>)>> {
    let shape = [spec.count, inp, out];
    let weights = loader.weights.tensor(name, &shape, loader.dtype)?;
    let bias = loader.optional(&format!("{name}_bias"), &[spec.count, out], spec.bias)?;
    (0..spec.count)
        .map(|expert| {
            let bias = bias.as_ref().map(|bias| bias.get(expert)).transpose()?;
            Ok((weights.get(expert)?.t()?.contiguous()?, bias))
        })
        .collect()
}

/// Gate and up of all experts, which alternate in the rows of one matrix.
fn interleaved(loader: &Loader<'_>, spec: &Experts, name: &str) -> Result<Vec<(Part, Part)>> {
    let (inner, hidden) = (spec.inner, loader.hidden);
    // Of `[2 * inner, ..]` the even or the odd rows.
    let every_other = |x: &Tensor, which: usize| {
        let width = x.elem_count() / (2 * inner);
        let rows = x.reshape((inner, 2, width))?.narrow(1, which, 1)?;
        rows.squeeze(1)?.contiguous()
    };
    let half = |(weight, bias): &(Tensor, Option<Tensor>), which| {
        Ok::<_, Error>(Part {
            weight: LinearWeight::Dense(every_other(weight, which)?),
            bias: match bias {
                Some(bias) => Some(every_other(bias, which)?.flatten_all()?),
                None => None,
            },
            out: inner,
        })
    };
    transposed(loader, spec, name, 2 * inner, hidden)?
        .iter()
        .map(|both| Ok((half(both, 0)?, half(both, 1)?)))
        .collect()
}

/// The gate of the shared expert, one output. GGUF files hold it as a vector.
fn shared_gate(loader: &Loader<'_>, name: &str) -> Result<Linear> {
    let name = format!("{name}.weight");
    let matrix = [1, loader.hidden];
    let shape = loader.names.experts.shared_gate_shape(&matrix);
    let weight = loader.weights.tensor(&name, shape, DType::F32)?;
    let weight = LinearWeight::Dense(weight.reshape((1, loader.hidden))?);
    Linear::new(weight, None, loader.dtype, loader.device)
}
