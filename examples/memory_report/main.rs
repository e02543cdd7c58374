//! What paging saves: replays a request trace through the block allocator and through ways to
//! manage KV memory without blocks, and compares how much of the memory holds tokens.
//!
//! ```text
//! cargo run --release --example memory_report -- azure_conv.csv --out report
//! ```
//!
//! No model is run, only the bookkeeping. `replay.rs` says what the clock is and what is
//! counted. Without a trace a synthetic one is replayed.

mod contiguous;
#[path = "../support/exit.rs"]
mod exit;
mod memory;
mod paged;
mod plot;
mod replay;
mod report;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use exit::exit;
use indicatif::{ProgressBar, ProgressStyle};
use trace::Trace;

/// What paging saves: how much of the KV memory holds tokens, with and without it.
#[derive(Debug, Parser)]
struct Args {
    /// A CSV with the columns ContextTokens and GeneratedTokens, or a JSONL with input_length,
    /// output_length and perhaps hash_ids. Without it: a synthetic trace.
    trace: Option<PathBuf>,
    /// Folder for report.json and memory.svg; made if it is not there.
    #[arg(long, value_name = "DIR", default_value = "memory-report")]
    out: PathBuf,
    /// Memory in tokens. Without it: room for 16 of the longest request.
    #[arg(long, value_name = "TOKENS")]
    memory: Option<usize>,
    /// Only the first requests of the trace.
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
}

fn main() -> ExitCode {
    exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let mut trace = match &args.trace {
        Some(path) => Trace::read(path)?,
        None => Trace::synthetic(),
    };
    trace.truncate(args.limit.map_or(usize::MAX, |limit| limit as usize));
    let out = &args.out;
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;

    let replays = report::plan(&trace).len() * trace.requests.len();
    let style = "{bar:30} {percent}% of {len} requests replayed, {elapsed}";
    let bar = ProgressBar::new(replays as u64).with_style(ProgressStyle::with_template(style)?);
    let report = report::report(&trace, args.memory, || bar.inc(1))?;
    bar.finish_and_clear();

    print!("{}", report::table(&report));
    let write = |name: &str, text: String| {
        let path = out.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write("report.json", serde_json::to_string_pretty(&report)? + "\n")?;
    write("memory.svg", plot::svg(&report)?)?;
    eprintln!("\nwritten: report.json and memory.svg in {}", out.display());
    Ok(())
}
