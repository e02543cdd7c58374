//! The small random llama of `data/beams`, made by `scripts/beam_goldens.py`.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device};
use candle_paged_attn::load::safetensors::SafetensorsWeights;
use candle_paged_attn::models::{Decoder, spec_from_hf};

pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/beams")
}

pub fn load() -> Arc<Decoder> {
    let config = std::fs::read_to_string(folder().join("config.json")).unwrap();
    let config = serde_json::from_str(&config).unwrap();
    let spec = spec_from_hf(&config, "config.json").unwrap();
    let weights = SafetensorsWeights::open(folder(), DType::F32, &Device::Cpu).unwrap();
    Arc::new(Decoder::load(spec, &weights, DType::F32, &Device::Cpu).unwrap())
}
