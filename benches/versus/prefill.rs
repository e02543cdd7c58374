//! Prefill: matrix products, so their rate is the limit. Only what the causal mask leaves
//! counts.

use anyhow::Result;
use candle_nn::attention::{AttnMask, flash_attn};

use crate::floors;
use crate::support::batch::{Batch, Shape};
use crate::support::report::Report;
use crate::support::turns::{take_turns, timed};

pub fn bench(report: &mut Report) -> Result<()> {
    let rows = [
        ("2048 tokens", Shape::prefill(2048, 2048), 0.85),
        ("last 256 of 2048", Shape::prefill(2048, 256), 0.90),
    ];
    for (name, shape, goal) in rows {
        let name = format!("prefill {name}, f32 / gemm");
        if !report.wants(&name) {
            continue;
        }
        let batch = Batch::new(shape)?;
        let (a, b) = floors::gemm_operands()?;
        let times = take_turns(
            report.rounds,
            &mut [timed(|| batch.attend()), timed(|| Ok(a.matmul(&b)?))],
        )?;
        let factor = shape.flops() / floors::gemm_flops();
        report.ratio(&name, goal, &times, 1, factor);
    }
    against_candle(report)
}

fn against_candle(report: &mut Report) -> Result<()> {
    let name = "prefill 2048 tokens, f32 / candle flash";
    if !report.wants(name) {
        return Ok(());
    }
    let shape = Shape::prefill(2048, 2048);
    let batch = Batch::new(shape)?;
    let (k, v) = batch.contiguous()?;
    let q = batch.q.unsqueeze(0)?;
    let times = take_turns(
        report.rounds.min(5),
        &mut [
            timed(|| batch.attend()),
            timed(|| {
                let mask = AttnMask::causal();
                Ok(flash_attn::<f32>(
                    &q,
                    &k,
                    &v,
                    shape.scale(),
                    mask,
                    None,
                    None,
                )?)
            }),
        ],
    )?;
    report.ratio(name, 10.0, &times, 1, 1.0);
    Ok(())
}
