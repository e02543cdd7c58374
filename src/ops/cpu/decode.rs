//! The streaming kernel: few queries, any number of keys.
//!
//! A task takes all heads of a chunk of tokens, so that memory is read in whole token rows,
//! once, for every query head of a group. Tokens go by in tiles of 16: products with K for all
//! heads, one softmax step, then V.

use super::ahead::{Ahead, TILE};
use super::attention::{Call, with_scratch};
use super::cache::Context;
use super::element::Element;
use super::lanes::Lanes;
use super::plan::SeqPlan;
use super::products::{TOKENS, dots, weigh};
use super::simd::{Simd, Task, dispatch};

/// Tokens of a product with V: few, so that the rows under way fit the first cache level.
const VALUES: usize = 4;

/// Computes one chunk of one sequence, all rows and heads.
pub(super) fn stream_task<T: Element>(call: &Call<'_, T>, plan: &SeqPlan, chunk: usize) {
    let lanes = call.heads * plan.rows.len();
    let len = lanes * (call.k_dim + call.v_dim + TILE) + Lanes::memory(lanes);
    with_scratch(len, |scratch| {
        let (q, scratch) = scratch.split_at_mut(lanes * call.k_dim);
        let (sums, scratch) = scratch.split_at_mut(lanes * call.v_dim);
        let (scores, scratch) = scratch.split_at_mut(lanes * TILE);
        dispatch(Stream {
            call,
            plan,
            chunk,
            q,
            sums,
            scores,
            lanes: Lanes::new(scratch, plan.rows.len(), call.group),
        });
    });
}

struct Stream<'a, T> {
    call: &'a Call<'a, T>,
    plan: &'a SeqPlan,
    chunk: usize,
    /// `[lanes, k_dim]`, scaled.
    q: &'a mut [f32],
    /// Weighted sums of V so far, `[lanes, v_dim]`.
    sums: &'a mut [f32],
    /// `[TILE, lanes]`.
    scores: &'a mut [f32],
    lanes: Lanes<'a>,
}

impl<T: Element> Stream<'_, T> {
    fn start(&mut self) {
        let scale = self.call.options.scale;
        for (lane, q) in self.q.chunks_exact_mut(self.call.k_dim).enumerate() {
            let (row, head) = self.lanes.row_head(lane);
            self.call.q.load(self.plan.rows.start + row, head, scale, q);
        }
        self.sums.fill(0.0);
    }

    fn emit(&self) {
        for (lane, sums) in self.sums.chunks_exact(self.call.v_dim).enumerate() {
            let (row_head, running) = (self.lanes.row_head(lane), self.lanes.running(lane));
            self.call
                .emit(self.plan, self.chunk, row_head, running, sums);
        }
    }
}

impl<T: Element> Task for Stream<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        self.start();
        let (k, v) = self.call.context(self.plan);
        let keys = self.plan.chunk_keys(self.chunk);
        let (k_dim, v_dim, kv_heads) = (self.call.k_dim, self.call.v_dim, self.call.kv_heads);
        let lanes = self.lanes.len();
        let per_head = lanes / kv_heads;
        let mut tile = rows_of(&k, keys.start, keys.end);
        let mut values = rows_of(&v, keys.start, keys.end);
        for first in keys.clone().step_by(TILE) {
            let n = TILE.min(keys.end - first);
            // Behind the last tile this is its last row again: asking for it costs nothing.
            let next = (first + TILE).min(keys.end - 1);
            let next_tile = rows_of(&k, next, keys.end);
            let mut ahead = Ahead::new(&tile, &next_tile, kv_heads * k_dim);
            for token in (0..n).step_by(TOKENS) {
                for head in 0..kv_heads {
                    let lane = head * per_head;
                    let rows = of_head::<T, TOKENS>(&tile[token..], head, k_dim);
                    // SAFETY: every row of the context has `kv_heads * k_dim` elements.
                    unsafe {
                        dots(
                            simd,
                            &self.q[lane * k_dim..][..per_head * k_dim],
                            k_dim,
                            rows,
                            &mut ahead,
                            &mut self.scores[token * lanes + lane..],
                            lanes,
                        );
                    }
                }
            }
            let scores = &mut self.scores[..n * lanes];
            self.lanes
                .finish_scores(scores, first, self.plan, self.call.options);
            self.lanes.absorb(scores);
            let next_values = rows_of(&v, next, keys.end);
            let mut ahead = Ahead::new(&values, &next_values, kv_heads * v_dim);
            for token in (0..n).step_by(VALUES) {
                let group = &values[token..n.min(token + VALUES)];
                for head in 0..kv_heads {
                    let lane = head * per_head;
                    let rows = of_head::<T, VALUES>(group, head, v_dim);
                    // SAFETY: every row of the context has `kv_heads * v_dim` elements.
                    unsafe {
                        weigh(
                            simd,
                            &mut self.sums[lane * v_dim..][..per_head * v_dim],
                            v_dim,
                            &self.lanes.shrink[lane..],
                            (&self.scores[token * lanes + lane..], lanes),
                            &rows[..group.len()],
                            &mut ahead,
                        );
                    }
                }
                // What was summed up before this tile has shrunk now.
                self.lanes.shrink.fill(1.0);
            }
            (tile, values) = (next_tile, next_values);
        }
        self.emit();
    }
}

/// The rows of a tile from `first` on. Behind the end the last row stands in, so that the
/// products need no special case; their scores are not looked at.
#[inline(always)]
fn rows_of<T>(context: &Context<'_, T>, first: usize, end: usize) -> [*const T; TILE] {
    let mut rows = [context.row(first).as_ptr(); TILE];
    for (i, row) in rows.iter_mut().enumerate().skip(1) {
        *row = context.row((first + i).min(end - 1)).as_ptr();
    }
    rows
}

/// One head of `N` rows.
#[inline(always)]
fn of_head<T, const N: usize>(rows: &[*const T], head: usize, dim: usize) -> [*const T; N] {
    let mut part = [rows[0]; N];
    for (part, row) in part.iter_mut().zip(rows) {
        *part = row.wrapping_add(head * dim);
    }
    part
}
