//! What the examples share: the options of a model, and the way from them to a cache or an
//! engine.
#![allow(dead_code)] // Each user takes only a part.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use bytesize::ByteSize;
use candle_core::{DType, Device};
use candle_paged_attn::cache::{CacheConfig, PagedKvCache};
use candle_paged_attn::engine::{Engine, EngineConfig};
use candle_paged_attn::load::{
    LoadOptions,
    chat::{ChatTemplate, Message},
    from_pretrained,
};
use candle_paged_attn::models::{CausalLm, Decoder};
use tokenizers::Tokenizer;

use crate::support;

#[derive(Debug, clap::Args)]
pub struct ModelArgs {
    /// A GGUF file, a folder with config.json, tokenizer.json and safetensors, or a hub id.
    /// Without it: SmolLM2-135M-Instruct.
    #[arg(long, value_name = "PATH|HUB_ID")]
    pub model: Option<PathBuf>,
    /// Compute dtype. With a GGUF the linears are dequantised to it; without, they stay
    /// quantised.
    #[arg(long, value_enum)]
    pub dtype: Option<FloatType>,
    /// Tokens per KV block: a power of two from 1 to 256.
    #[arg(long, default_value_t = 16)]
    pub block_size: usize,
    /// Memory of the KV cache, such as 512MiB or 2GiB.
    #[arg(long, default_value = "512MiB")]
    pub kv_memory: ByteSize,
    /// Threads, instead of one per core.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum FloatType {
    F32,
    F16,
    Bf16,
}

impl From<FloatType> for DType {
    fn from(float: FloatType) -> Self {
        match float {
            FloatType::F32 => Self::F32,
            FloatType::F16 => Self::F16,
            FloatType::Bf16 => Self::BF16,
        }
    }
}

/// A loaded model.
pub struct Loaded {
    pub model: Arc<Decoder>,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    pub eos: Vec<u32>,
}

impl ModelArgs {
    /// Loads the model. To be called first thing in `main`.
    pub fn load(&self) -> Result<Loaded> {
        if let Some(threads) = self.threads {
            support::set_threads(threads.into());
        }
        let mut options = LoadOptions::default().with_progress(support::bar::loading());
        options.dtype = self.dtype.map(DType::from);
        let path = match &self.model {
            Some(path) => path.clone(),
            None => support::default_model(true)?,
        };
        let pretrained = from_pretrained(&path, &options)?;
        Ok(Loaded {
            model: Arc::new(pretrained.model),
            tokenizer: pretrained.tokenizer,
            template: pretrained.chat_template,
            eos: pretrained.eos_token_ids,
        })
    }

    /// An empty cache for the model.
    pub fn cache(&self, loaded: &Loaded) -> Result<PagedKvCache> {
        self.cache_of(loaded, self.dtype)
    }

    /// An empty cache with rows of `dtype`, f32 if that is `None`.
    pub fn cache_of(&self, loaded: &Loaded, dtype: Option<FloatType>) -> Result<PagedKvCache> {
        let dtype = dtype.map_or(DType::F32, DType::from);
        let size = CacheConfig::bytes(self.kv_memory.as_u64()).with_block_size(self.block_size);
        let spec = loaded.model.cache_spec(dtype)?;
        Ok(PagedKvCache::new(&spec, &size, &Device::Cpu)?)
    }

    /// An engine with an empty cache of its own.
    pub fn engine(&self, loaded: &Loaded, config: EngineConfig) -> Result<Engine<Decoder>> {
        let engine = Engine::new(loaded.model.clone(), self.cache(loaded)?, config)?;
        Ok(engine
            .with_tokenizer(loaded.tokenizer.clone())
            .with_eos(loaded.eos.as_slice()))
    }
}

impl Loaded {
    /// Token ids of a text as it is.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self
            .tokenizer
            .encode(text, special)
            .map_err(anyhow::Error::msg)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Token ids of a conversation in the model's chat template, ready for an answer.
    pub fn chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let template = self
            .template
            .as_ref()
            .context("the model has no chat template")?;
        self.encode(&template.render(messages, true)?, false)
    }
}
