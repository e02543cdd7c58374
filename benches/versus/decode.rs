//! Decode: a memory stream, so a plain read of as many bytes is the limit.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn, flash_attn_varlen_cpu};
use candle_nn::ops::softmax_last_dim;

use crate::floors;
use crate::support::batch::{Batch, Shape};
use crate::support::report::Report;
use crate::support::rows::Row;
use crate::support::turns::{take_turns, timed};

pub fn bench(report: &mut Report) -> Result<()> {
    let many = Shape::decode(16, 2048);
    let dtype = |dtype| Shape { dtype, ..many };
    let heads = |heads, kv_heads, dim| Shape {
        heads,
        kv_heads,
        dim,
        ..many
    };
    let rows = [
        ("16 x 2048, f32", many, 0.90),
        ("16 x 2048, bf16", dtype(DType::BF16), 0.80),
        ("16 x 2048, f16", dtype(DType::F16), 0.72),
        ("16 x 2048, f32, 9/3 heads of 64", heads(9, 3, 64), 0.80),
        ("16 x 2048, f32, 32/4 heads", heads(32, 4, 128), 0.70),
        ("1 x 32768, f32", Shape::decode(1, 32768), 0.92),
    ];
    for (name, shape, goal) in rows {
        let name = format!("decode {name} / plain read");
        if report.wants(&name) {
            let batch = Batch::new(shape)?;
            let times = take_turns(
                report.rounds,
                &mut [
                    timed(|| batch.attend()),
                    timed(|| floors::read(&[&batch.k, &batch.v])),
                ],
            )?;
            report.ratio(&name, goal, &times, 1, 1.0);
        }
    }
    against_candle(report)?;
    block_sizes(report)
}

/// The rows whose peer is another way to compute the same.
fn against_candle(report: &mut Report) -> Result<()> {
    let heads = |heads, kv_heads, dim| Shape {
        heads,
        kv_heads,
        dim,
        ..Shape::decode(16, 2048)
    };
    let rows = [
        ("16 x 2048, f32", heads(32, 8, 128), 6.0),
        ("16 x 2048, f32, 9/3 heads of 64", heads(9, 3, 64), 6.0),
        ("16 x 2048, f32, 32/4 heads", heads(32, 4, 128), 6.0),
        ("1 x 32768, f32", Shape::decode(1, 32768), 14.0),
    ];
    for (name, shape, goal) in rows {
        let (flash, naive, gather) = (
            format!("decode {name} / candle flash"),
            format!("decode {name} / matmul + softmax"),
            format!("decode {name} / gather + matmul"),
        );
        if ![&flash, &naive, &gather]
            .iter()
            .any(|name| report.wants(name))
        {
            continue;
        }
        let batch = Batch::new(shape)?;
        let (k, v) = batch.contiguous()?;
        // The usual layout of a growing cache, `[batch, kv_heads, len, dim]`.
        let usual = |x: &Tensor| x.transpose(1, 2)?.contiguous();
        let (k_usual, v_usual) = (usual(&k)?, usual(&v)?);
        let times = take_turns(
            report.rounds.min(7),
            &mut [
                timed(|| batch.attend()),
                timed(|| candle_flash(&batch, &k, &v)),
                timed(|| matmuls(&batch, &k_usual, &v_usual)),
                timed(|| {
                    let (k, v) = batch.contiguous()?;
                    matmuls(&batch, &usual(&k)?, &usual(&v)?)
                }),
            ],
        )?;
        report.ratio(&flash, goal, &times, 1, 1.0);
        report.ratio(&naive, 1.0, &times, 2, 1.0);
        report.ratio(&gather, 1.0, &times, 3, 1.0);
    }
    Ok(())
}

/// candle's own attention over contiguous K/V: the single-sequence kernel, or the one for
/// several.
fn candle_flash(batch: &Batch, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let s = batch.shape;
    if s.sequences == 1 {
        let mask = AttnMask::causal_with_offset(s.len - s.rows);
        let q = batch.q.unsqueeze(0)?;
        return Ok(flash_attn::<f32>(&q, k, v, s.scale(), mask, None, None)?);
    }
    let lens = |n: usize| Tensor::new(vec![n as u32; s.sequences], &Device::Cpu);
    Ok(flash_attn_varlen_cpu(
        &batch.q,
        &k.flatten(0, 1)?,
        &v.flatten(0, 1)?,
        None,
        &lens(s.rows)?,
        &lens(s.len)?,
        s.rows,
        s.len,
        s.scale(),
        true,
        None,
        None,
    )?)
}

/// What models without a kernel do: matmul, softmax, matmul; at its best, with the heads of a
/// group as the rows of a product and not as copies of K/V, which are
/// `[batch, kv_heads, len, dim]`.
fn matmuls(batch: &Batch, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let s = batch.shape;
    let group = s.heads / s.kv_heads;
    let q = batch.q.reshape((s.sequences, s.kv_heads, group, s.dim))?;
    let scores = (q.matmul(&k.transpose(D::Minus2, D::Minus1)?)? * f64::from(s.scale()))?;
    Ok(softmax_last_dim(&scores)?.matmul(v)?)
}

/// Small blocks must cost nothing.
fn block_sizes(report: &mut Report) -> Result<()> {
    let name = "decode 16 x 2048, f32, blocks of 16 / of 256, time";
    if !report.wants(name) {
        return Ok(());
    }
    let batch = |block_size| {
        Batch::new(Shape {
            block_size,
            ..Shape::decode(16, 2048)
        })
    };
    let (small, large) = (batch(16)?, batch(256)?);
    let times = take_turns(
        report.rounds,
        &mut [timed(|| small.attend()), timed(|| large.attend())],
    )?;
    let pairs = times.seconds[0].iter().zip(&times.seconds[1]);
    report.push(Row {
        name: name.into(),
        values: pairs.map(|(small, large)| small / large).collect(),
        goal: Some(1.07),
        higher_is_better: false,
        dropped: times.dropped,
        note: String::new(),
    });
    Ok(())
}
