//! What the engine itself takes: scheduler, plan and sampling, and the prefix cache where
//! nothing is shared.

use std::time::Duration;

use anyhow::Result;
use candle_paged_attn::engine::EngineConfig;

use crate::engine::{Model, request, run};
use crate::support::report::Report;
use crate::support::rows::{Row, median};
use crate::support::turns::{Contender, take_turns};

const BATCH: usize = 32;
const STEPS: usize = 16;

const OVERHEAD: &str = "engine's share of a decode step, batch 32";
const INDEX: &str = "nothing shared: time with prefix cache / without";

pub fn bench(report: &mut Report, model: &Model) -> Result<()> {
    if report.wants(OVERHEAD) {
        share_of_step(report, model)?;
    }
    if report.wants(INDEX) {
        prefix_cache(report, model)?;
    }
    Ok(())
}

/// Step less forward pass, over step.
fn share_of_step(report: &mut Report, model: &Model) -> Result<()> {
    let config = EngineConfig::default().with_max_sequences(BATCH);
    let mut engine = model.engine(16_384, config)?;
    for i in 0..BATCH {
        let prompt = model.prompt(100, i)?;
        engine.add_request(request(&prompt, STEPS * (report.rounds + 2)))?;
    }
    // The prompts, and a round to warm up.
    run(&mut engine, |run| run.tokens < BATCH * STEPS)?;
    let (mut shares, mut others) = (Vec::new(), Vec::new());
    for _ in 0..report.rounds {
        let run = run(&mut engine, |run| run.tokens < BATCH * STEPS)?;
        let other = run.time - run.forward;
        shares.push(other.as_secs_f64() / run.time.as_secs_f64());
        others.push(1e3 * other.as_secs_f64() / STEPS as f64);
    }
    let (share, other) = (median(&shares), median(&others));
    report.push(Row {
        name: OVERHEAD.into(),
        values: shares,
        goal: Some(0.03),
        higher_is_better: false,
        dropped: 0,
        note: format!("{other:.2} of {:.1} ms a step", other / share),
    });
    Ok(())
}

/// The same requests with and without the index of prefixes, which finds nothing.
fn prefix_cache(report: &mut Report, model: &Model) -> Result<()> {
    let prompts = (0..8)
        .map(|i| model.prompt(96, i))
        .collect::<Result<Vec<_>>>()?;
    let mut engines = Vec::new();
    for prefix_cache in [true, false] {
        let mut config = EngineConfig::default();
        config.prefix_cache = prefix_cache;
        engines.push(model.engine(4096, config)?);
    }
    let mut contenders: Vec<Contender<'_>> = engines
        .iter_mut()
        .map(|engine| -> Contender<'_> {
            Box::new(|| -> Result<Duration> {
                engine.cache().clear();
                for prompt in &prompts {
                    engine.add_request(request(prompt, 32))?;
                }
                Ok(run(engine, |_| true)?.time)
            })
        })
        .collect();
    let times = take_turns(2 * report.rounds + 1, &mut contenders)?;
    let ms = |i: usize| 1e3 * median(&times.seconds[i]);
    let pairs = times.seconds[0].iter().zip(&times.seconds[1]);
    report.push(Row {
        name: INDEX.into(),
        values: pairs.map(|(on, off)| on / off).collect(),
        goal: Some(1.01),
        higher_is_better: false,
        dropped: times.dropped,
        note: format!("{:.0} ms against {:.0} ms", ms(0), ms(1)),
    });
    Ok(())
}
