//! Ours and its peers, in one process and in turns.
//!
//! ```text
//! cargo bench --bench versus -- [--only SUBSTRING] [--rounds 11] [--threads 2] [--json FILE]
//! ```
//!
//! In each round every contender runs once, one after the other (A B A B ...); a ratio is that
//! of one round, the table gives the median and the range of all rounds. Rounds in which other
//! processes used the CPU are repeated (Linux). `LLAMA_BATCHED_BENCH` names llama.cpp's batched
//! bench, if there is one; without it there are no rows against it.

mod bookkeeping;
mod decode;
mod floors;
mod models;
#[allow(dead_code)]
#[path = "../generate/ours.rs"]
mod ours;
mod prefill;
#[path = "../generate/prompt.rs"]
mod prompt;
mod report;
#[allow(dead_code)]
#[path = "../generate/requantize.rs"]
mod requantize;
#[path = "../../examples/support/mod.rs"]
mod setup;
#[allow(dead_code)]
#[path = "../generate/stock.rs"]
mod stock;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_core::Device;
use clap::Parser;

use report::Report;

/// Paged attention, allocator and engine against their peers and the machine's limits.
#[derive(Debug, Parser)]
struct Args {
    /// Threads of both sides.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    threads: u16,
    /// Counted rounds per row; slow rows take fewer.
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u16).range(1..))]
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
        println!("nothing measured: run `cargo bench --bench versus`");
        return Ok(());
    }
    setup::set_threads(args.threads.into());
    let mut report = Report::new(args.rounds.into(), &args.only);
    // The pool that a model's forward pass runs in.
    Device::Cpu.with_context(|| -> Result<()> {
        decode::bench(&mut report)?;
        prefill::bench(&mut report)?;
        bookkeeping::bench(&mut report)
    })?;
    models::bench(&mut report, args.threads.into())?;
    report.print();
    if let Some(path) = &args.json {
        std::fs::write(path, report.json()?).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
