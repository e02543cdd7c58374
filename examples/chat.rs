//! A chat in the terminal. Each turn finds the turns before it in the prefix cache, so that
//! `/back` and `/fork` cost nothing: a conversation is its text.
//!
//! ```text
//! cargo run --release --example chat
//! ```

#[path = "support/exit.rs"]
mod exit;
#[path = "support/setup.rs"]
mod setup;
#[path = "support/mod.rs"]
mod support;

use std::io::{BufRead, Write};
use std::process::ExitCode;

use anyhow::Result;
use candle_paged_attn::engine::{Engine, EngineConfig, Request, Sampling};
use candle_paged_attn::load::chat::Message;
use candle_paged_attn::models::Decoder;
use clap::Parser;
use exit::exit;
use setup::Loaded;

const HELP: &str = "/back takes the last turn back, /fork begins a branch here, /switch N goes to \
                    branch N, /quit ends";

/// A chat in the terminal.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: setup::ModelArgs,
    /// Tokens of an answer at most.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// 0 takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
}

fn main() -> ExitCode {
    exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let loaded = args.model.load()?;
    let mut engine = args.model.engine(&loaded, EngineConfig::default())?;
    let mut branches: Vec<Vec<Message>> = vec![vec![]];
    let mut at = 0;
    println!("{HELP}");
    let mut lines = std::io::stdin().lock().lines();
    loop {
        print!("[{at}]> ");
        std::io::stdout().flush()?;
        let Some(line) = lines.next().transpose()? else {
            return Ok(());
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [] => {}
            ["/quit"] => return Ok(()),
            ["/back"] => {
                let keep = branches[at].len().saturating_sub(2);
                branches[at].truncate(keep);
            }
            ["/fork"] => {
                branches.push(branches[at].clone());
                at = branches.len() - 1;
            }
            ["/switch", number] => match number.parse() {
                Ok(number) if number < branches.len() => at = number,
                _ => println!("there are {} branches", branches.len()),
            },
            [word, ..] if word.starts_with('/') => println!("{HELP}"),
            _ => {
                branches[at].push(Message::new("user", line.as_str()));
                match answer(args, &loaded, &mut engine, &branches[at]) {
                    Ok(text) => branches[at].push(Message::new("assistant", text)),
                    Err(error) => {
                        println!("{error:#}");
                        branches[at].pop();
                    }
                }
            }
        }
    }
}

/// Streams an answer, then says what the conversation costs.
fn answer(
    args: &Args,
    loaded: &Loaded,
    engine: &mut Engine<Decoder>,
    messages: &[Message],
) -> Result<String> {
    let sampling = Sampling::temperature(args.temperature);
    let request = Request::new(loaded.chat(messages)?)
        .with_max_tokens(args.max_tokens)
        .with_sampling(sampling);
    engine.add_request(request)?;
    let mut text = String::new();
    let mut used = 0;
    while engine.has_work() {
        for output in engine.step()? {
            print!("{}", output.text);
            std::io::stdout().flush()?;
            text.push_str(&output.text);
            let stats = engine.stats();
            used = used.max(stats.blocks_used);
            if let Some(report) = output.report {
                println!(
                    "\n-- {} prompt tokens, {} of them cached; {used} of {} blocks used, {} kept \
                     for later",
                    report.prompt_tokens,
                    report.cached_tokens,
                    stats.blocks_total,
                    stats.blocks_cached,
                );
            }
        }
    }
    Ok(text)
}
