//! All policies on one trace, side by side.

use anyhow::{Result, ensure};
use rayon::prelude::*;
use serde::Serialize;

use super::contiguous::{Contiguous, Reservation};
use super::paged::Paged;
use super::replay::{Shares, replay};
use super::trace::{Request, Trace};

pub const BLOCK_SIZES: [usize; 7] = [4, 8, 16, 32, 64, 128, 256];
/// Requests that reserving to the maximum has room for, unless told otherwise.
const REQUESTS_AT_MAX: usize = 16;

/// A way to manage memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    ReserveToMax,
    PowerOfTwo,
    ExactFirstFit,
    Paged,
    PagedPrefixSharing,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub policy: Policy,
    /// Tokens per block, where there are blocks.
    pub block_size: Option<usize>,
    #[serde(flatten)]
    pub shares: Shares,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub trace: String,
    pub requests: usize,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// Tokens of the longest request, for which `reserve_to_max` makes room.
    pub longest: usize,
    /// Rows of the memory that all policies have.
    pub memory_tokens: usize,
    pub rows: Vec<Row>,
}

/// The policies and block sizes that a trace is replayed with.
pub fn plan(trace: &Trace) -> Vec<(Policy, Option<usize>)> {
    let contiguous = [
        Policy::ReserveToMax,
        Policy::PowerOfTwo,
        Policy::ExactFirstFit,
    ];
    let mut plan: Vec<_> = contiguous.map(|policy| (policy, None)).into();
    plan.extend(BLOCK_SIZES.map(|size| (Policy::Paged, Some(size))));
    if trace.has_content() {
        plan.extend(BLOCK_SIZES.map(|size| (Policy::PagedPrefixSharing, Some(size))));
    }
    plan
}

/// Replays the trace with each policy; `served` is called for each request of each, from any
/// thread.
pub fn report(
    trace: &Trace,
    memory_tokens: Option<usize>,
    served: impl Fn() + Sync,
) -> Result<Report> {
    let longest = trace.longest();
    let largest = |reservation: Reservation| {
        let rows = trace.requests.iter().map(|r| reservation.rows(r));
        rows.max().unwrap_or(0)
    };
    // Blocks that hold the longest request, of any size, and the largest reservation.
    let blocks = BLOCK_SIZES.map(|size| longest.div_ceil(size) * size);
    let least = blocks
        .into_iter()
        .max()
        .max(Some(largest(Reservation::PowerOfTwo)));
    let least = least.unwrap_or(0);
    let memory = memory_tokens.unwrap_or((REQUESTS_AT_MAX * longest).max(least));
    ensure!(
        memory >= least,
        "a memory of {memory} tokens is too small: the largest request takes {least} with some \
         policy"
    );
    // One by one to the threads: some take far longer than others.
    let plan = plan(trace).into_par_iter().with_max_len(1);
    let rows = plan.map(|(policy, block_size)| {
        let contiguous = |reservation| {
            let memory = Contiguous::new(memory, reservation);
            Ok(replay(trace, memory, &served))
        };
        let shares = match (policy, block_size) {
            (Policy::PowerOfTwo, _) => contiguous(Reservation::PowerOfTwo),
            (Policy::ExactFirstFit, _) => contiguous(Reservation::Exact),
            (Policy::Paged, Some(size)) => {
                Paged::new(memory, size, None).map(|paged| replay(trace, paged, &served))
            }
            (Policy::PagedPrefixSharing, Some(size)) => {
                let paged = Paged::new(memory, size, Some(trace.tokens_per_id));
                paged.map(|paged| replay(trace, paged, &served))
            }
            _ => contiguous(Reservation::Max(longest)),
        };
        shares.map(|shares| Row {
            policy,
            block_size,
            shares,
        })
    });
    let sum = |tokens: fn(&Request) -> usize| trace.requests.iter().map(tokens).sum();
    Ok(Report {
        trace: trace.name.clone(),
        requests: trace.requests.len(),
        prompt_tokens: sum(|request| request.prompt),
        output_tokens: sum(|request| request.output),
        longest,
        memory_tokens: memory,
        rows: rows.collect::<Result<_>>()?,
    })
}

impl Row {
    /// What the row is called in the table and in the plot.
    pub fn label(&self) -> String {
        let policy = match self.policy {
            Policy::ReserveToMax => "reserve to max",
            Policy::PowerOfTwo => "power of two",
            Policy::ExactFirstFit => "exact, first-fit",
            Policy::Paged => "paged",
            Policy::PagedPrefixSharing => "paged, sharing",
        };
        match self.block_size {
            Some(size) => format!("{policy} {size}"),
            None => policy.into(),
        }
    }
}

/// The rows as a table.
pub fn table(report: &Report) -> String {
    let mut table = format!(
        "{}: {} requests, {} prompt and {} output tokens, the longest {}; memory of {} tokens\n\n\
         {:20} {:>6} {:>9} {:>9} {:>9} {:>8} {:>5} {:>11} {:>7} {:>9}\n",
        report.trace,
        report.requests,
        report.prompt_tokens,
        report.output_tokens,
        report.longest,
        report.memory_tokens,
        "",
        "tokens",
        "reserved",
        "internal",
        "external",
        "at once",
        "peak",
        "tokens/row",
        "found",
        "preempted"
    );
    for row in &report.rows {
        let shares = &row.shares;
        table += &format!(
            "{:20} {:5.1}% {:8.1}% {:8.1}% {:8.1}% {:8.1} {:5} {:11.2} {:6.1}% {:9}\n",
            row.label(),
            100.0 * shares.utilization,
            100.0 * shares.reserved_waste,
            100.0 * shares.internal_waste,
            100.0 * shares.external_waste,
            shares.concurrent,
            shares.peak,
            shares.tokens_per_row,
            100.0 * shares.found,
            shares.preemptions,
        );
    }
    table
}
