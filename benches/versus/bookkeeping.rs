//! Blocks and step plans: absolute times of one thread.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{DType, Device};
use candle_paged_attn::block::{BlockAllocator, Namespace};
use candle_paged_attn::cache::{AddOptions, CacheConfig, CacheSpec, Feed, PagedKvCache};

use crate::support::report::Report;
use crate::support::rows::Row;
use crate::support::turns::{Contender, Times, take_turns, timed};

const BLOCK: usize = 16;

pub fn bench(report: &mut Report) -> Result<()> {
    allocate_and_free(report)?;
    look_up(report)?;
    look_up_in_memory(report)?;
    plan_and_commit(report)
}

fn absolute(report: &mut Report, name: &str, goal: f64, unit: f64, times: &Times) {
    report.push(Row {
        name: name.into(),
        values: times.seconds[0].iter().map(|t| t / unit).collect(),
        goal: Some(goal),
        higher_is_better: false,
        dropped: times.dropped,
        note: String::new(),
    });
}

/// Blocks one by one, of a pool as large as that of a server.
fn allocate_and_free(report: &mut Report) -> Result<()> {
    const NAME: &str = "allocate + free a block, ns";
    const N: usize = 100_000;
    if !report.wants(NAME) {
        return Ok(());
    }
    let mut blocks = BlockAllocator::new(10_000, BLOCK)?;
    let mut out = Vec::with_capacity(1);
    let run = timed(move || {
        for _ in 0..N {
            blocks.allocate(1, &mut out)?;
            for block in out.drain(..) {
                blocks.release(block)?;
            }
        }
        Ok(())
    });
    let times = take_turns(report.rounds, &mut [run])?;
    absolute(report, NAME, 20.0, 1e-9 * N as f64, &times);
    Ok(())
}

/// Prompts whose blocks are all findable.
struct Cached {
    blocks: BlockAllocator,
    prompts: Vec<Vec<u32>>,
}

impl Cached {
    /// `prompts` prompts of [`Self::LEN`] tokens.
    fn new(prompts: usize) -> Result<Self> {
        let mut blocks = BlockAllocator::new(prompts * Self::BLOCKS, BLOCK)?;
        let prompts: Vec<Vec<u32>> = (0..prompts as u32)
            .map(|p| (0..Self::LEN as u32).map(|t| p * 7919 + t).collect())
            .collect();
        for prompt in &prompts {
            let mut table = Vec::new();
            blocks.allocate(Self::BLOCKS, &mut table)?;
            let mut parent = None;
            for (tokens, &block) in prompt.chunks(BLOCK).zip(&table) {
                parent = blocks.register(&Namespace::default(), parent, tokens, block)?;
            }
        }
        Ok(Self { blocks, prompts })
    }

    const LEN: usize = 4096;
    const BLOCKS: usize = Self::LEN / BLOCK;

    fn look_up(&self) -> Result<()> {
        for prompt in &self.prompts {
            let hits = (self.blocks).lookup(&Namespace::default(), prompt, Self::BLOCKS);
            anyhow::ensure!(hits.len() == Self::BLOCKS, "{} hits", hits.len());
        }
        Ok(())
    }
}

/// Prompts that the caches hold.
fn look_up(report: &mut Report) -> Result<()> {
    const NAME: &str = "look up a cached block of 16 tokens, ns";
    const PROMPTS: usize = 32;
    if !report.wants(NAME) {
        return Ok(());
    }
    let cached = Cached::new(PROMPTS)?;
    let times = take_turns(report.rounds, &mut [timed(|| cached.look_up())])?;
    let looked_up = (PROMPTS * Cached::BLOCKS) as f64;
    absolute(report, NAME, 60.0, 1e-9 * looked_up, &times);
    Ok(())
}

/// More prompts than any cache holds: 64 MB of tokens, which are compared with as many in the
/// index.
fn look_up_in_memory(report: &mut Report) -> Result<()> {
    const NAME: &str = "look up 64 MB of cached tokens / plain read of both sides";
    const PROMPTS: usize = 4096;
    if !report.wants(NAME) {
        return Ok(());
    }
    let cached = Cached::new(PROMPTS)?;
    let read = timed(|| {
        let tokens = cached.prompts.iter().chain(&cached.prompts).flatten();
        Ok(tokens.fold(0, |sum, &token| sum ^ token))
    });
    let times = take_turns(
        report.rounds.min(7),
        &mut [timed(|| cached.look_up()), read],
    )?;
    report.ratio(NAME, None, &times, 1, 1.0);
    Ok(())
}

/// 256 sequences of 4,000 tokens, one new token each; no forward pass.
fn plan_and_commit(report: &mut Report) -> Result<()> {
    const NAME: &str = "plan + commit, 256 sequences of 4000 tokens, µs";
    const SEQUENCES: usize = 256;
    const LEN: usize = 4000;
    if !report.wants(NAME) {
        return Ok(());
    }
    // The tensors are of no concern: one layer of the smallest rows.
    let spec = CacheSpec::uniform(1, 1, 8, DType::F32)?;
    let config = CacheConfig::tokens(SEQUENCES * (LEN + 64)).with_block_size(BLOCK);
    let cache = PagedKvCache::new(&spec, &config, &Device::Cpu)?;
    let prompt: Vec<u32> = (0..LEN as u32).collect();
    let mut ids = Vec::new();
    for i in 0..SEQUENCES as u32 {
        let prompt: Vec<u32> = prompt.iter().map(|t| t + i * 31).collect();
        let id = cache.add(&prompt, AddOptions::default())?.id;
        let feed = Feed::new(id, &prompt);
        cache.plan(&[feed])?.commit()?;
        ids.push(id);
    }
    let mut token = 0u32;
    let contender: Contender<'_> = Box::new(|| {
        token += 1;
        let tokens = [token];
        let feeds: Vec<_> = ids.iter().map(|&id| Feed::new(id, &tokens)).collect();
        let start = Instant::now();
        cache.plan(&feeds)?.commit()?;
        let time = start.elapsed();
        // Back to where it was: every round does the same.
        for &id in &ids {
            cache.truncate(id, LEN)?;
        }
        Ok::<Duration, anyhow::Error>(time)
    });
    let times = take_turns(report.rounds, &mut [contender])?;
    absolute(report, NAME, 200.0, 1e-6, &times);
    Ok(())
}
