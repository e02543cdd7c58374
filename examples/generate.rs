//! Answers a prompt with a model whose K/V lives in a paged cache.
//!
//! ```text
//! cargo run --release --example generate -- "What is the capital of France?"
//! ```

#[path = "support/exit.rs"]
mod exit;
#[path = "support/setup.rs"]
mod setup;
#[path = "support/mod.rs"]
mod support;

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytesize::ByteSize;
use candle_paged_attn::Error;
use candle_paged_attn::cache::{AddOptions, Feed, Logits, PagedKvCache, SequenceId};
use candle_paged_attn::load::{TextStream, chat::Message};
use candle_paged_attn::models::CausalLm;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use clap::Parser;
use exit::exit;
use serde_json::json;
use setup::{FloatType, Loaded, ModelArgs};

/// Prompt tokens computed per step: bounds the memory of a long prompt's activations.
const PREFILL_CHUNK: usize = 512;

/// Answers a prompt with a model whose K/V lives in a paged cache.
#[derive(Debug, Parser)]
struct Args {
    /// The prompt.
    prompt: String,
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// Go on past the end-of-text tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// 0 takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample only among the most likely tokens that together have this probability.
    #[arg(long)]
    top_p: Option<f64>,
    /// Seed of the sampler.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Dtype of the KV cache, if it is to differ from the compute dtype.
    #[arg(long, value_enum)]
    kv_dtype: Option<FloatType>,
    /// Wrap the prompt in the model's chat template (the default).
    #[arg(long, conflicts_with = "raw")]
    chat: bool,
    /// Continue the prompt as it is, without a chat template.
    #[arg(long)]
    raw: bool,
    /// Print one JSON object instead of the text. `tokens` includes an end-of-text token that
    /// ended the answer; `text` does not.
    #[arg(long)]
    json: bool,
}

/// What came out, and how long it took.
struct Answer {
    tokens: Vec<u32>,
    text: String,
    finish_reason: &'static str,
    prefill: Duration,
    decode: Duration,
}

fn main() -> ExitCode {
    exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    ensure!(args.max_tokens > 0, "--max-tokens must be at least 1");
    ensure!(
        args.temperature == 0.0 || args.temperature >= 1e-6,
        "--temperature must be 0 or at least 1e-6, got {}",
        args.temperature
    );
    ensure!(
        args.top_p.is_none_or(|p| p > 0.0 && p <= 1.0),
        "--top-p must lie above 0 and be at most 1"
    );
    let loaded = args.model.load()?;
    let prompt = if args.raw {
        loaded.encode(&args.prompt, true)?
    } else {
        loaded
            .chat(&[Message::new("user", &args.prompt)])
            .context("use --raw to continue the prompt as it is")?
    };
    let cache = args
        .model
        .cache_of(&loaded, args.kv_dtype.or(args.model.dtype))?;
    let sequence = cache.add(&prompt, AddOptions::default())?.id;
    let answer = generate(args, &loaded, &cache, sequence, &prompt)?;
    report(args, &cache, &prompt, &answer);
    Ok(())
}

