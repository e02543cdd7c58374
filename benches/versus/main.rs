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

use anyhow::Result;
use candle_core::Device;
use clap::Parser;

use support::options::Options;
use support::report::Report;

/// Paged attention, allocator and engine against their peers and the machine's limits.
#[derive(Debug, Parser)]
struct Args {
    /// Counted rounds per row; slow rows take fewer.
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    #[command(flatten)]
    common: Options,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if !args.common.measure("versus") {
        return Ok(());
    }
    setup::set_threads(args.common.threads.into());
    let mut report = Report::new(args.rounds.into(), &args.common.only);
    // The pool that a model's forward pass runs in.
    Device::Cpu.with_context(|| -> Result<()> {
        decode::bench(&mut report)?;
        prefill::bench(&mut report)?;
        bookkeeping::bench(&mut report)
    })?;
    models::bench(&mut report, args.common.threads.into())?;
    report.finish(args.common.json.as_deref())
}
