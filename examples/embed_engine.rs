//! An engine in a loop of one's own: requests join while others run.
//!
//! ```text
//! cargo run --release --example embed_engine
//! ```

#[path = "support/setup.rs"]
mod setup;
#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;

use anyhow::Result;
use candle_paged_attn::engine::{Answer, EngineConfig, Request};
use candle_paged_attn::load::chat::Message;
use clap::Parser;

/// An engine in a loop of one's own.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: setup::ModelArgs,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let loaded = args.model.load()?;
    let mut engine = args.model.engine(&loaded, EngineConfig::default())?;

    let mut questions = [
        "What is the capital of France?",
        "Name a prime number.",
        "Say hello.",
    ]
    .into_iter();
    let mut answers: BTreeMap<_, Answer> = BTreeMap::new();
    let mut step = 0;
    loop {
        // Every fourth step somebody asks.
        if step % 4 == 0
            && let Some(question) = questions.next()
        {
            let prompt = loaded.chat(&[Message::new("user", question)])?;
            let id = engine.add_request(Request::new(prompt).with_max_tokens(24))?;
            println!("step {step}: {id}: {question}");
        }
        if !engine.has_work() && questions.len() == 0 {
            return Ok(());
        }
        for output in engine.step()? {
            let (id, last) = (output.request, output.report.is_some());
            answers.entry(id).or_default().push(output);
            if last {
                println!("step {step}: {id}: {}", answers[&id].samples[0].text);
            }
        }
        step += 1;
    }
}
