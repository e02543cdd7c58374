//! Decode of sequences behind one long prompt: its K/V read once, against once for each.
//!
//! What is left without the reads is arithmetic, the same on both sides: the more query heads a
//! KV head serves, and the shorter its rows are, the less there is to gain.

use anyhow::{Result, ensure};
use candle_core::DType;
use candle_paged_attn::ops::{
    AttentionOptions, Cascade, Mask, PageTable, cascade_attention, paged_attention,
};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::support::batch::random;
use crate::support::report::Report;
use crate::support::turns::{take_turns, timed};

const BLOCK: usize = 16;
const SEQUENCES: usize = 16;
const SHARED: usize = 4096;
const OWN: usize = 64;

pub fn bench(report: &mut Report) -> Result<()> {
    // Llama 2 7B, Llama 3 8B, SmolLM2-135M.
    for (heads, kv_heads, dim) in [(32, 32, 128), (32, 8, 128), (9, 3, 64)] {
        for dtype in [DType::F32, DType::BF16] {
            let name = format!("cascade, {heads} and {kv_heads} heads of {dim}, {dtype:?}");
            if report.wants(&name) {
                measure(report, &name, (heads, kv_heads, dim), dtype)?;
            }
        }
    }
    Ok(())
}

fn measure(
    report: &mut Report,
    name: &str,
    (heads, kv_heads, dim): (usize, usize, usize),
    dtype: DType,
) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(5);
    let (shared, own) = (SHARED / BLOCK, OWN / BLOCK);
    let blocks = shared + SEQUENCES * own;
    let mut order: Vec<u32> = (0..blocks as u32).collect();
    order.shuffle(&mut rng);
    let (prefix, rest) = order.split_at(shared);
    let mut table = PageTable::new(BLOCK)?;
    for own in rest.chunks(own) {
        table.push(&[prefix, own].concat(), 0, SHARED + OWN, &[-1])?;
    }
    let q = random((SEQUENCES, heads, dim), dtype, &mut rng)?;
    let cache = (blocks, BLOCK, kv_heads, dim);
    let (k, v) = (
        random(cache, dtype, &mut rng)?,
        random(cache, dtype, &mut rng)?,
    );
    let options = AttentionOptions::new(1.0 / (dim as f32).sqrt());
    let mut cascade = Cascade::default();
    ensure!(
        cascade.find(&table, Mask::Causal, Cascade::ROW_COST)?,
        "nothing is shared"
    );
    let mut contenders = [
        timed(|| Ok(cascade_attention(&q, &k, &v, &cascade, &options)?)),
        timed(|| Ok(paged_attention(&q, &k, &v, &table, &options)?)),
    ];
    let times = take_turns(4 * report.rounds + 1, &mut contenders)?;
    report.ratio(name, 3.0, &times, 1, 1.0);
    Ok(())
}
