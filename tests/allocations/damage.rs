//! Files that are damaged or lie: an answer, never a panic, and no memory on the word of a
//! number in them.

use std::path::Path;
use std::sync::atomic::Ordering;

use candle_core::quantized::gguf_file::{self, Value as Gguf};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::load::gguf::{GgufFile, GgufWeights};
use candle_paged_attn::load::safetensors::SafetensorsWeights;
use candle_paged_attn::models::{Decoder, WeightSource, spec_from_gguf, spec_from_hf};
use candle_paged_attn::{Error, Result};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::golden::Golden;
use crate::{ALONE, LARGEST};

/// The largest allocation while `load` runs.
fn largest(load: impl FnOnce() -> Result<()>) -> (usize, Result<()>) {
    LARGEST.store(0, Ordering::Relaxed);
    let result = load();
    (LARGEST.load(Ordering::Relaxed), result)
}

/// The model of a folder with `config.json` and safetensors.
fn load_folder(folder: &Path) -> Result<()> {
    let text = std::fs::read(folder.join("config.json")).unwrap();
    let Ok(config) = serde_json::from_slice(&text) else {
        return Ok(());
    };
    let spec = spec_from_hf(&config, "config.json")?;
    let weights = SafetensorsWeights::open(folder, DType::F32, &Device::Cpu)?;
    Decoder::load(spec, &weights, DType::F32, &Device::Cpu).map(drop)
}

fn load_gguf(path: &Path) -> Result<()> {
    let file = GgufFile::open(path)?;
    let spec = spec_from_gguf(file.metadata(), "damaged.gguf")?;
    let weights = GgufWeights::new(file, None, &Device::Cpu)?;
    for name in weights.file().tensor_names() {
        let shape = weights.file().tensor_shape(name).unwrap();
        drop(weights.tensor(name, shape, DType::F32)?);
    }
    Decoder::load(spec, &weights, DType::F32, &Device::Cpu).map(drop)
}

/// Cuts a file or overwrites a few bytes of its first `header`.
fn damaged(sound: Vec<u8>, header: usize) -> impl Strategy<Value = Vec<u8>> {
    let writes = prop::collection::vec((0..header, any::<u8>()), 1..4);
    let cut = prop::option::weighted(0.2, 0..sound.len());
    (writes, cut).prop_map(move |(writes, cut)| {
        let mut bytes = sound.clone();
        for (at, byte) in writes {
            bytes[at] = byte;
        }
        bytes.truncate(cut.unwrap_or(bytes.len()));
        bytes
    })
}

/// A value of metadata takes 32 bytes of memory, and one of a byte is the smallest; a vector
/// that grows doubles; f32 is the widest that a weight becomes.
fn bound(file: usize) -> usize {
    (1 << 16) + 64 * file
}

fn gguf_bytes() -> Vec<u8> {
    let count = |n: u32| Gguf::U32(n);
    let tokens = (0..40).map(|n| Gguf::String(format!("t{n}"))).collect();
    let fields = [
        ("general.architecture", Gguf::String("llama".into())),
        ("llama.block_count", count(1)),
        ("llama.context_length", count(64)),
        ("llama.embedding_length", count(32)),
        ("llama.feed_forward_length", count(64)),
        ("llama.attention.head_count", count(2)),
        ("llama.attention.head_count_kv", count(1)),
        ("llama.attention.layer_norm_rms_epsilon", Gguf::F32(1e-5)),
        ("tokenizer.ggml.tokens", Gguf::Array(tokens)),
    ];
    let tensors: Vec<(&str, QTensor)> = [
        ("token_embd.weight", vec![40, 32]),
        ("output_norm.weight", vec![32]),
        ("blk.0.attn_norm.weight", vec![32]),
        ("blk.0.ffn_norm.weight", vec![32]),
        ("blk.0.attn_q.weight", vec![32, 32]),
        ("blk.0.attn_k.weight", vec![16, 32]),
        ("blk.0.attn_v.weight", vec![16, 32]),
        ("blk.0.attn_output.weight", vec![32, 32]),
        ("blk.0.ffn_gate.weight", vec![64, 32]),
        ("blk.0.ffn_up.weight", vec![64, 32]),
        ("blk.0.ffn_down.weight", vec![32, 64]),
    ]
    .into_iter()
    .map(|(name, shape)| {
        let tensor = Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        (name, QTensor::quantize(&tensor, GgmlDType::Q8_0).unwrap())
    })
    .collect();
    let fields: Vec<(&str, &Gguf)> = fields.iter().map(|(k, v)| (*k, v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, t)| (*k, t)).collect();
    let mut bytes = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &fields, &tensors).unwrap();
    bytes.into_inner()
}

#[test]
fn damaged_gguf_files_allocate_no_more_than_they_hold() {
    let _alone = ALONE.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.gguf");
    let sound = gguf_bytes();
    std::fs::write(&path, &sound).unwrap();
    load_gguf(&path).unwrap();
    proptest!(ProptestConfig::with_cases(1500), |(bytes in damaged(sound, 1900))| {
        std::fs::write(&path, &bytes).unwrap();
        let (largest, _either) = largest(|| load_gguf(&path));
        prop_assert!(largest <= bound(bytes.len()), "{largest} of {}", bytes.len());
    });
}

#[test]
fn damaged_safetensors_allocate_no_more_than_they_hold() {
    let _alone = ALONE.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    Golden::read("llama").write(folder.path());
    load_folder(folder.path()).unwrap();
    let sound = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(sound[..8].try_into().unwrap()) as usize;
    proptest!(ProptestConfig::with_cases(500), |(bytes in damaged(sound, header))| {
        std::fs::write(&path, &bytes).unwrap();
        let (largest, _either) = largest(|| load_folder(folder.path()));
        prop_assert!(largest <= bound(bytes.len()), "{largest} of {}", bytes.len());
    });
}

/// Every field of a configuration with values that no checkpoint means.
#[test]
fn configurations_that_lie_allocate_little() {
    let _alone = ALONE.lock().unwrap();
    let mut lies = vec![json!(null), json!(true), json!(""), json!([]), json!({})];
    lies.extend([0, 1, 1 << 31, (1 << 31) + 1, u64::MAX].map(|n| json!(n)));
    lies.extend([-1.0, 1e-300, 1e300].map(|x| json!(x)));
    for name in [
        "llama",
        "gemma3",
        "gpt_oss",
        "qwen2_moe",
        "phi3_longrope_long",
        "smollm3",
    ] {
        let golden = Golden::read(name);
        let folder = tempfile::tempdir().unwrap();
        golden.write(folder.path());
        for field in golden.config.as_object().unwrap().keys() {
            for lie in &lies {
                let mut config: Value = golden.config.clone();
                config[field] = lie.clone();
                let path = folder.path().join("config.json");
                std::fs::write(path, config.to_string()).unwrap();
                let (largest, result) = largest(|| load_folder(folder.path()));
                assert!(largest <= 1 << 20, "{name}: {field} = {lie}: {largest}");
                let defect = matches!(result, Err(Error::Candle(_) | Error::Invariant { .. }));
                assert!(!defect, "{name}: {field} = {lie}: {result:?}");
            }
        }
    }
}