fn generate(
    args: &Args,
    loaded: &Loaded,
    cache: &PagedKvCache,
    sequence: SequenceId,
    prompt: &[u32],
) -> Result<Answer> {
    let model = &loaded.model;
    let sampling = match (args.temperature, args.top_p) {
        (0.0, _) => Sampling::ArgMax,
        (temperature, None) => Sampling::All { temperature },
        (temperature, Some(p)) => Sampling::TopP { p, temperature },
    };
    let mut sampler = LogitsProcessor::from_sampling(args.seed, sampling);
    let mut stream = TextStream::new(loaded.tokenizer.clone(), true);
    let mut answer = Answer {
        tokens: Vec::new(),
        text: String::new(),
        finish_reason: "length",
        prefill: Duration::ZERO,
        decode: Duration::ZERO,
    };

    let start = Instant::now();
    let chunks = prompt.chunks(PREFILL_CHUNK);
    let last = chunks.len().saturating_sub(1);
    let mut logits = None;
    for (i, chunk) in chunks.enumerate() {
        let wanted = if i == last {
            Logits::Last
        } else {
            Logits::None
        };
        let plan = cache
            .plan(&[Feed::new(sequence, chunk).with_logits(wanted)])
            .context("the prompt does not fit; raise --kv-memory")?;
        logits = Some(model.forward(plan.tokens(), &plan)?);
        plan.commit()?;
    }
    let mut logits = logits.context("the prompt is empty")?;
    answer.prefill = start.elapsed();

    let start = Instant::now();
    loop {
        let token = sampler.sample(&logits.get(0)?)?;
        answer.tokens.push(token);
        if !args.ignore_eos && loaded.eos.contains(&token) {
            answer.finish_reason = "stop";
            break;
        }
        if let Some(piece) = stream.push(token)? {
            emit(args, &mut answer.text, &piece);
        }
        if answer.tokens.len() == args.max_tokens {
            break;
        }
        if cache.len(sequence)? == model.context_length() {
            break;
        }
        let plan = match cache.plan(&[Feed::new(sequence, &[token])]) {
            // What has been said stands; there is only no room to go on.
            Err(full @ Error::OutOfBlocks { .. }) => {
                eprintln!("stopped early: {full}; raise --kv-memory");
                break;
            }
            plan => plan?,
        };
        logits = model.forward(plan.tokens(), &plan)?;
        plan.commit()?;
    }
    answer.decode = start.elapsed();
    emit(args, &mut answer.text, &stream.finish()?);
    Ok(answer)
}

/// Appends a piece of text to the answer and shows it at once.
fn emit(args: &Args, text: &mut String, piece: &str) {
    text.push_str(piece);
    if !args.json {
        show(piece);
    }
}

/// Writes to stdout at once. Who reads only the beginning closes the pipe: that is no error.
fn show(text: &str) {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if let Err(error) = written {
        let closed = error.kind() == std::io::ErrorKind::BrokenPipe;
        if !closed {
            eprintln!("error: cannot write the answer: {error}");
        }
        std::process::exit(if closed { 0 } else { 1 });
    }
}

fn report(args: &Args, cache: &PagedKvCache, prompt: &[u32], answer: &Answer) {
    let usage = cache.usage();
    let total =
        |f: fn(&candle_paged_attn::cache::GroupUsage) -> u64| usage.iter().map(f).sum::<u64>();
    let used = total(|u| u.blocks_used as u64);
    let bytes = total(|u| u.blocks_used as u64 * u.bytes_per_block);
    let utilization = usage.iter().map(|u| u.utilization).sum::<f64>() / usage.len() as f64;
    let prefill = prompt.len() as f64 / answer.prefill.as_secs_f64();
    // The first token comes from the prompt's logits: only the others are decode steps.
    let decode = (answer.tokens.len() - 1) as f64 / answer.decode.as_secs_f64();
    if args.json {
        let object = json!({
            "prompt_tokens": prompt,
            "tokens": answer.tokens,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "prefill_tok_per_s": prefill,
            "decode_tok_per_s": decode,
            "kv": {
                "block_size": cache.block_size(),
                "blocks_total": total(|u| u.blocks_total as u64),
                "blocks_used": used,
                "bytes_per_block": total(|u| u.bytes_per_block),
                "utilization": utilization,
            },
        });
        show(&format!("{object}\n"));
    } else {
        show("\n");
        eprintln!(
            "{} prompt tokens at {prefill:.1}/s, {} generated at {decode:.1}/s; KV cache: {used} of {} \
             blocks of {} tokens, {}, {:.1} % of their rows filled",
            prompt.len(),
            answer.tokens.len(),
            total(|u| u.blocks_total as u64),
            cache.block_size(),
            ByteSize::b(bytes),
            100.0 * utilization,
        );
    }
}
