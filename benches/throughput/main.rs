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
mod requests;
#[path = "../../examples/support/mod.rs"]
mod setup;
#[path = "../generate/stock.rs"]
#[allow(dead_code)] // `generate` takes the rest.
mod stock;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;

use anyhow::Result;
use candle_core::Device;
use clap::Parser;

use engine::Model;
use support::options::Options;
use support::report::Report;

/// The engine on SmolLM2-135M: throughput, shared prefixes, overhead, cascade.
#[derive(Debug, Parser)]
struct Args {
    /// A Llama GGUF file, instead of SmolLM2-135M-Instruct.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Counted rounds per row.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    #[command(flatten)]
    common: Options,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if !args.common.measure("throughput") {
        return Ok(());
    }
    setup::set_threads(args.common.threads.into());
    let mut report = Report::new(args.rounds.into(), &args.common.only);
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
    report.finish(args.common.json.as_deref())
}
