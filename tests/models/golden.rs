//! The tiny models of `scripts/family_goldens.py`: configuration, weights, and transformers'
//! logits.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_paged_attn::load::safetensors::SafetensorsWeights;
use candle_paged_attn::models::{Decoder, ModelSpec, spec_from_hf};
use serde::Deserialize;
use serde_json::Value;

use crate::checkpoint::Memory;

/// A stored case.
#[derive(Deserialize)]
pub struct Golden {
    pub config: Value,
    /// The dtype of the checkpoint.
    stored: String,
    /// Name, shape, centre and size.
    tensors: Vec<(String, Vec<usize>, f32, f32)>,
    pub prompt: Vec<u32>,
    /// The rows of the prompt whose logits are stored.
    pub rows: Vec<usize>,
    pub logits: Vec<Vec<f32>>,
}

/// Every stored case.
pub const NAMES: &[&str] = &[
    "gemma",
    "gemma2",
    "gemma3",
    "glm4",
    "gpt_oss",
    "gpt_oss_limit_7",
    "granite",
    "helium",
    "llama",
    "llama_bf16",
    "llama_bias_head_dim",
    "llama_dynamic",
    "llama_linear",
    "llama_proportional",
    "llama_yarn",
    "mistral_window",
    "mixtral",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "phi3_longrope_long",
    "phi3_longrope_short",
    "phi_qk_layernorm",
    "qwen2",
    "qwen2_moe",
    "qwen2_moe_all_sparse",
    "qwen2_no_window",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_all_sparse",
    "smollm3",
    "smollm3_every_fourth",
    "stablelm",
    "stablelm_parallel",
    "starcoder2",
    "starcoder2_no_window",
];

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/families")
}

impl Golden {
    pub fn read(name: &str) -> Self {
        let path = folder().join(format!("{name}.json"));
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    /// The weights, as `values` of the script makes them.
    pub fn weights(&self) -> Memory {
        let stored = match self.stored.as_str() {
            "float32" => DType::F32,
            "bfloat16" => DType::BF16,
            other => panic!("{other}"),
        };
        let mut memory = Memory::default();
        for (name, shape, centre, size) in &self.tensors {
            let count = shape.iter().product();
            let values = values(name, count, *centre, *size);
            let tensor = Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap();
            memory.insert(name.as_str(), tensor.to_dtype(stored).unwrap());
        }
        memory
    }

    /// Writes the checkpoint as transformers has it: `config.json` and `model.safetensors`.
    pub fn write(&self, folder: &Path) {
        let tensors = self.weights().tensors();
        candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
        std::fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
    }

    pub fn spec(&self) -> ModelSpec {
        spec_from_hf(&self.config, "config.json").unwrap()
    }

    /// The model of `spec`, from files.
    pub fn load(&self, spec: ModelSpec, dtype: DType) -> Decoder {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path());
        let weights = SafetensorsWeights::open(folder.path(), dtype, &Device::Cpu).unwrap();
        Decoder::load(spec, &weights, dtype, &Device::Cpu).unwrap()
    }

    /// The stored rows of the logits of a whole prompt.
    pub fn pick(&self, logits: &[Vec<f32>]) -> Vec<Vec<f32>> {
        self.rows.iter().map(|&row| logits[row].clone()).collect()
    }
}

/// `centre + size * u` with u in [-1, 1), by splitmix64 seeded by FNV-1a of the name.
fn values(name: &str, count: usize, centre: f32, size: f32) -> Vec<f32> {
    let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325, |h: u64, byte| {
        (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    (1..=count as u64)
        .map(|i| {
            let mut z = seed.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^= z >> 31;
            let u = (z >> 40) as f32 / (1 << 23) as f32 - 1.0;
            centre + size * u
        })
        .collect()
}
