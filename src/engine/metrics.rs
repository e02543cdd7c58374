//! What an engine says about itself.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::scheduler::{Chunk, Scheduler};
use super::sequence::Sequence;

/// Events over which averages are taken.
const WINDOW: usize = 256;

/// The figures of an engine at one moment.
///
/// Averages are over the last 256 events: requests for the hit rate and the first token,
/// tokens for the time between two, steps for the tokens per second.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Requests that have not ended.
    pub requests: usize,
    /// Sequences that hold blocks.
    pub running: usize,
    /// Sequences that have never run and wait to.
    pub waiting: usize,
    /// Sequences that lost their blocks and wait to compute them again.
    pub preempted: usize,
    /// Sequences that wait in host memory to come back.
    pub swapped: usize,
    /// Requests that have ended.
    pub finished: u64,
    /// Steps of the model.
    pub steps: u64,
    /// Tokens computed, those of prompts and those computed again included.
    pub computed_tokens: u64,
    /// Times that a sequence was preempted.
    pub preemptions: u64,
    /// Of these, times that it was moved to host memory.
    pub swaps: u64,
    /// Times that a request was put off by a step because its prefix was being computed.
    pub deferrals: u64,
    /// Blocks of the pool, all groups together.
    pub blocks_total: usize,
    /// Blocks in use, shared ones counted once.
    pub blocks_used: usize,
    /// Unused blocks that can still be found by their prefix.
    pub blocks_cached: usize,
    /// Unused blocks without content.
    pub blocks_free: usize,
    /// Rows that hold a token over rows of the blocks in use, 0 to 1; 1 if none is used.
    pub utilization: f64,
    /// Prompt tokens of the requests that have run, each counted once.
    pub prompt_tokens: u64,
    /// Of these, tokens that were found in the cache.
    pub cached_tokens: u64,
    /// The same share in recent requests, 0 to 1.
    pub hit_rate: f64,
    /// Tokens of sequences that came back after a preemption.
    pub resumed_tokens: u64,
    /// Of these, tokens that were still cached.
    pub resumed_cached_tokens: u64,
    /// From submission to the first token, on average.
    pub first_token: Duration,
    /// From one token of a request to the next, on average.
    pub inter_token: Duration,
    /// Tokens computed per second, in recent steps.
    pub tokens_per_s: f64,
}

/// The last values of something.
#[derive(Debug)]
struct Window<T>(VecDeque<T>);

impl<T> Default for Window<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> Window<T> {
    fn push(&mut self, value: T) {
        if self.0.len() == WINDOW {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }
}

impl Window<Duration> {
    fn mean(&self) -> Duration {
        let sum: Duration = self.0.iter().sum();
        sum.checked_div(self.0.len() as u32).unwrap_or_default()
    }
}

/// What is counted while the engine runs.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    pub finished: u64,
    steps: u64,
    computed: u64,
    first_token: Window<Duration>,
    inter_token: Window<Duration>,
    /// Prompt tokens and cached tokens of requests.
    hits: Window<(usize, usize)>,
    /// End of a step and its tokens.
    recent: Window<(Instant, usize)>,
}

impl Metrics {
    pub(super) fn step(&mut self, chunks: &[Chunk]) {
        let rows = chunks.iter().map(|chunk| chunk.rows).sum();
        self.steps += 1;
        self.computed += rows as u64;
        self.recent.push((Instant::now(), rows));
    }

    pub(super) fn started(&mut self, prompt: usize, cached: usize) {
        self.hits.push((prompt, cached));
    }

    pub(super) fn first_token(&mut self, after: Duration) {
        self.first_token.push(after);
    }

    pub(super) fn inter_token(&mut self, gap: Duration) {
        self.inter_token.push(gap);
    }

    pub(super) fn stats(&self, scheduler: &Scheduler, requests: usize) -> Stats {
        let usage = scheduler.cache.usage();
        let blocks = |f: fn(&crate::cache::GroupUsage) -> usize| usage.iter().map(f).sum();
        let rows: usize = usage.iter().map(|u| u.blocks_used).sum::<usize>() * scheduler.block_size;
        let stored: usize = usage.iter().map(|u| u.tokens).sum();
        let count = |wanted: fn(&Sequence) -> bool| {
            let waiting = scheduler.sequences.values().filter(|s| s.held.is_none());
            waiting.filter(|sequence| wanted(sequence)).count()
        };
        let swapped = count(|sequence| sequence.swapped.is_some());
        let preempted = count(|sequence| sequence.preempted && sequence.swapped.is_none());
        let (prompts, cached) = self
            .hits
            .0
            .iter()
            .fold((0, 0), |sum, hit| (sum.0 + hit.0, sum.1 + hit.1));
        Stats {
            requests,
            running: scheduler.running.len(),
            waiting: count(|sequence| !sequence.preempted),
            preempted,
            swapped,
            finished: self.finished,
            steps: self.steps,
            computed_tokens: self.computed,
            preemptions: scheduler.counts.preemptions,
            swaps: scheduler.counts.swaps,
            deferrals: scheduler.counts.deferrals,
            blocks_total: blocks(|u| u.blocks_total),
            blocks_used: blocks(|u| u.blocks_used),
            blocks_cached: blocks(|u| u.blocks_cached),
            blocks_free: blocks(|u| u.blocks_free),
            utilization: if rows == 0 {
                1.0
            } else {
                stored as f64 / rows as f64
            },
            prompt_tokens: scheduler.counts.prompt_tokens,
            cached_tokens: scheduler.counts.cached_tokens,
            hit_rate: cached as f64 / (prompts as f64).max(1.0),
            resumed_tokens: scheduler.counts.resumed_tokens,
            resumed_cached_tokens: scheduler.counts.resumed_cached_tokens,
            first_token: self.first_token.mean(),
            inter_token: self.inter_token.mean(),
            tokens_per_s: self.tokens_per_s(),
        }
    }

    fn tokens_per_s(&self) -> f64 {
        let recent = &self.recent.0;
        match (recent.front(), recent.back()) {
            (Some((first, _)), Some((last, _))) if last > first => {
                // The tokens of the first step were computed before its end.
                let tokens: usize = recent.iter().skip(1).map(|(_, rows)| rows).sum();
                tokens as f64 / (*last - *first).as_secs_f64()
            }
            _ => 0.0,
        }
    }
}
