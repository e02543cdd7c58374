//! Many questions after one system prompt, with and without the prefix cache: what is saved.
//!
//! ```text
//! cargo run --release --example shared_prefix
//! ```

#[path = "support/exit.rs"]
mod exit;
#[path = "support/setup.rs"]
mod setup;
#[path = "support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_paged_attn::block::Namespace;
use candle_paged_attn::engine::{EngineConfig, Request};
use clap::Parser;
use exit::exit;

const RULE: &str = "You answer questions about a library. Be brief, be kind, and cite the shelf. ";
const QUESTIONS: [&str; 8] = [
    "Where are the maps?",
    "Who wrote the oldest book here?",
    "When do you open on Sunday?",
    "Is there a room to work in?",
    "How long may I keep a novel?",
    "Do you have films?",
    "Where can I print?",
    "What is new this week?",
];

/// Many questions after one system prompt, with and without the prefix cache.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: setup::ModelArgs,
    /// Tokens of the system prompt, about.
    #[arg(long, default_value_t = 256)]
    system_tokens: usize,
    /// Tokens to generate for each question.
    #[arg(long, default_value_t = 16)]
    max_tokens: usize,
}

fn main() -> ExitCode {
    exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let loaded = args.model.load()?;
    let rule = loaded.encode(RULE, false)?;
    let system: Vec<u32> = rule
        .iter()
        .copied()
        .cycle()
        .take(args.system_tokens)
        .collect();
    println!(
        "{} questions after {} tokens",
        QUESTIONS.len(),
        system.len()
    );
    let mut saved = (0i64, 0.0);
    for prefix_cache in [false, true] {
        let mut config = EngineConfig::default();
        config.prefix_cache = prefix_cache;
        let mut engine = args.model.engine(&loaded, config)?;
        let start = Instant::now();
        if prefix_cache {
            engine.pin_prefix(&system, Namespace::default())?;
        }
        for question in QUESTIONS {
            let mut prompt = system.clone();
            prompt.extend(loaded.encode(question, false)?);
            let mut request = Request::new(prompt).with_max_tokens(args.max_tokens);
            request.ignore_eos = true;
            engine.add_request(request)?;
        }
        let mut most = 0;
        let mut first_tokens = Vec::new();
        while engine.has_work() {
            for output in engine.step()? {
                first_tokens.extend(output.report.and_then(|report| report.first_token));
            }
            most = most.max(engine.stats().blocks_used);
        }
        let mean = first_tokens.iter().sum::<Duration>() / first_tokens.len().max(1) as u32;
        let stats = engine.stats();
        println!(
            "prefix cache {}: {most} blocks at most, {} of {} prompt tokens cached, first token \
             after {:.2} s, all after {:.2} s",
            if prefix_cache { "on " } else { "off" },
            stats.cached_tokens,
            stats.prompt_tokens,
            mean.as_secs_f64(),
            start.elapsed().as_secs_f64(),
        );
        // What is needed without, less what is needed with.
        let sign = if prefix_cache { -1 } else { 1 };
        saved.0 += sign * most as i64;
        saved.1 += sign as f64 * start.elapsed().as_secs_f64();
    }
    println!("saved: {} blocks and {:.2} s", saved.0, saved.1);
    Ok(())
}
