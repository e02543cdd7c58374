//! The Llama forward pass once more: f64, plain loops, one sequence, no cache, written from the
//! papers and transformers' `modeling_llama.py`.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use crate::checkpoint::{Memory, Tiny};

type Matrix = Vec<Vec<f64>>;

pub struct Reference<'a> {
    pub tiny: &'a Tiny,
    pub weights: &'a HashMap<String, Tensor>,
    /// Radians per position of each turned pair.
    pub frequencies: Vec<f64>,
    /// Pairs `(i, i + n)` of `2n` turned elements, or `(2i, 2i + 1)`.
    pub halves: bool,
}

/// `base^(-2i / dim)`.
pub fn frequencies(dim: usize, base: f64) -> Vec<f64> {
    (0..dim / 2)
        .map(|i| base.powf(-((2 * i) as f64) / dim as f64))
        .collect()
}

impl<'a> Reference<'a> {
    /// Halves turned with base 10,000 and no scaling.
    pub fn new(tiny: &'a Tiny, weights: &'a HashMap<String, Tensor>) -> Self {
        Self {
            tiny,
            weights,
            frequencies: frequencies(tiny.head_dim, 10_000.0),
            halves: true,
        }
    }

    fn matrix(&self, name: &str) -> Matrix {
        let tensor = self.weights[name].to_dtype(DType::F64).unwrap();
        tensor.to_vec2().unwrap()
    }

    fn vector(&self, name: &str) -> Option<Vec<f64>> {
        let tensor = self.weights.get(name)?.to_dtype(DType::F64).unwrap();
        Some(tensor.to_vec1().unwrap())
    }

    fn linear(&self, name: &str, x: &Matrix) -> Matrix {
        let weight = self.matrix(&format!("{name}.weight"));
        let bias = self.vector(&format!("{name}.bias"));
        let bias = bias.unwrap_or_else(|| vec![0.0; weight.len()]);
        x.iter()
            .map(|x| {
                let rows = weight.iter().zip(&bias);
                rows.map(|(weight, bias)| dot(weight, x) + bias).collect()
            })
            .collect()
    }

    fn norm(&self, name: &str, x: &Matrix) -> Matrix {
        let weight = self.vector(&format!("{name}.weight")).unwrap();
        x.iter()
            .map(|x| {
                let root = (dot(x, x) / x.len() as f64 + 1e-5).sqrt();
                x.iter().zip(&weight).map(|(x, w)| x / root * w).collect()
            })
            .collect()
    }

    fn turn(&self, x: &mut Matrix) {
        let n = self.frequencies.len();
        for (position, row) in x.iter_mut().enumerate() {
            for head in row.chunks_exact_mut(self.tiny.head_dim) {
                for (i, frequency) in self.frequencies.iter().enumerate() {
                    let (sin, cos) = (position as f64 * frequency).sin_cos();
                    let (a, b) = if self.halves {
                        (i, i + n)
                    } else {
                        (2 * i, 2 * i + 1)
                    };
                    let (x, y) = (head[a], head[b]);
                    (head[a], head[b]) = (x * cos - y * sin, x * sin + y * cos);
                }
            }
        }
    }

    fn attention(&self, layer: &str, x: &Matrix) -> Matrix {
        let mut q = self.linear(&format!("{layer}.self_attn.q_proj"), x);
        let mut k = self.linear(&format!("{layer}.self_attn.k_proj"), x);
        let v = self.linear(&format!("{layer}.self_attn.v_proj"), x);
        self.turn(&mut q);
        self.turn(&mut k);
        let dim = self.tiny.head_dim;
        let mut out = vec![vec![0.0; self.tiny.heads * dim]; x.len()];
        for (row, out) in out.iter_mut().enumerate() {
            for head in 0..self.tiny.heads {
                let kv = head / (self.tiny.heads / self.tiny.kv_heads) * dim;
                let q = &q[row][head * dim..][..dim];
                let scores: Vec<f64> = k[..=row]
                    .iter()
                    .map(|k| dot(q, &k[kv..kv + dim]) / (dim as f64).sqrt())
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                for (score, v) in scores.iter().zip(&v) {
                    let weight = (score - top).exp() / sum;
                    for (out, v) in out[head * dim..].iter_mut().zip(&v[kv..kv + dim]) {
                        *out += weight * v;
                    }
                }
            }
        }
        self.linear(&format!("{layer}.self_attn.o_proj"), &out)
    }

    fn feed_forward(&self, layer: &str, x: &Matrix) -> Matrix {
        let mut gate = self.linear(&format!("{layer}.mlp.gate_proj"), x);
        let up = self.linear(&format!("{layer}.mlp.up_proj"), x);
        for (gate, up) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
            *gate = *gate / (1.0 + (-*gate).exp()) * up;
        }
        self.linear(&format!("{layer}.mlp.down_proj"), &gate)
    }

    /// Logits of every row.
    pub fn logits(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let embedding = self.matrix("model.embed_tokens.weight");
        let mut x: Matrix = tokens
            .iter()
            .map(|&token| embedding[token as usize].clone())
            .collect();
        for layer in 0..self.tiny.layers {
            let layer = format!("model.layers.{layer}");
            let normed = self.norm(&format!("{layer}.input_layernorm"), &x);
            add(&mut x, &self.attention(&layer, &normed));
            let normed = self.norm(&format!("{layer}.post_attention_layernorm"), &x);
            add(&mut x, &self.feed_forward(&layer, &normed));
        }
        let x = self.norm("model.norm", &x);
        let head = if self.tiny.tied {
            "model.embed_tokens"
        } else {
            "lm_head"
        };
        let logits = self.linear(head, &x);
        logits
            .into_iter()
            .map(|row| row.into_iter().map(|x| x as f32).collect())
            .collect()
    }
}

/// Logits of every row of a model with plain rope.
pub fn logits(tiny: &Tiny, weights: &Memory, tokens: &[u32]) -> Vec<Vec<f32>> {
    Reference::new(tiny, &weights.tensors()).logits(tokens)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Matrix, y: &Matrix) {
    for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
        *x += y;
    }
}
