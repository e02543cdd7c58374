//! 32 requests in a pool that holds 8 of them at full reserved length, against a reservation
//! for each and against stock candle one by one.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_paged_attn::engine::EngineConfig;

use crate::engine::{Model, Run, request, run};
use crate::setup;
use crate::stock::Stock;
use crate::support::report::Report;
use crate::support::rows::Row;

const REQUESTS: usize = 32;
const NEW: usize = 128;
/// Tokens that a cache of one tensor per request reserves for each: what a server lets a
/// request grow to, and not what it will need.
const RESERVED: usize = 2048;
/// Reservations that fit into the pool.
const SLOTS: usize = 8;
/// Stock answers one of this many requests in a round: one by one they take minutes.
const EVERY: usize = 8;

const IN_FLIGHT: &str = "requests in flight, paged / reserved to 2,048 tokens";
const RATE: &str = "tokens/s, 32 requests / stock one by one";

pub fn bench(report: &mut Report, model: &Model, gguf: &Path) -> Result<()> {
    if !report.wants(IN_FLIGHT) && !report.wants(RATE) {
        return Ok(());
    }
    let prompts = (0..REQUESTS)
        // 64 to 512 tokens, in an order that mixes short and long.
        .map(|i| model.prompt(64 + (i * 13 % REQUESTS) * 448 / (REQUESTS - 1), i))
        .collect::<Result<Vec<_>>>()?;
    let ours = |sequences: usize| -> Result<Run> {
        let config = EngineConfig::default().with_max_sequences(sequences);
        let mut engine = model.engine(SLOTS * RESERVED, config)?;
        for prompt in &prompts {
            engine.add_request(request(prompt, NEW))?;
        }
        run(&mut engine, |_| true)
    };
    // Counts, not times: the rounds of the rate below would only repeat them.
    let paged = ours(REQUESTS)?;
    if report.wants(IN_FLIGHT) {
        let reserved = ours(SLOTS)?;
        report.push(Row {
            name: IN_FLIGHT.into(),
            values: vec![paged.in_flight / reserved.in_flight],
            goal: Some(3.0),
            higher_is_better: true,
            dropped: 0,
            note: format!("{:.1} against {:.1}", paged.in_flight, reserved.in_flight),
        });
    }
    if !report.wants(RATE) {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    setup::write_hf_folder(gguf, folder.path())?;
    let stock = Stock::from_hf_folder(folder.path())?;
    let one_by_one = |first: usize| -> Result<Duration> {
        let start = Instant::now();
        for prompt in prompts.iter().skip(first).step_by(EVERY) {
            stock.start(prompt)?.decode(NEW - 1)?;
        }
        Ok(start.elapsed())
    };
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64();
    let mut rates = (Vec::new(), Vec::new());
    for round in 0..report.rounds.min(EVERY) {
        let ours = ours(REQUESTS)?;
        rates.0.push(rate(ours.tokens, ours.time));
        rates
            .1
            .push(rate(REQUESTS / EVERY * NEW, one_by_one(round)?));
    }
    let pairs = rates.0.iter().zip(&rates.1);
    report.push(Row {
        name: RATE.into(),
        values: pairs.map(|(ours, stock)| ours / stock).collect(),
        goal: Some(3.0),
        higher_is_better: true,
        dropped: 0,
        note: format!("{:.0} against {:.0} new tokens/s", rates.0[0], rates.1[0]),
    });
    Ok(())
}
