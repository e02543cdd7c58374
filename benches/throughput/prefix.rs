//! A system prompt that many questions share.

use std::time::Duration;

use anyhow::Result;
use candle_paged_attn::engine::EngineConfig;

use crate::engine::{Model, request, run};
use crate::support::report::Report;
use crate::support::rows::{Row, median};
use crate::support::turns::{Contender, take_turns};

const SYSTEM: usize = 512;
const QUESTION: usize = 32;
const QUESTIONS: usize = 16;
const NEW: usize = 32;
const POOL: usize = 16_384;

const FIRST: &str = "time to first token, system prompt cached / not";
const BLOCKS: &str = "blocks of 16 questions, system prompt shared / not";

pub fn bench(report: &mut Report, model: &Model) -> Result<()> {
    let system = model.prompt(SYSTEM, 0)?;
    let questions = (1..=QUESTIONS)
        .map(|i| Ok([system.clone(), model.prompt(QUESTION, i)?].concat()))
        .collect::<Result<Vec<_>>>()?;
    if report.wants(FIRST) {
        first_token(report, model, &questions)?;
    }
    if report.wants(BLOCKS) {
        let blocks = |prefix_cache: bool| -> Result<usize> {
            let mut config = EngineConfig::default().with_max_sequences(QUESTIONS);
            config.prefix_cache = prefix_cache;
            let mut engine = model.engine(POOL, config)?;
            for question in &questions {
                engine.add_request(request(question, NEW))?;
            }
            Ok(run(&mut engine, |_| true)?.most_blocks)
        };
        let (shared, alone) = (blocks(true)?, blocks(false)?);
        report.push(Row {
            name: BLOCKS.into(),
            values: vec![shared as f64 / alone as f64],
            goal: Some(0.25),
            higher_is_better: false,
            dropped: 0,
            note: format!("{shared} against {alone} blocks at the peak"),
        });
    }
    Ok(())
}

/// One question at a time, each asked once: the first question fills the warm engine's cache.
fn first_token(report: &mut Report, model: &Model, questions: &[Vec<u32>]) -> Result<()> {
    let config = EngineConfig::default().with_max_batch_tokens(SYSTEM + QUESTION);
    let mut warm = model.engine(POOL, config.clone())?;
    let mut cold = model.engine(POOL, config)?;
    let (mut next_warm, mut next_cold) = (questions.iter().cycle(), questions.iter().cycle());
    let mut ask = |forget: bool| -> Result<Duration> {
        let (engine, next) = match forget {
            true => (&mut cold, &mut next_cold),
            false => (&mut warm, &mut next_warm),
        };
        if forget {
            engine.cache().clear();
        }
        let question = next.next().map_or(&[][..], Vec::as_slice);
        engine.add_request(request(question, 1))?;
        Ok(run(engine, |_| true)?.time)
    };
    ask(false)?;
    let ask = std::cell::RefCell::new(ask);
    let mut contenders: [Contender<'_>; 2] = [
        Box::new(|| ask.borrow_mut()(false)),
        Box::new(|| ask.borrow_mut()(true)),
    ];
    // A question that comes again would be cached whole.
    let rounds = report.rounds.min(QUESTIONS / 2);
    let times = take_turns(rounds, &mut contenders)?;
    let ms = |i: usize| 1e3 * median(&times.seconds[i]);
    let pairs = times.seconds[0].iter().zip(&times.seconds[1]);
    report.push(Row {
        name: FIRST.into(),
        values: pairs.map(|(warm, cold)| warm / cold).collect(),
        goal: Some(0.15),
        higher_is_better: false,
        dropped: times.dropped,
        note: format!("{:.0} ms against {:.0} ms", ms(0), ms(1)),
    });
    Ok(())
}
