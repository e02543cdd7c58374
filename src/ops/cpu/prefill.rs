//! The matrix kernel: many queries of one sequence.
//!
//! A task takes a tile of query rows with all heads of one KV head's group, packed as the rows
//! of a matrix, and goes through its keys in tiles: K and V packed to contiguous f32, scores as
//! a matrix product, one online softmax step per row, values as a second product
//! (FlashAttention, Dao et al. 2022). Tiles that the mask hides from every row are skipped.

use std::ops::Range;

use gemm::Parallelism;

use super::attention::{Call, with_scratch};
use super::cache::Context;
use super::element::Element;
use super::plan::SeqPlan;
use super::scores::{Running, finish_scores, visible};
use super::simd::{Simd, Task};

/// Keys of a tile.
const TILE: usize = 256;

/// Computes query rows `rows` (counted from the sequence's first) of KV head `head` over one
/// chunk of keys.
pub(super) fn matrix_task<T: Element>(
    call: &Call<'_, T>,
    plan: &SeqPlan,
    chunk: usize,
    head: usize,
    rows: Range<usize>,
) {
    let n = rows.len() * call.group;
    let len = n * (call.k_dim + TILE + call.v_dim + 2) + TILE * (call.k_dim + call.v_dim);
    with_scratch(len, |scratch| {
        let (q, scratch) = scratch.split_at_mut(n * call.k_dim);
        let (scores, scratch) = scratch.split_at_mut(n * TILE);
        let (sums, scratch) = scratch.split_at_mut(n * call.v_dim);
        let (k, scratch) = scratch.split_at_mut(TILE * call.k_dim);
        let (v, scratch) = scratch.split_at_mut(TILE * call.v_dim);
        let (max, sum) = scratch.split_at_mut(n);
        Tile {
            call,
            plan,
            head,
            rows,
            q,
            scores,
            sums,
            k,
            v,
            max,
            sum,
        }
        .run(chunk);
    });
}

/// Matrix rows are (query row, head of the group), in this order.
struct Tile<'a, T> {
    call: &'a Call<'a, T>,
    plan: &'a SeqPlan,
    head: usize,
    rows: Range<usize>,
    /// `[n, k_dim]`, scaled.
    q: &'a mut [f32],
    /// `[n, TILE]`.
    scores: &'a mut [f32],
    /// Weighted sums of V so far, `[n, v_dim]`.
    sums: &'a mut [f32],
    /// `[TILE, k_dim]`.
    k: &'a mut [f32],
    /// `[TILE, v_dim]`.
    v: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
}

