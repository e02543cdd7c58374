//! Tiny random checkpoints, in memory.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::models::{LinearWeight, WeightSource};
use candle_paged_attn::{Error, Result};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

/// Tensors by name. Implements what the loaders implement.
#[derive(Clone, Default)]
pub struct Memory(pub HashMap<String, LinearWeight>);

impl Memory {
    pub fn dense(&self, name: &str) -> Tensor {
        match &self.0[name] {
            LinearWeight::Dense(tensor) => tensor.clone(),
            LinearWeight::Quantized(tensor) => tensor.dequantize(&Device::Cpu).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.0.insert(name.into(), LinearWeight::Dense(tensor));
    }

    /// Every tensor, dequantised.
    pub fn tensors(&self) -> HashMap<String, Tensor> {
        let names = self.0.keys();
        names.map(|name| (name.clone(), self.dense(name))).collect()
    }

    /// Stores the matrices whose name holds `part` in a GGML type.
    pub fn quantize(&mut self, part: &str, dtype: GgmlDType) {
        for (name, weight) in &mut self.0 {
            if let LinearWeight::Dense(tensor) = weight
                && tensor.rank() == 2
                && name.contains(part)
            {
                let quantized = QTensor::quantize(tensor, dtype).unwrap();
                *weight = LinearWeight::Quantized(Arc::new(quantized));
            }
        }
    }
}

impl WeightSource for Memory {
    fn place(&self) -> String {
        "memory".into()
    }

    fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn tensor(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        if !self.contains(name) {
            return Err(Error::Missing {
                place: self.place(),
                what: name.into(),
            });
        }
        let tensor = self.dense(name);
        assert_eq!(tensor.dims(), shape, "{name}");
        Ok(tensor.to_dtype(dtype)?)
    }

    fn linear(&self, name: &str, _: usize, _: usize) -> Result<LinearWeight> {
        self.0.get(name).cloned().ok_or_else(|| Error::Missing {
            place: self.place(),
            what: name.into(),
        })
    }
}

/// The sizes of a tiny model.
#[derive(Clone)]
pub struct Tiny {
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub inner: usize,
    pub vocab: usize,
    pub layers: usize,
    pub context: usize,
    pub tied: bool,
    pub bias: bool,
    /// More fields of `config.json`.
    pub extra: Value,
}

impl Tiny {
    /// `ratio` query heads for each of 2 KV heads.
    pub fn new(ratio: usize) -> Self {
        let heads = 2 * ratio;
        Self {
            hidden: 16 * heads,
            heads,
            kv_heads: 2,
            head_dim: 16,
            inner: 72,
            vocab: 97,
            layers: 2,
            context: 256,
            tied: false,
            bias: false,
            extra: json!({}),
        }
    }

    pub fn config(&self) -> Value {
        let mut config = json!({
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.bias,
            "mlp_bias": self.bias,
        });
        if self.head_dim * self.heads != self.hidden {
            config["head_dim"] = self.head_dim.into();
        }
        for (field, value) in self.extra.as_object().unwrap() {
            config[field] = value.clone();
        }
        config
    }

    /// Random weights under Hugging Face's names. q and k are large enough for the attention
    /// of most rows to prefer few tokens, so that a wrong position changes the logits.
    pub fn weights(&self, seed: u64) -> Memory {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut memory = Memory::default();
        let mut add = |name: &str, shape: &[usize], centre: f32, size: f32| {
            let count = shape.iter().product::<usize>();
            let values: Vec<f32> = (0..count)
                .map(|_| centre + size * rng.random_range(-1.0..1.0f32))
                .collect();
            memory.insert(name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
        };
        let by_inputs = |inputs: usize| (3.0 / inputs as f32).sqrt();
        add(
            "model.embed_tokens.weight",
            &[self.vocab, self.hidden],
            0.0,
            1.0,
        );
        add("model.norm.weight", &[self.hidden], 1.0, 0.3);
        if !self.tied {
            let size = by_inputs(self.hidden);
            add("lm_head.weight", &[self.vocab, self.hidden], 0.0, size);
        }
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for layer in 0..self.layers {
            for name in ["input_layernorm", "post_attention_layernorm"] {
                let name = format!("model.layers.{layer}.{name}.weight");
                add(&name, &[self.hidden], 1.0, 0.3);
            }
            for (name, out, inp, gain) in [
                ("self_attn.q_proj", q, self.hidden, 2.0),
                ("self_attn.k_proj", kv, self.hidden, 2.0),
                ("self_attn.v_proj", kv, self.hidden, 1.0),
                ("self_attn.o_proj", self.hidden, q, 1.0),
                ("mlp.gate_proj", self.inner, self.hidden, 1.0),
                ("mlp.up_proj", self.inner, self.hidden, 1.0),
                ("mlp.down_proj", self.hidden, self.inner, 1.0),
            ] {
                let name = format!("model.layers.{layer}.{name}");
                add(
                    &format!("{name}.weight"),
                    &[out, inp],
                    0.0,
                    gain * by_inputs(inp),
                );
                if self.bias {
                    add(&format!("{name}.bias"), &[out], 0.0, 0.5);
                }
            }
        }
        memory
    }
}

/// `count` token ids below `vocab`.
pub fn tokens(seed: u64, count: usize, vocab: usize) -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count)
        .map(|_| rng.random_range(0..vocab as u32))
        .collect()
}

/// Largest over all rows of `norm(got - want) / norm(want)`.
pub fn distance(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    assert_eq!(got.len(), want.len(), "rows");
    let mut worst = 0f64;
    for (got, want) in got.iter().zip(want) {
        assert_eq!(got.len(), want.len(), "columns");
        let mut error = 0f64;
        let mut size = 0f64;
        for (&got, &want) in got.iter().zip(want) {
            error += f64::from(got - want).powi(2);
            size += f64::from(want).powi(2);
        }
        let relative = (error / size).sqrt();
        assert!(relative.is_finite(), "not a number among the logits");
        worst = worst.max(relative);
    }
    worst
}

/// What llama.cpp calls a tensor of a llama checkpoint.
pub fn ggml_name(hf: &str) -> String {
    [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ]
    .iter()
    .fold(hf.to_string(), |name, (hf, ggml)| name.replace(hf, ggml))
}
