//! The clock, and what is counted at each of its ticks.
//!
//! All requests wait from the start, in the order of the trace (their times are not used): so
//! memory alone decides how many run. In a tick
//! 1. requests that have all their tokens leave,
//! 2. each running request gets one more token; where there is no row for it, the request that
//!    arrived last goes back to the head of the queue, with the tokens it has,
//! 3. requests are admitted, first come first served, until one does not fit; their prompts
//!    (and the tokens they had) are computed at once,
//! 4. rows are counted.
//!
//! So a request of `p` prompt and `o` output tokens is counted with `p`, `p + 1`, ... `p + o`
//! tokens, once each, in any company. Shares of memory are sums over all ticks divided by each
//! other, that is time averages.

use serde::Serialize;

use super::memory::Memory;
use super::trace::Trace;

/// What a replay has counted, as shares of the rows that were taken or of no use.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Shares {
    /// Rows that hold a token; the three wastes are the rest.
    pub utilization: f64,
    /// Rows that their request will fill later.
    pub reserved_waste: f64,
    /// Rows that their request will never fill.
    pub internal_waste: f64,
    /// Free rows in holes too small for the first waiting request, in ticks in which all holes
    /// together would be large enough.
    pub external_waste: f64,
    /// Running requests, on average over the ticks in which some wait.
    pub concurrent: f64,
    /// The most that ever ran.
    pub peak: usize,
    /// Tokens of running requests per row taken: above 1 where rows are shared.
    pub tokens_per_row: f64,
    /// Share of the prompt tokens that were found in memory at admission, those of preempted
    /// requests counted each time.
    pub found: f64,
    /// Requests sent back to the queue.
    pub preemptions: u64,
    pub ticks: u64,
}

struct Running<H> {
    /// Place in the trace.
    index: usize,
    tokens: usize,
    held: H,
}

#[derive(Default)]
struct Sums {
    taken: u64,
    room: u64,
    reserved: u64,
    scattered: u64,
    tokens: u64,
    prompts: u64,
    /// Ticks in which requests wait, and those that run then.
    pressed: u64,
    running: u64,
    ticks: u64,
    preemptions: u64,
    peak: usize,
}

/// Replays a trace and calls `served` whenever a request leaves. Every request must fit when it
/// is alone.
pub fn replay<M: Memory>(trace: &Trace, mut memory: M, mut served: impl FnMut()) -> Shares {
    let requests = &trace.requests;
    // Whoever arrived last is preempted first, so that the last in here arrived first; all of
    // them arrived before the rest of the trace.
    let mut preempted: Vec<(usize, usize)> = Vec::new();
    let mut next = 0;
    let mut running: Vec<Running<M::Held>> = Vec::new();
    let mut sums = Sums::default();
    while next < requests.len() || !preempted.is_empty() || !running.is_empty() {
        let done = |r: &mut Running<M::Held>| r.tokens == requests[r.index].total();
        for gone in running.extract_if(.., done) {
            memory.release(gone.held);
            served();
        }

        let mut at = 0;
        while at < running.len() {
            let request = &mut running[at];
            if request.tokens < memory.rows(&request.held) || memory.grow(&mut request.held) {
                request.tokens += 1;
                at += 1;
            } else if let Some(last) = running.pop() {
                // It comes back with the token that it would have got now.
                preempted.push((last.index, last.tokens + 1));
                memory.release(last.held);
                sums.preemptions += 1;
            }
        }

        loop {
            let (index, tokens) = match preempted.last() {
                Some(&waiting) => waiting,
                None if next < requests.len() => (next, requests[next].prompt),
                None => break,
            };
            let request = &requests[index];
            let Some(held) = memory.admit(request, tokens, running.len()) else {
                sums.pressed += 1;
                sums.running += running.len() as u64;
                sums.scattered += memory.scattered(request) as u64;
                break;
            };
            sums.prompts += request.prompt as u64;
            running.push(Running {
                index,
                tokens,
                held,
            });
            if preempted.pop().is_none() {
                next += 1;
            }
        }

        sums.ticks += u64::from(!running.is_empty());
        sums.taken += memory.taken() as u64;
        sums.peak = sums.peak.max(running.len());
        for request in &running {
            let room = memory.rows(&request.held) - request.tokens;
            let to_come = requests[request.index].total() - request.tokens;
            sums.room += room as u64;
            sums.reserved += room.min(to_come) as u64;
            sums.tokens += request.tokens as u64;
        }
    }
    sums.shares(memory.found(), requests.len())
}

impl Sums {
    fn shares(&self, found: u64, requests: usize) -> Shares {
        let all = (self.taken + self.scattered) as f64;
        let of = |rows: u64| rows as f64 / all;
        Shares {
            // Only the last block of a request has room, and no other request holds it.
            utilization: of(self.taken - self.room),
            reserved_waste: of(self.reserved),
            internal_waste: of(self.room - self.reserved),
            external_waste: of(self.scattered),
            concurrent: match self.pressed {
                0 => requests as f64,
                ticks => self.running as f64 / ticks as f64,
            },
            peak: self.peak,
            tokens_per_row: self.tokens as f64 / self.taken as f64,
            found: found as f64 / self.prompts as f64,
            preemptions: self.preemptions,
            ticks: self.ticks,
        }
    }
}
