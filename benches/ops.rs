//! Times of single ops, for watching changes; `versus` has the comparisons.
//!
//! ```text
//! cargo bench --bench ops -- [FILTER]
//! ```

#[path = "ops/linears.rs"]
mod linears;
#[path = "support/mod.rs"]
mod support;

use std::hint::black_box;
use std::time::Duration;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::block::{BlockAllocator, Namespace};
use candle_paged_attn::cache::{AddOptions, CacheConfig, CacheSpec, Feed, PagedKvCache};
use candle_paged_attn::ops::{
    AttentionOptions, copy_blocks, gather_kv, merge_states, paged_attention_state, write_kv,
};
use criterion::Criterion;

use support::batch::{Batch, Shape};

fn main() -> Result<()> {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20)
        .without_plots()
        .configure_from_args();
    attention(&mut criterion)?;
    rows(&mut criterion)?;
    blocks(&mut criterion)?;
    steps(&mut criterion)?;
    linears::linears(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}

fn attention(c: &mut Criterion) -> Result<()> {
    let decode = Shape::decode(8, 1024);
    for (name, shape) in [
        ("decode 8 x 1024 f32", decode),
        (
            "decode 8 x 1024 bf16",
            Shape {
                dtype: DType::BF16,
                ..decode
            },
        ),
        ("prefill 512 f32", Shape::prefill(512, 512)),
    ] {
        let batch = Batch::new(shape)?;
        c.bench_function(name, |b| b.iter(|| black_box(batch.attend())));
    }
    let batch = Batch::new(decode)?;
    let options = AttentionOptions::new(decode.scale());
    let state = paged_attention_state(&batch.q, &batch.k, &batch.v, &batch.table, &options)?;
    c.bench_function("merge_states 8 x 32 heads", |b| {
        b.iter(|| black_box(merge_states(&state, &state)));
    });
    Ok(())
}

fn rows(c: &mut Criterion) -> Result<()> {
    let batch = Batch::new(Shape::decode(1, 4096))?;
    let s = batch.shape;
    let mut table = candle_paged_attn::ops::PageTable::new(s.block_size)?;
    let pages: Vec<u32> = (0..256 / s.block_size as u32).collect();
    let slots: Vec<i64> = (0..256).collect();
    table.push(&pages, 0, 256, &slots)?;
    let new = Tensor::rand(-1f32, 1.0, (256, s.kv_heads, s.dim), &Device::Cpu)?;
    c.bench_function("write_kv 256 rows", |b| {
        b.iter(|| black_box(write_kv(&batch.k, &batch.v, &new, &new, &table)));
    });
    let pairs: Vec<(u32, u32)> = (0..16).map(|i| (i, 128 + i)).collect();
    c.bench_function("copy_blocks 16", |b| {
        b.iter(|| black_box(copy_blocks(&[&batch.k, &batch.v], &pairs)));
    });
    c.bench_function("gather_kv 4096 tokens", |b| {
        b.iter(|| black_box(gather_kv(&batch.k, &batch.v, &batch.table, 0)));
    });
    Ok(())
}

fn blocks(c: &mut Criterion) -> Result<()> {
    const BLOCK: usize = 16;
    let mut blocks = BlockAllocator::new(10_000, BLOCK)?;
    let mut out = Vec::with_capacity(1);
    c.bench_function("allocate + free", |b| {
        b.iter(|| {
            let taken = blocks.allocate(1, &mut out);
            for block in out.drain(..) {
                black_box(blocks.release(block)).ok();
            }
            taken
        });
    });
    let prompt: Vec<u32> = (0..4096).collect();
    let namespace = Namespace::default();
    let mut table = Vec::new();
    blocks.allocate(prompt.len() / BLOCK, &mut table)?;
    let mut parent = None;
    for (tokens, &block) in prompt.chunks(BLOCK).zip(&table) {
        parent = blocks.register(&namespace, parent, tokens, block)?;
    }
    c.bench_function("look up 256 blocks", |b| {
        b.iter(|| black_box(blocks.lookup(&namespace, &prompt, table.len())));
    });
    Ok(())
}

fn steps(c: &mut Criterion) -> Result<()> {
    const LEN: usize = 1000;
    const SEQUENCES: usize = 64;
    let spec = CacheSpec::uniform(1, 1, 8, DType::F32)?;
    let config = CacheConfig::tokens(SEQUENCES * (LEN + 64));
    let cache = PagedKvCache::new(&spec, &config, &Device::Cpu)?;
    let mut ids = Vec::new();
    for i in 0..SEQUENCES as u32 {
        let prompt: Vec<u32> = (0..LEN as u32).map(|t| t + 31 * i).collect();
        let id = cache.add(&prompt, AddOptions::default())?.id;
        cache.plan(&[Feed::new(id, &prompt)])?.commit()?;
        ids.push(id);
    }
    c.bench_function("plan + commit 64 x 1000, then rewind", |b| {
        b.iter(|| -> Result<()> {
            let feeds: Vec<_> = ids.iter().map(|&id| Feed::new(id, &[7])).collect();
            cache.plan(&feeds)?.commit()?;
            for &id in &ids {
                cache.truncate(id, LEN)?;
            }
            Ok(())
        });
    });
    Ok(())
}