impl<T: Element> Tile<'_, T> {
    /// Row (counted from the sequence's first) and query head of a matrix row.
    fn row_head(&self, i: usize) -> (usize, usize) {
        let group = self.call.group;
        (self.rows.start + i / group, self.head * group + i % group)
    }

    /// Keys of the chunk that any row of the tile sees.
    fn keys(&self, chunk: usize) -> Range<usize> {
        let (mask, len) = (self.call.options.mask, self.plan.len);
        let first = self.plan.position(self.rows.start).max(0);
        let last = self.plan.position(self.rows.end - 1);
        let chunk = self.plan.chunk_keys(chunk);
        let start = visible(mask, first, len).start.max(chunk.start);
        start..visible(mask, last, len).end.min(chunk.end).max(start)
    }

    fn run(mut self, chunk: usize) {
        let call = self.call;
        for i in 0..self.max.len() {
            let (row, head) = self.row_head(i);
            let q = &mut self.q[i * call.k_dim..][..call.k_dim];
            call.q
                .load(self.plan.rows.start + row, head, call.options.scale, q);
        }
        self.sums.fill(0.0);
        self.max.fill(Running::EMPTY.max);
        self.sum.fill(Running::EMPTY.sum);

        let (k, v) = call.context(self.plan);
        let keys = self.keys(chunk);
        for first in keys.clone().step_by(TILE) {
            let n = TILE.min(keys.end - first);
            pack(&k, first, n, self.head, self.k, call.k_dim);
            pack(&v, first, n, self.head, self.v, call.v_dim);
            self.multiply_keys(n);
            call.isa.run(Softmax {
                tile: &mut self,
                first,
                n,
            });
            self.multiply_values(n);
        }

        for i in 0..self.max.len() {
            let running = Running {
                max: self.max[i],
                sum: self.sum[i],
            };
            let sums = &self.sums[i * call.v_dim..][..call.v_dim];
            call.emit(self.plan, chunk, self.row_head(i), running, sums);
        }
    }

    /// `scores = q · kᵀ` for the first `n` keys of the tile.
    fn multiply_keys(&mut self, n: usize) {
        let (rows, dim) = (self.max.len(), self.call.k_dim);
        assert!(self.q.len() == rows * dim && self.k.len() >= n * dim);
        assert!(self.scores.len() == rows * TILE && n <= TILE);
        // SAFETY: the strides describe [rows, n] of `scores`, [rows, dim] of `q` and the
        // transposed [n, dim] of `k`, in bounds by the assertions; `scores` is borrowed
        // mutably and overlaps neither.
        unsafe {
            gemm::gemm(
                rows,
                n,
                dim,
                self.scores.as_mut_ptr(),
                1,
                TILE as isize,
                false,
                self.q.as_ptr(),
                1,
                dim as isize,
                self.k.as_ptr(),
                dim as isize,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }

    /// `sums += weights · v` for the first `n` keys of the tile.
    fn multiply_values(&mut self, n: usize) {
        let (rows, dim) = (self.max.len(), self.call.v_dim);
        assert!(self.sums.len() == rows * dim && self.v.len() >= n * dim);
        assert!(self.scores.len() == rows * TILE && n <= TILE);
        // SAFETY: the strides describe [rows, dim] of `sums`, [rows, n] of `scores` and
        // [n, dim] of `v`, in bounds by the assertions; `sums` is borrowed mutably and
        // overlaps neither.
        unsafe {
            gemm::gemm(
                rows,
                dim,
                n,
                self.sums.as_mut_ptr(),
                1,
                dim as isize,
                true,
                self.scores.as_ptr(),
                1,
                TILE as isize,
                self.v.as_ptr(),
                1,
                dim as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// Copies one head of `n` tokens to contiguous f32. Nothing past them is touched.
fn pack<T: Element>(
    rows: &Context<'_, T>,
    first: usize,
    n: usize,
    head: usize,
    out: &mut [f32],
    dim: usize,
) {
    for (i, out) in out.chunks_exact_mut(dim).take(n).enumerate() {
        T::widen(&rows.row(first + i)[head * dim..(head + 1) * dim], out);
    }
}

/// One softmax step of every row of a tile, and the rescaling of its sums.
struct Softmax<'a, 'b, T> {
    tile: &'a mut Tile<'b, T>,
    first: usize,
    n: usize,
}

impl<T: Element> Task for Softmax<'_, '_, T> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { tile, first, n } = self;
        let options = tile.call.options;
        let v_dim = tile.call.v_dim;
        for i in 0..tile.max.len() {
            let (row, head) = tile.row_head(i);
            let position = tile.plan.position(row);
            let keys = visible(options.mask, position, tile.plan.len);
            let scores = &mut tile.scores[i * TILE..][..n];
            finish_scores(scores, first, position, &keys, head, options);
            let mut running = Running {
                max: tile.max[i],
                sum: tile.sum[i],
            };
            let shrink = running.absorb(simd, scores);
            (tile.max[i], tile.sum[i]) = (running.max, running.sum);
            if shrink != 1.0 {
                for x in &mut tile.sums[i * v_dim..][..v_dim] {
                    *x *= shrink;
                }
            }
        }
    }
}
