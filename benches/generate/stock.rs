//! Stock candle's side: candle-transformers' own models, as they are.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::quantized::gguf_file;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use candle_transformers::models::quantized_llama::ModelWeights;

/// Chunk of untimed prompts, on both sides: stock's scores of a whole long one take gigabytes.
pub const CHUNK: usize = 512;

/// A model with the cache of one sequence; weights and cache tensors are shared by clones, and
/// growing a cache makes new tensors, so a clone is a cheap copy of the state.
#[derive(Clone)]
pub enum Stock {
    F32 { model: Llama, cache: Cache },
    Quantized(ModelWeights),
}

/// A prompt whose K/V are cached, and the token that follows it.
pub struct Sequence {
    state: Stock,
    len: usize,
    next: u32,
}

/// What a timed decode took and gave.
pub struct Decoded {
    pub time: Duration,
    pub tokens: Vec<u32>,
}

impl Stock {
    pub fn from_hf_folder(folder: &Path) -> Result<Self> {
        let config = std::fs::read(folder.join("config.json"))?;
        let config = serde_json::from_slice::<LlamaConfig>(&config)?.into_config(false);
        let weights =
            candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
        let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        Ok(Self::F32 {
            model: Llama::load(weights, &config)?,
            cache: Cache::new(true, DType::F32, &config, &Device::Cpu)?,
        })
    }

    pub fn from_gguf(path: &Path) -> Result<Self> {
        let mut file = std::fs::File::open(path)?;
        let content = gguf_file::Content::read(&mut file)?;
        let model = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
        Ok(Self::Quantized(model))
    }

    /// Logits of the last token, `[1, vocab]`.
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor> {
        let tokens = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        Ok(match self {
            Self::F32 { model, cache } => model.forward(&tokens, position, cache)?,
            Self::Quantized(model) => model.forward(&tokens, position)?,
        })
    }

    /// Computes a prompt, untimed.
    pub fn start(&self, prompt: &[u32]) -> Result<Sequence> {
        let mut state = self.clone();
        let mut next = 0;
        for (i, chunk) in prompt.chunks(CHUNK).enumerate() {
            next = argmax(&state.forward(chunk, i * CHUNK)?)?;
        }
        Ok(Sequence {
            state,
            len: prompt.len(),
            next,
        })
    }

    /// From an unknown prompt to its next token.
    pub fn prefill(&self, prompt: &[u32]) -> Result<Duration> {
        let mut state = self.clone();
        let start = Instant::now();
        argmax(&state.forward(prompt, 0)?)?;
        Ok(start.elapsed())
    }
}

impl Sequence {
    /// Greedy tokens, on a copy of the state.
    pub fn decode(&self, steps: usize) -> Result<Decoded> {
        let mut state = self.state.clone();
        let mut next = self.next;
        let mut tokens = Vec::with_capacity(steps);
        let start = Instant::now();
        for position in self.len..self.len + steps {
            next = argmax(&state.forward(&[next], position)?)?;
            tokens.push(next);
        }
        Ok(Decoded {
            time: start.elapsed(),
            tokens,
        })
    }
}

fn argmax(logits: &Tensor) -> Result<u32> {
    Ok(logits.argmax(1)?.to_vec1()?[0])
}
