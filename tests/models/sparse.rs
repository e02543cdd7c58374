//! Checkpoints of the size of Llama 2 7B whose files are holes behind a sound header: 13 GB
//! to whoever reads the weights, nothing to the disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::checkpoint::ggml_name;

pub const LAYERS: usize = 32;
pub const HIDDEN: usize = 4096;
const INNER: usize = 11_008;
pub const VOCAB: usize = 32_000;
const SHARDS: usize = 3;

/// A tensor as a header lists it: type and shape.
pub type Stored = (String, Vec<usize>);

/// `config.json`, and the tensors under Hugging Face's names.
#[derive(Clone)]
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, Stored>,
}

impl Checkpoint {
    pub fn llama() -> Self {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": VOCAB,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false,
        });
        let mut checkpoint = Self {
            config,
            tensors: BTreeMap::new(),
        };
        checkpoint.add("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
        checkpoint.add("lm_head.weight", &[VOCAB, HIDDEN]);
        checkpoint.add("model.norm.weight", &[HIDDEN]);
        for layer in 0..LAYERS {
            for (name, shape) in [
                ("input_layernorm", vec![HIDDEN]),
                ("post_attention_layernorm", vec![HIDDEN]),
                ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
                ("self_attn.k_proj", vec![HIDDEN, HIDDEN]),
                ("self_attn.v_proj", vec![HIDDEN, HIDDEN]),
                ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
                ("mlp.gate_proj", vec![INNER, HIDDEN]),
                ("mlp.up_proj", vec![INNER, HIDDEN]),
                ("mlp.down_proj", vec![HIDDEN, INNER]),
            ] {
                checkpoint.add(&format!("model.layers.{layer}.{name}.weight"), &shape);
            }
        }
        checkpoint
    }

    pub fn add(&mut self, name: &str, shape: &[usize]) {
        self.tensors
            .insert(name.to_string(), ("BF16".to_string(), shape.to_vec()));
    }

    pub fn rename(&mut self, change: impl Fn(&str) -> String) {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(k, v)| (change(&k), v)).collect();
    }

    pub fn write_single(&self, folder: &Path) {
        self.write_config(folder);
        let all: Vec<_> = self.tensors.iter().collect();
        write_safetensors(&folder.join("model.safetensors"), &all);
    }

    /// Writes the shards of [`shard_of`] and their index.
    pub fn write_sharded(&self, folder: &Path) {
        self.write_config(folder);
        let index: Map<String, Value> = self
            .tensors
            .keys()
            .map(|name| (name.clone(), shard_of(name).into()))
            .collect();
        for number in 1..=SHARDS {
            let file = shard_file(number);
            let all = self.tensors.iter();
            let part: Vec<_> = all.filter(|(name, _)| shard_of(name) == file).collect();
            write_safetensors(&folder.join(file), &part);
        }
        let index = json!({ "metadata": {}, "weight_map": index });
        write(folder, "model.safetensors.index.json", index.to_string());
    }

    fn write_config(&self, folder: &Path) {
        write(folder, "config.json", self.config.to_string());
        // Broken as well, and read later.
        write(folder, "tokenizer.json", "{}");
    }
}

fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) {
    std::fs::write(folder.join(name), content).unwrap();
}

fn shard_file(number: usize) -> String {
    format!("model-{number:05}-of-{SHARDS:05}.safetensors")
}

/// The shard of a tensor: the layers one after the other, what belongs to none in the last.
pub fn shard_of(name: &str) -> String {
    let layer = name.split('.').nth(2).and_then(|part| part.parse().ok());
    let number = layer.map_or(SHARDS - 1, |layer: usize| layer * SHARDS / (LAYERS + 1));
    shard_file(number + 1)
}

fn write_safetensors(path: &Path, tensors: &[(&String, &Stored)]) {
    let mut header = Map::new();
    let mut end = 0;
    for (name, (dtype, shape)) in tensors {
        let width = if dtype.ends_with("16") { 2 } else { 1 };
        let start = end;
        end += width * shape.iter().product::<usize>();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        header.insert((*name).clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

/// The same model as a GGUF file: fields of `llama.`, and tensors with ggml's type numbers.
#[derive(Clone)]
pub struct Gguf {
    pub arch: &'static str,
    pub counts: BTreeMap<&'static str, u32>,
    pub tokens: usize,
    pub tensors: BTreeMap<String, (u32, Vec<usize>)>,
}

pub const F16: u32 = 1;

impl Gguf {
    pub fn llama() -> Self {
        let mut tensors = BTreeMap::new();
        for (name, (_, shape)) in Checkpoint::llama().tensors {
            tensors.insert(ggml_name(&name), (F16, shape));
        }
        let counts = [
            ("embedding_length", HIDDEN),
            ("feed_forward_length", INNER),
            ("block_count", LAYERS),
            ("context_length", 4096),
            ("attention.head_count", 32),
            ("attention.head_count_kv", 32),
        ];
        Self {
            arch: "llama",
            counts: counts.map(|(name, n)| (name, n as u32)).into(),
            tokens: VOCAB,
            tensors,
        }
    }

    /// Writes the file as ggml's `docs/gguf.md` says.
    pub fn write(&self, path: &Path) {
        const U32: u32 = 4;
        const F32: u32 = 6;
        const STRING: u32 = 8;
        const ARRAY: u32 = 9;
        let mut out = Bytes(b"GGUF".to_vec());
        out.u32(3).u64(self.tensors.len() as u64);
        out.u64(self.counts.len() as u64 + 3);
        out.text("general.architecture").u32(STRING).text(self.arch);
        let eps = format!("{}.attention.layer_norm_rms_epsilon", self.arch);
        out.text(&eps).u32(F32).u32(1e-5f32.to_bits());
        out.text("tokenizer.ggml.tokens").u32(ARRAY).u32(STRING);
        out.u64(self.tokens as u64);
        for _ in 0..self.tokens {
            out.text("x");
        }
        for (name, &count) in &self.counts {
            let name = match name.strip_prefix('/') {
                Some(whole) => whole.to_string(),
                None => format!("{}.{name}", self.arch),
            };
            out.text(&name).u32(U32).u32(count);
        }
        let mut end = 0u64;
        for (name, (kind, shape)) in &self.tensors {
            out.text(name).u32(shape.len() as u32);
            for &dim in shape.iter().rev() {
                out.u64(dim as u64);
            }
            out.u32(*kind).u64(end);
            let bytes = 2 * shape.iter().product::<usize>() as u64;
            end += bytes.next_multiple_of(32);
        }
        let start = (out.0.len() as u64).next_multiple_of(32);
        let mut file = File::create(path).unwrap();
        file.write_all(&out.0).unwrap();
        file.set_len(start + end).unwrap();
    }
}

struct Bytes(Vec<u8>);

impl Bytes {
    fn u32(&mut self, n: u32) -> &mut Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn u64(&mut self, n: u64) -> &mut Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }
}
