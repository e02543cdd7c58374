//! Several answers to one prompt, which share its blocks: samples, or the beams of a search.
//!
//! ```text
//! cargo run --release --example parallel_sampling -- --n 4 "Once upon a time"
//! cargo run --release --example parallel_sampling -- --beams 4 "Once upon a time"
//! ```

#[path = "support/exit.rs"]
mod exit;
#[path = "support/setup.rs"]
mod setup;
#[path = "support/mod.rs"]
mod support;

use anyhow::Result;
use candle_paged_attn::engine::{Answer, BeamSearch, EngineConfig, Request, Sampling};
use clap::Parser;
use exit::exit;
use std::process::ExitCode;

/// Several answers to one prompt, which share its blocks.
#[derive(Debug, Parser)]
struct Args {
    /// The prompt, continued as it is.
    prompt: String,
    #[command(flatten)]
    model: setup::ModelArgs,
    /// Answers.
    #[arg(long, default_value_t = 4)]
    n: usize,
    /// Search with this many beams instead of sampling.
    #[arg(long)]
    beams: Option<usize>,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 32)]
    max_tokens: usize,
    /// Temperature of the samples.
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Seed of the sampler.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> ExitCode {
    exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let loaded = args.model.load()?;
    let mut engine = args.model.engine(&loaded, EngineConfig::default())?;
    let prompt = loaded.encode(&args.prompt, true)?;
    let tokens = prompt.len();
    let mut request = Request::new(prompt).with_max_tokens(args.max_tokens);
    match args.beams {
        Some(width) => {
            request = request
                .with_beams(BeamSearch::new(width))
                .with_n(args.n.min(width));
        }
        None => {
            let sampling = Sampling::temperature(args.temperature).with_seed(args.seed);
            request = request.with_sampling(sampling).with_n(args.n);
        }
    }
    let width = args.beams.unwrap_or(args.n);
    engine.add_request(request)?;
    let mut answer = Answer::default();
    let mut most = 0;
    while engine.has_work() {
        for output in engine.step()? {
            answer.push(output);
        }
        most = most.max(engine.stats().blocks_used);
    }
    for (number, sample) in answer.samples.iter().enumerate() {
        let score = sample
            .score
            .map_or(String::new(), |score| format!(" (score {score:.3})"));
        println!("{number}{score}: {}{}\n", args.prompt, sample.text);
    }
    let shared = tokens / args.model.block_size;
    println!(
        "{most} blocks at most; the {shared} full blocks of the prompt are shared {width} ways, \
         which saves {}",
        (width - 1) * shared
    );
    Ok(())
}
