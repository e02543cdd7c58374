//! What the engine makes of a model: many requests at once, shared prompts, and what it costs.
//!
//! ```text
//! cargo bench --bench throughput -- [--only SUBSTRING] [--rounds 5] [--threads 2] [--json FILE]
//! ```
//!
//! SmolLM2-135M-Instruct, weights dequantised to f32. In each round every contender runs once,
//! one after the other; a ratio is that of one round, the table gives the median and the range
//! of all rounds. Counts (requests in flight, blocks) are the same in every round.

mod cascade;
mod engine;
mod overhead;
mod prefix;
#[path = "../generate/prompt.rs"]
mod prompt;
#[path = "../versus/report.rs"]
mod report;
mod requests;
#[path = "../../examples/support/mod.rs"]
mod setup;
#[path = "../generate/stock.rs"]
#[allow(dead_code)] // `generate` takes the rest.
mod stock;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_core::Device;
use clap::Parser;

use engine::Model;
use report::Report;

/// The engine on SmolLM2-135M: throughput, shared prefixes, overhead, cascade.
#[derive(Debug, Parser)]
struct Args {
    /// A Llama GGUF file, instead of SmolLM2-135M-Instruct.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Threads of both sides.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    threads: u16,
    /// Counted rounds per row.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Only rows whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Writes the rows to this file as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Passed by `cargo bench`. Without it (`cargo test --all-targets`) nothing is measured.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if !args.bench {
        println!("nothing measured: run `cargo bench --bench throughput`");
        return Ok(());
    }
    setup::set_threads(args.threads.into());
    let mut report = Report::new(args.rounds.into(), &args.only);
    // The pool that a model's forward pass runs in.
    Device::Cpu.with_context(|| cascade::bench(&mut report))?;
    let gguf = match &args.model {
        Some(path) => path.clone(),
        None => setup::default_model(true)?,
    };
    let model = Model::load(&gguf)?;
    prefix::bench(&mut report, &model)?;
    overhead::bench(&mut report, &model)?;
    requests::bench(&mut report, &model, &gguf)?;
    report.print();
    if let Some(path) = &args.json {
        std::fs::write(path, report.json()?).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
