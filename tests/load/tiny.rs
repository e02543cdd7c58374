//! Tiny checkpoints with known content.

use std::{
    collections::HashMap,
    io::Cursor,
    path::{Path, PathBuf},
};

use candle_core::{
    Device, Tensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Value},
    },
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

pub const HIDDEN: usize = 32;
pub const INNER: usize = 64;
pub const HEADS: usize = 2;
pub const CONTEXT: u32 = 64;
pub const CHAT: &str = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}";

pub fn strings(items: &[&str]) -> Value {
    Value::Array(items.iter().map(|s| Value::String(s.to_string())).collect())
}

/// The 256 byte letters of byte-level BPE, then `he`, `ll`, `hell`, `hello`, then specials.
pub fn vocabulary() -> Vec<String> {
    let mut letters: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    letters.sort_unstable();
    let mut tokens: Vec<String> = letters.into_iter().map(String::from).collect();
    tokens.extend(["he", "ll", "hell", "hello"].map(String::from));
    tokens.extend(["<|bos|>", "<|im_start|>", "<|im_end|>", "<|note|>"].map(String::from));
    tokens
}

pub fn id(token: &str) -> u32 {
    vocabulary().iter().position(|t| t == token).unwrap() as u32
}

/// Tokenizer metadata with the splitting rule `pre`.
pub fn tokenizer_metadata(pre: &str) -> HashMap<String, Value> {
    let tokens = vocabulary();
    let kinds = tokens
        .iter()
        .map(|t| match t.as_str() {
            "<|bos|>" | "<|im_start|>" | "<|im_end|>" => Value::I32(3),
            "<|note|>" => Value::I32(4),
            _ => Value::I32(1),
        })
        .collect();
    let text: Vec<&str> = tokens.iter().map(String::as_str).collect();
    HashMap::from([
        ("tokenizer.ggml.model".into(), Value::String("gpt2".into())),
        ("tokenizer.ggml.pre".into(), Value::String(pre.into())),
        ("tokenizer.ggml.tokens".into(), strings(&text)),
        ("tokenizer.ggml.token_type".into(), Value::Array(kinds)),
        (
            "tokenizer.ggml.merges".into(),
            strings(&["h e", "l l", "he ll", "hell o"]),
        ),
        (
            "tokenizer.ggml.bos_token_id".into(),
            Value::U32(id("<|bos|>")),
        ),
        (
            "tokenizer.ggml.eos_token_id".into(),
            Value::U32(id("<|bos|>")),
        ),
    ])
}

/// Metadata of a Llama of one layer.
pub fn llama_metadata() -> HashMap<String, Value> {
    let mut metadata = tokenizer_metadata("smollm");
    let number = |n: usize| Value::U32(n as u32);
    metadata.extend([
        ("general.architecture".into(), Value::String("llama".into())),
        ("llama.block_count".into(), number(1)),
        ("llama.context_length".into(), Value::U32(CONTEXT)),
        ("llama.embedding_length".into(), number(HIDDEN)),
        ("llama.feed_forward_length".into(), number(INNER)),
        ("llama.attention.head_count".into(), number(HEADS)),
        ("llama.attention.head_count_kv".into(), number(1)),
        ("llama.rope.freq_base".into(), Value::F32(10_000.0)),
        (
            "llama.attention.layer_norm_rms_epsilon".into(),
            Value::F32(1e-5),
        ),
        ("tokenizer.chat_template".into(), Value::String(CHAT.into())),
    ]);
    metadata
}

/// GGUF names and shapes of that Llama, tied head.
pub fn llama_shapes() -> Vec<(&'static str, Vec<usize>)> {
    let kv = HIDDEN / HEADS;
    vec![
        ("token_embd.weight", vec![vocabulary().len(), HIDDEN]),
        ("output_norm.weight", vec![HIDDEN]),
        ("blk.0.attn_norm.weight", vec![HIDDEN]),
        ("blk.0.ffn_norm.weight", vec![HIDDEN]),
        ("blk.0.attn_q.weight", vec![HIDDEN, HIDDEN]),
        ("blk.0.attn_k.weight", vec![kv, HIDDEN]),
        ("blk.0.attn_v.weight", vec![kv, HIDDEN]),
        ("blk.0.attn_output.weight", vec![HIDDEN, HIDDEN]),
        ("blk.0.ffn_gate.weight", vec![INNER, HIDDEN]),
        ("blk.0.ffn_up.weight", vec![INNER, HIDDEN]),
        ("blk.0.ffn_down.weight", vec![HIDDEN, INNER]),
    ]
}

pub fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let data: Vec<f32> = (0..shape.iter().product())
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

/// Tensors of that Llama: matrices in Q8_0, vectors in f32.
pub fn llama_tensors() -> Vec<(&'static str, QTensor)> {
    let quantize = |(seed, (name, shape)): (usize, (&'static str, Vec<usize>))| {
        let dtype = match shape.len() {
            1 => GgmlDType::F32,
            _ => GgmlDType::Q8_0,
        };
        let tensor = random(&shape, seed as u64);
        (name, QTensor::quantize(&tensor, dtype).unwrap())
    };
    llama_shapes()
        .into_iter()
        .enumerate()
        .map(quantize)
        .collect()
}

pub fn gguf_bytes(metadata: &HashMap<String, Value>, tensors: &[(&str, QTensor)]) -> Vec<u8> {
    // Sorted, so that the same input gives the same bytes.
    let mut metadata: Vec<_> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    metadata.sort_by_key(|(key, _)| *key);
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (*name, t)).collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
    bytes.into_inner()
}

pub fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path
}
