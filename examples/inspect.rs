//! What a checkpoint is, from its configuration alone: family, layers, and what its K/V costs.
//!
//! ```text
//! cargo run --release --example inspect -- MODEL [--memory 8GiB]
//! ```
//!
//! MODEL is a GGUF file or a folder with `config.json`.

#[path = "support/exit.rs"]
mod exit;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use bytesize::ByteSize;
use candle_core::DType;
use candle_paged_attn::load::gguf::GgufFile;
use candle_paged_attn::models::{ModelSpec, spec_from_gguf, spec_from_hf};
use clap::Parser;
use exit::exit;

/// What a checkpoint is, from its configuration alone.
#[derive(Debug, Parser)]
struct Args {
    /// A GGUF file or a folder with `config.json`.
    model: PathBuf,
    /// Memory for the cache.
    #[arg(long, default_value = "4GiB")]
    memory: ByteSize,
}

fn main() -> ExitCode {
    exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let spec = read(&args.model)?;
    println!("family          {}", spec.family);
    println!("layers          {}", spec.layers.len());
    println!("hidden size     {}", spec.hidden);
    println!("vocabulary      {}", spec.vocab);
    println!("context length  {}", spec.context_length);
    for (dtype, name) in [(DType::F32, "f32"), (DType::F16, "f16 or bf16")] {
        let groups = spec.cache_spec(dtype)?.groups;
        println!("\nK/V in {name}");
        let mut per_token = 0u64;
        let mut fixed = 0u64;
        for group in &groups {
            let bytes = group.bytes_per_token().context("too large to count")?;
            let window = match group.window {
                Some(window) => {
                    fixed = bytes.saturating_mul(window as u64).saturating_add(fixed);
                    format!("window {window}")
                }
                None => {
                    per_token = bytes.saturating_add(per_token);
                    "full context".to_string()
                }
            };
            println!(
                "  {} layers, {} KV heads, dims {} and {}, {window}: {bytes} bytes per token",
                group.layers.len(),
                group.kv_heads,
                group.k_dim,
                group.v_dim,
            );
        }
        let memory = args.memory.as_u64();
        match memory.saturating_sub(fixed).checked_div(per_token) {
            Some(tokens) => println!("  one sequence in {}: {tokens} tokens", args.memory),
            None => println!("  one sequence of any length: {}", ByteSize(fixed)),
        }
    }
    println!("\nfirst layer\n{:#?}", spec.layers[0]);
    Ok(())
}

fn read(model: &Path) -> Result<ModelSpec> {
    let place = model.display().to_string();
    if model.is_file() {
        return Ok(spec_from_gguf(GgufFile::open(model)?.metadata(), &place)?);
    }
    let path = model.join("config.json");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(spec_from_hf(&serde_json::from_str(&text)?, &place)?)
}
