//! The streaming kernel: few queries, any number of keys.
//!
//! A task takes all heads of a chunk of tokens, so that memory is read in whole token rows,
//! once, for every query head of a group. Tokens go by in tiles of 16: products with K for all
//! heads, one softmax step, then V.

use super::ahead::{Ahead, TILE};
use super::attention::{Call, with_scratch};
use super::element::Element;
use super::lanes::Lanes;
use super::plan::SeqPlan;
use super::products::{Head, TOKENS, blocks, dots, from_load_order, to_load_order, weigh};
use super::simd::{Simd, Task};

/// Bytes of V that a product with it goes through at once: the rows under way should fit the
/// first cache level beside the queries and sums.
const VALUES: usize = 16 << 10;

/// Computes one chunk of one sequence, all rows and heads.
pub(super) fn stream_task<T: Element>(call: &Call<'_, T>, plan: &SeqPlan, chunk: usize) {
    let lanes = call.heads * plan.rows.len();
    let width = Lanes::width(lanes);
    let len = lanes * (call.k_dim + call.v_dim) + width * TILE + Lanes::memory(lanes);
    with_scratch(len, |scratch| {
        let (scores, scratch) = scratch.split_at_mut(width * TILE);
        let (running, scratch) = scratch.split_at_mut(Lanes::memory(lanes));
        let (q, sums) = scratch.split_at_mut(lanes * call.k_dim);
        call.isa.run(Stream {
            call,
            plan,
            chunk,
            q,
            sums,
            scores,
            lanes: Lanes::new(running, lanes, plan.rows.len(), call.group),
        });
    });
}

struct Stream<'a, T> {
    call: &'a Call<'a, T>,
    plan: &'a SeqPlan,
    chunk: usize,
    /// `[lanes, k_dim]`, scaled, in load order.
    q: &'a mut [f32],
    /// Weighted sums of V so far, `[lanes, v_dim]`, in load order.
    sums: &'a mut [f32],
    /// `[TILE, width]`.
    scores: &'a mut [f32],
    lanes: Lanes<'a>,
}

impl<T: Element> Stream<'_, T> {
    #[inline(always)]
    fn start<S: Simd>(&mut self) {
        let scale = self.call.options.scale;
        for (lane, q) in self.q.chunks_exact_mut(self.call.k_dim).enumerate() {
            let (row, head) = self.lanes.row_head(lane);
            self.call.q.load(self.plan.rows.start + row, head, scale, q);
            to_load_order::<S, T>(q);
        }
        self.sums.fill(0.0);
        // What idle lanes hold is looked at by nobody, but may cost time.
        self.scores.fill(0.0);
    }

    #[inline(always)]
    fn emit<S: Simd>(&mut self) {
        for (lane, sums) in self.sums.chunks_exact_mut(self.call.v_dim).enumerate() {
            from_load_order::<S, T>(sums);
            let (row_head, running) = (self.lanes.row_head(lane), self.lanes.running(lane));
            self.call
                .emit(self.plan, self.chunk, row_head, running, sums);
        }
    }

    /// Scores of a tile, not yet capped or masked.
    #[inline(always)]
    fn multiply_keys<S: Simd>(&mut self, simd: S, n: usize, k: &[*const T], ahead: &mut Ahead<T>) {
        let (dim, kv_heads) = (self.call.k_dim, self.call.kv_heads);
        let per_head = self.lanes.len() / kv_heads;
        let width = Lanes::width(self.lanes.len());
        for token in (0..n).step_by(TOKENS) {
            for head in 0..kv_heads {
                let lane = head * per_head;
                let k = Head {
                    rows: &k[token..],
                    later: ahead.later(token),
                    offset: head * dim,
                };
                // SAFETY: every row of the context has `kv_heads * dim` elements.
                unsafe {
                    dots(
                        simd,
                        &self.q[lane * dim..][..per_head * dim],
                        dim,
                        k,
                        ahead,
                        &mut self.scores[token * width + lane..],
                        width,
                    );
                }
            }
        }
    }

    /// Adds a tile of V, weighted.
    #[inline(always)]
    fn multiply_values<S: Simd>(&mut self, simd: S, v: &[*const T], ahead: &mut Ahead<T>) {
        let (dim, kv_heads) = (self.call.v_dim, self.call.kv_heads);
        let per_head = self.lanes.len() / kv_heads;
        let width = Lanes::width(self.lanes.len());
        let step = (VALUES / (kv_heads * dim * size_of::<T>())).clamp(TILE / 4, TILE);
        for token in (0..v.len()).step_by(step) {
            let rows = &v[token..v.len().min(token + step)];
            for head in 0..kv_heads {
                let lane = head * per_head;
                let v = Head {
                    rows,
                    later: ahead.later(token),
                    offset: head * dim,
                };
                // SAFETY: every row of the context has `kv_heads * dim` elements.
                unsafe {
                    weigh(
                        simd,
                        &mut self.sums[lane * dim..][..per_head * dim],
                        dim,
                        &self.lanes.shrink[lane..],
                        (&self.scores[token * width + lane..], width),
                        v,
                        ahead,
                    );
                }
            }
            // What was summed up before this tile has shrunk now.
            self.lanes.shrink.fill(1.0);
        }
    }
}

impl<T: Element> Task for Stream<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        self.start::<S>();
        let (k, v) = self.call.context(self.plan);
        let keys = self.plan.chunk_keys(self.chunk);
        let lanes = self.lanes.len();
        let width = Lanes::width(lanes);
        let blocks = blocks(lanes / self.call.kv_heads);
        let [k_len, v_len] = [self.call.k_dim, self.call.v_dim].map(|dim| dim * self.call.kv_heads);
        // K of a tile, its V, K of the next. Behind the last token its row stands in, so that the
        // products need no special case; scores of such rows are not looked at.
        let mut rows = [std::ptr::null(); 3 * TILE];
        k.point(keys.start, keys.end, &mut rows[..TILE]);
        for first in keys.clone().step_by(TILE) {
            let n = TILE.min(keys.end - first);
            v.point(first, keys.end, &mut rows[TILE..2 * TILE]);
            let mut ahead = Ahead::new(&rows[..2 * TILE], [k_len, v_len], blocks);
            self.multiply_keys(simd, n, &rows[..TILE], &mut ahead);
            let scores = &mut self.scores[..n * width];
            self.lanes
                .finish_scores(scores, first, self.plan, self.call.options);
            self.lanes.absorb(simd, scores);
            // Behind the last tile this is its last row again: asking for it costs nothing.
            let next = (first + TILE).min(keys.end - 1);
            k.point(next, keys.end, &mut rows[2 * TILE..]);
            let mut ahead = Ahead::new(&rows[TILE..], [v_len, k_len], blocks);
            self.multiply_values(simd, &rows[TILE..][..n], &mut ahead);
            rows.copy_within(2 * TILE.., 0);
        }
        self.emit::<S>();
    }
}
