//! Answers a file of prompts, all of them batched.
//!
//! ```text
//! cargo run --release --example batch -- prompts.txt
//! ```
//!
//! A line is a prompt, or in a file `*.jsonl` an object with `prompt` or `prompt_ids`, and if
//! wanted `max_tokens`, `seed`, `n` and `ignore_eos`.
//!
//! With `--json` a line per request: `index`, `prompt_tokens`, `tokens`, `text`,
//! `finish_reason`, `cached_tokens`, and in seconds `queued_s`, `first_token_s`, `total_s`; or
//! `index` and `error` if it was refused. What is said of a sample is said of the first; where
//! `n` is above 1, all of them stand in `samples`, each with its `tokens`, `text` and
//! `finish_reason`. The last line has the totals.

#[path = "support/exit.rs"]
mod exit;
#[path = "support/setup.rs"]
mod setup;
#[path = "support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_paged_attn::engine::{Answer, EngineConfig, Request, Sample, Sampling};
use candle_paged_attn::load::chat::Message;
use clap::Parser;
use exit::exit;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;
use serde_json::{Value, json};
use setup::{Loaded, ModelArgs};

/// Answers a file of prompts, all of them batched.
#[derive(Debug, Parser)]
struct Args {
    /// One prompt per line; in a file `*.jsonl` one object per line.
    file: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Sequences that run at once.
    #[arg(long, default_value_t = 64)]
    max_num_seqs: usize,
    /// Tokens to generate at most per prompt, unless its line says otherwise.
    #[arg(long, default_value_t = 64)]
    max_tokens: usize,
    /// 0 takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Go on past the end-of-text tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Continue the prompts as they are, without a chat template.
    #[arg(long)]
    raw: bool,
    /// Print one object per request and one with the totals.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: Option<String>,
    prompt_ids: Option<Vec<u32>>,
    max_tokens: Option<usize>,
    seed: Option<u64>,
    n: Option<usize>,
    ignore_eos: Option<bool>,
}

fn main() -> ExitCode {
    exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let lines = read_lines(args)?;
    let loaded = args.model.load()?;
    let requests = lines
        .iter()
        .enumerate()
        .map(|(i, line)| request(args, &loaded, line).with_context(|| format!("prompt {i}")))
        .collect::<Result<Vec<_>>>()?;
    let config = EngineConfig::default().with_max_sequences(args.max_num_seqs);
    let mut engine = args.model.engine(&loaded, config)?;

    let style = "{bar:30} {pos}/{len} prompts, {msg}, {elapsed}";
    let bar =
        ProgressBar::new(requests.len() as u64).with_style(ProgressStyle::with_template(style)?);
    let start = Instant::now();
    let answers = engine.generate(requests, |progress| {
        bar.set_position(progress.finished as u64);
        bar.set_message(format!("{} tokens", progress.tokens));
    })?;
    let seconds = start.elapsed().as_secs_f64();
    bar.finish_and_clear();

    let mut totals = [0; 3];
    let mut refused = 0;
    for (index, answer) in answers.iter().enumerate() {
        match answer {
            Ok(answer) => {
                let generated = print(args, index, answer);
                let report = answer.report.as_ref();
                totals[0] += report.map_or(0, |report| report.prompt_tokens);
                totals[1] += report.map_or(0, |report| report.cached_tokens);
                totals[2] += generated;
            }
            Err(error) => {
                refused += 1;
                if args.json {
                    println!("{}", json!({"index": index, "error": error.to_string()}));
                } else {
                    println!("[{index}] refused: {error}\n");
                }
            }
        }
    }
    let [prompt_tokens, cached_tokens, generated_tokens] = totals;
    let stats = engine.stats();
    let per_second = generated_tokens as f64 / seconds;
    if args.json {
        let object = json!({
            "requests": answers.len(),
            "refused": refused,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "generated_tokens": generated_tokens,
            "seconds": seconds,
            "tok_per_s": per_second,
            "steps": stats.steps,
            "preemptions": stats.preemptions,
        });
        println!("{object}");
    } else {
        eprintln!(
            "{} prompts ({refused} refused) of {prompt_tokens} tokens, {cached_tokens} of them \
             cached; {generated_tokens} generated in {seconds:.1} s: {per_second:.1}/s, in {} \
             steps; {} preemptions",
            answers.len(),
            stats.steps,
            stats.preemptions,
        );
    }
    Ok(())
}

fn read_lines(args: &Args) -> Result<Vec<Line>> {
    let text = std::fs::read_to_string(&args.file)
        .with_context(|| format!("cannot read {}", args.file.display()))?;
    let json = args
        .file
        .extension()
        .is_some_and(|extension| extension == "jsonl");
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    let lines = lines.map(|(number, line)| {
        if !json {
            return Ok(Line {
                prompt: Some(line.to_string()),
                ..Line::default()
            });
        }
        let line: Line = serde_json::from_str(line)
            .with_context(|| format!("{}, line {}", args.file.display(), number + 1))?;
        ensure!(
            line.prompt.is_some() != line.prompt_ids.is_some(),
            "{}, line {}: expected either `prompt` or `prompt_ids`",
            args.file.display(),
            number + 1
        );
        Ok(line)
    });
    lines.collect()
}

fn request(args: &Args, loaded: &Loaded, line: &Line) -> Result<Request> {
    let ids = match (&line.prompt_ids, &line.prompt) {
        (Some(ids), _) => ids.clone(),
        (None, Some(text)) if args.raw => loaded.encode(text, true)?,
        (None, text) => {
            loaded.chat(&[Message::new("user", text.as_deref().unwrap_or_default())])?
        }
    };
    let mut sampling = Sampling::temperature(args.temperature);
    sampling.seed = line.seed;
    let mut request = Request::new(ids)
        .with_max_tokens(line.max_tokens.unwrap_or(args.max_tokens))
        .with_n(line.n.unwrap_or(1))
        .with_sampling(sampling);
    request.ignore_eos = line.ignore_eos.unwrap_or(args.ignore_eos);
    Ok(request)
}

/// Prints the samples of a prompt and answers the number of their tokens.
fn print(args: &Args, index: usize, answer: &Answer) -> usize {
    if args.json {
        println!("{}", object(index, answer));
    } else {
        for sample in &answer.samples {
            println!("[{index}] {} ({})\n", sample.text.trim(), reason(sample));
        }
    }
    answer
        .samples
        .iter()
        .map(|sample| sample.tokens.len())
        .sum()
}

fn reason(sample: &Sample) -> &'static str {
    sample.finish.as_ref().map_or("", |finish| finish.as_str())
}

/// The line of a request.
fn object(index: usize, answer: &Answer) -> Value {
    let first = answer.samples.first();
    let report = answer.report.as_ref();
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let mut object = json!({
        "index": index,
        "prompt_tokens": report.map(|report| report.prompt_tokens),
        "tokens": first.map(|sample| &sample.tokens),
        "text": first.map(|sample| &sample.text),
        "finish_reason": first.map(reason),
        "cached_tokens": report.map(|report| report.cached_tokens),
        "queued_s": seconds(report.and_then(|report| report.queued)),
        "first_token_s": seconds(report.and_then(|report| report.first_token)),
        "total_s": seconds(report.map(|report| report.total)),
    });
    if answer.samples.len() > 1 {
        let samples = answer.samples.iter().map(|sample| {
            json!({
                "tokens": sample.tokens,
                "text": sample.text,
                "finish_reason": reason(sample),
            })
        });
        object["samples"] = samples.collect();
    }
    object
}
