//! Generation of SmolLM2-135M against stock candle, in one process and interleaved.
//!
//! ```text
//! cargo bench --bench generate -- [--quick] [--floors] [--threads 2] [--json FILE]
//! ```
//!
//! A row is a number of rounds; in each round every contender runs once, one after the other
//! (A B A B ...), so that whatever else the machine does falls on all of them. The ratio of a
//! round is stock's time over ours; the table gives the median and the range of all rounds. One
//! more round runs before each row to warm up and is not counted; nothing else is left out.

mod floors;
mod ours;
mod prompt;
mod report;
mod requantize;
#[path = "../../examples/support/mod.rs"]
mod setup;
mod stock;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use candle_paged_attn::load::LoadOptions;
use clap::Parser;

use ours::Ours;
use report::{Report, Row};
use stock::Stock;
use support::options::Options;

/// Tokens decoded per timed sample and sequence.
const STEPS: usize = 8;
/// Context lengths at batch 1. Stock's quantised model ends at 4,096.
const CONTEXTS: [usize; 2] = [512, 4000];
const PREFILL: usize = 512;
/// Context lengths of the sequences that are decoded together.
const BATCH: [usize; 8] = [100, 200, 300, 400, 500, 600, 700, 800];

/// Generation of SmolLM2-135M against stock candle.
#[derive(Debug, Parser)]
struct Args {
    /// A Llama GGUF file, instead of SmolLM2-135M-Instruct.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Counted rounds per row.
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// 3 rounds: for development, not for figures.
    #[arg(long)]
    quick: bool,
    /// Also measure what this machine reads and multiplies at most.
    #[arg(long)]
    floors: bool,
    #[command(flatten)]
    common: Options,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if !args.common.measure("generate") {
        return Ok(());
    }
    setup::set_threads(args.common.threads.into());
    let gguf = match &args.model {
        Some(path) => path.clone(),
        None => setup::default_model(true)?,
    };
    ensure!(
        gguf.is_file(),
        "{} is a folder: the quantised rows need a GGUF file; set {} or --model to one",
        gguf.display(),
        setup::MODEL_VARIABLE
    );
    let rounds = if args.quick { 3 } else { args.rounds.into() };
    let mut report = Report::new(args.common.threads.into(), rounds, &args.common.only);
    report.print_head();
    if args.floors {
        floors::print()?;
    }
    let scratch = tempfile::tempdir()?;
    bench_f32(&mut report, &gguf, scratch.path())?;
    bench_q8_0(&mut report, &gguf, scratch.path())?;
    report.print_table();
    if let Some(path) = &args.common.json {
        std::fs::write(path, report.json()).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Both sides load the same f32 tensors from the same folder.
fn bench_f32(report: &mut Report, gguf: &std::path::Path, scratch: &std::path::Path) -> Result<()> {
    if !report.wants_any("f32") {
        return Ok(());
    }
    let folder = scratch.join("f32");
    setup::write_hf_folder(gguf, &folder)?;
    let stock = Stock::from_hf_folder(&folder)?;
    let options = LoadOptions::default().with_dtype(DType::F32);
    let ours = Ours::load(&folder, &options)?;
    std::fs::remove_dir_all(&folder)?;
    decode_alone(report, "f32", &ours, &stock, true)?;
    prefill(report, "f32", &ours, &stock)?;
    decode_together(report, "f32", &ours, &stock, Some(3.0), true)
}

/// Both sides load the same file. Its products round the activations, so the sides may answer
/// with different tokens.
fn bench_q8_0(
    report: &mut Report,
    gguf: &std::path::Path,
    scratch: &std::path::Path,
) -> Result<()> {
    if !report.wants_any("Q8_0") {
        return Ok(());
    }
    let file = scratch.join("q8_0.gguf");
    requantize::to_q8_0(gguf, &file)?;
    let stock = Stock::from_gguf(&file)?;
    let ours = Ours::load(&file, &LoadOptions::default())?;
    decode_alone(report, "Q8_0", &ours, &stock, false)?;
    prefill(report, "Q8_0", &ours, &stock)?;
    decode_together(report, "Q8_0", &ours, &stock, None, false)
}

fn decode_alone(
    report: &mut Report,
    weights: &str,
    ours: &Ours,
    stock: &Stock,
    same_tokens: bool,
) -> Result<()> {
    for context in CONTEXTS {
        let goal = if context == CONTEXTS[0] { 1.0 } else { 1.5 };
        let name = format!("{weights} decode, batch 1, context {context}");
        if !report.wants(&name) {
            continue;
        }
        let prompt = prompt::tokens(&ours.pretrained, context, 0)?;
        let mine = ours.start(&prompt)?;
        let theirs = stock.start(&prompt)?;
        let mut row = Row::new(name, Some(goal), STEPS);
        for round in 0..=report.rounds {
            let a = ours.decode(&[&mine], STEPS)?;
            let b = theirs.decode(STEPS)?;
            if same_tokens {
                ensure!(a.tokens[0] == b.tokens, "{}: other tokens", row.name);
            }
            if round > 0 {
                row.push(a.time, b.time);
            }
        }
        ours.remove(mine)?;
        report.push(row);
    }
    Ok(())
}

fn prefill(report: &mut Report, weights: &str, ours: &Ours, stock: &Stock) -> Result<()> {
    let name = format!("{weights} prefill of {PREFILL}");
    if !report.wants(&name) {
        return Ok(());
    }
    let prompt = prompt::tokens(&ours.pretrained, PREFILL, 0)?;
    let mut row = Row::new(name, Some(1.0), PREFILL);
    for round in 0..=report.rounds {
        let a = ours.prefill(&prompt)?;
        let b = stock.prefill(&prompt)?;
        if round > 0 {
            row.push(a, b);
        }
    }
    report.push(row);
    Ok(())
}

/// All sequences in one step of ours, against one sequence after the other on either side.
fn decode_together(
    report: &mut Report,
    weights: &str,
    ours: &Ours,
    stock: &Stock,
    goal: Option<f64>,
    same_tokens: bool,
) -> Result<()> {
    let n = BATCH.len();
    let name = format!("{weights} decode, {n} sequences together / stock one by one");
    let own_name = format!("{weights} decode, {n} sequences together / ours one by one");
    if !report.wants(&name) && !report.wants(&own_name) {
        return Ok(());
    }
    let prompts = BATCH
        .iter()
        .enumerate()
        .map(|(i, &len)| prompt::tokens(&ours.pretrained, len, i))
        .collect::<Result<Vec<_>>>()?;
    let mine = prompts
        .iter()
        .map(|prompt| ours.start(prompt))
        .collect::<Result<Vec<_>>>()?;
    let theirs = prompts
        .iter()
        .map(|prompt| stock.start(prompt))
        .collect::<Result<Vec<_>>>()?;
    let mut row = Row::new(name, goal, n * STEPS);
    let mut own_row = Row::new(own_name, None, n * STEPS);
    for round in 0..=report.rounds {
        let together = ours.decode(&mine.iter().collect::<Vec<_>>(), STEPS)?;
        let mut stock_time = Duration::ZERO;
        for (theirs, tokens) in theirs.iter().zip(&together.tokens) {
            let b = theirs.decode(STEPS)?;
            stock_time += b.time;
            if same_tokens {
                ensure!(*tokens == b.tokens, "{}: other tokens", row.name);
            }
        }
        let mut own_time = Duration::ZERO;
        for sequence in &mine {
            own_time += ours.decode(&[sequence], STEPS)?.time;
        }
        if round > 0 {
            row.push(together.time, stock_time);
            own_row.push(together.time, own_time);
        }
    }
    report.push(row);
    report.push(own_row);
    for sequence in mine {
        ours.remove(sequence)?;
    }
    Ok(())
}
