//! The matrix kernel: many queries of one sequence.
//!
//! A task takes a tile of query rows with all heads of one KV head's group as the rows of a
//! matrix, and goes through its keys in tiles: products with K, one online softmax step per row,
//! products with V (FlashAttention, Dao et al. 2022). Matrix rows lie in the lanes of registers,
//! a few registers at a time: a block. Keys that the mask hides from all rows of a block are
//! skipped.

use std::marker::PhantomData;
use std::ops::Range;

use super::attention::{Call, with_scratch};
use super::cache::Context;
use super::element::Element;
use super::plan::SeqPlan;
use super::scores::{Running, absorb, cap_scores, visible};
use super::simd::{MAX_LANES, Simd, Task};
use super::tile::{Ahead, REGISTERS, multiply_keys, multiply_values};
use crate::ops::check::MAX_DIM;

/// Keys of a tile. Tiles begin at multiples of it, whatever the first key is that a row sees: so
/// the sums of a row do not depend on the rows beside it.
const KEYS: usize = 128;

/// Elements between copied rows. The products with V go down the rows, a few columns at a time,
/// and rows of a power of two bytes, as in the cache, would all lie in the same few sets of the
/// first cache level.
const PAD: usize = 16;

/// Matrix rows of a block, at most.
const WIDTH: usize = REGISTERS * MAX_LANES;

/// Computes query rows `rows` (counted from the sequence's first) of KV head `head` over one
/// chunk of keys.
pub(super) fn matrix_task<T: Element>(
    call: &Call<'_, T>,
    plan: &SeqPlan,
    chunk: usize,
    head: usize,
    rows: Range<usize>,
) {
    let (k_dim, v_dim) = (call.k_dim, call.v_dim);
    let lanes = (rows.len() * call.group).next_multiple_of(MAX_LANES);
    let (k_len, v_len) = (KEYS * (k_dim + PAD), KEYS * (v_dim + PAD));
    let len = lanes * (k_dim + v_dim + 2) + WIDTH * (KEYS + 1) + k_len + v_len;
    with_scratch(len, |scratch| {
        let (q, scratch) = scratch.split_at_mut(lanes * k_dim);
        let (sums, scratch) = scratch.split_at_mut(lanes * v_dim);
        let (scores, scratch) = scratch.split_at_mut(WIDTH * KEYS);
        let (k, scratch) = scratch.split_at_mut(k_len);
        let (v, scratch) = scratch.split_at_mut(v_len);
        let (max, scratch) = scratch.split_at_mut(lanes);
        let (sum, shrink) = scratch.split_at_mut(lanes);
        let matrix = Matrix {
            call,
            plan,
            chunk,
            head,
            rows,
            q,
            sums,
            max,
            sum,
            scores,
            shrink,
            k,
            v,
        };
        call.isa.run(matrix);
    });
}

/// Matrix rows are (query row, head of the group), in this order. Behind the last there are idle
/// lanes, up to whole registers; what is computed for them is looked at by nobody.
struct Matrix<'a, T> {
    call: &'a Call<'a, T>,
    plan: &'a SeqPlan,
    chunk: usize,
    head: usize,
    rows: Range<usize>,
    /// Scaled; for each block `[k_dim, block]`.
    q: &'a mut [f32],
    /// Weighted sums of V so far; for each block `[v_dim, block]`.
    sums: &'a mut [f32],
    /// Largest score so far, `[lanes]`.
    max: &'a mut [f32],
    /// Sum of `e^(score − max)` so far, `[lanes]`.
    sum: &'a mut [f32],
    /// Of one block, `[KEYS, block]`.
    scores: &'a mut [f32],
    /// Of one block.
    shrink: &'a mut [f32],
    /// Copied rows, `[KEYS, k_dim + PAD]`.
    k: &'a mut [f32],
    /// `[KEYS, v_dim + PAD]`
    v: &'a mut [f32],
}

/// Some registers of matrix rows.
#[derive(Clone, Copy)]
struct Block<S> {
    /// The first of its lanes.
    lane: usize,
    registers: usize,
    simd: PhantomData<S>,
}

impl<S: Simd> Block<S> {
    fn width(&self) -> usize {
        self.registers * S::LANES
    }

    fn lanes(&self) -> Range<usize> {
        self.lane..self.lane + self.width()
    }
}

/// Cuts lanes into blocks as equal as they come: one of a single register has too few sums to
/// keep the arithmetic busy.
fn blocks<S: Simd>(lanes: usize) -> impl Iterator<Item = Block<S>> {
    let mut left = lanes.div_ceil(S::LANES);
    let mut lane = 0;
    std::iter::from_fn(move || {
        let registers = match left {
            0 => return None,
            4 => 2,
            _ if S::MANY_REGISTERS => left.min(REGISTERS),
            _ => left.min(2),
        };
        let block = Block {
            lane,
            registers,
            simd: PhantomData,
        };
        left -= registers;
        lane += registers * S::LANES;
        Some(block)
    })
}

/// What one head of a tile of keys needs of K or V.
#[derive(Clone, Copy)]
struct Rows<T> {
    start: [*const T; KEYS],
    len: usize,
}

impl<T: Element> Rows<T> {
    /// Rows `keys` of the context; at most a tile.
    fn new(context: &Context<'_, T>, keys: &Range<usize>, head: usize, dim: usize) -> Self {
        let mut start = [std::ptr::null(); KEYS];
        for (start, key) in start.iter_mut().zip(keys.clone()) {
            *start = context.row(key)[head * dim..(head + 1) * dim].as_ptr();
        }
        Self {
            start,
            len: keys.len(),
        }
    }

    fn as_slice(&self) -> &[*const T] {
        &self.start[..self.len]
    }

    /// Copies the rows to f32, [`PAD`] apart.
    #[inline(always)]
    fn copy<S: Simd>(&self, simd: S, dim: usize, to: &mut [f32]) -> Rows<f32> {
        let mut start = [std::ptr::null(); KEYS];
        let to = to.chunks_exact_mut(dim + PAD);
        for ((start, to), &row) in start.iter_mut().zip(to).zip(self.as_slice()) {
            // SAFETY: `new` found `dim` elements there, and the cache outlives the call.
            let row = unsafe { std::slice::from_raw_parts(row, dim) };
            widen(simd, row, &mut to[..dim]);
            *start = to.as_ptr();
        }
        Rows {
            start,
            len: self.len,
        }
    }
}

/// `wide = row` in f32; equal lengths.
#[inline(always)]
fn widen<S: Simd, T: Element>(simd: S, row: &[T], wide: &mut [f32]) {
    let mut from = row.chunks_exact(S::LANES);
    let mut to = wide.chunks_exact_mut(S::LANES);
    for (from, to) in (&mut from).zip(&mut to) {
        // SAFETY: both have LANES elements.
        unsafe { simd.store(to.as_mut_ptr(), T::load(simd, from.as_ptr())) };
    }
    for (x, wide) in from.remainder().iter().zip(to.into_remainder()) {
        *wide = x.to_f32();
    }
}

/// From `first` to the end of its tile, or to `end`.
fn tile_from(first: usize, end: usize) -> Range<usize> {
    first..((first / KEYS + 1) * KEYS).min(end).max(first)
}

impl<T: Element> Task for Matrix<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        self.start::<S>();
        let (head, k_dim, v_dim) = (self.head, self.call.k_dim, self.call.v_dim);
        let (k_context, v_context) = self.call.context(self.plan);
        let keys = self.keys(self.rows.clone());
        let num_blocks = blocks::<S>(self.lanes()).count();
        let mut tile = tile_from(keys.start, keys.end);
        let mut k = Rows::new(&k_context, &tile, head, k_dim);
        let mut v = Rows::new(&v_context, &tile, head, v_dim);
        while !tile.is_empty() {
            let next = tile_from(tile.end, keys.end);
            let next_k = Rows::new(&k_context, &next, head, k_dim);
            let next_v = Rows::new(&v_context, &next, head, v_dim);
            let mut ahead = [
                Ahead::new(next_k.as_slice(), k_dim, num_blocks),
                Ahead::new(next_v.as_slice(), v_dim, num_blocks),
            ];
            let k_rows = k.copy(simd, k_dim, self.k);
            let v_rows = v.copy(simd, v_dim, self.v);
            for block in blocks::<S>(self.lanes()) {
                let seen = self.keys(self.rows_of(&block));
                let seen = seen.start.max(tile.start)..seen.end.min(tile.end);
                if seen.is_empty() {
                    continue;
                }
                let part = seen.start - tile.start..seen.end - tile.start;
                let k = &k_rows.start[part.clone()];
                let v = &v_rows.start[part];
                match block.registers {
                    1 => self.step::<S, 1>(simd, block, seen, k, v, &mut ahead),
                    2 => self.step::<S, 2>(simd, block, seen, k, v, &mut ahead),
                    _ => self.step::<S, 3>(simd, block, seen, k, v, &mut ahead),
                }
            }
            (tile, k, v) = (next, next_k, next_v);
        }
        self.emit::<S>();
    }
}

impl<T: Element> Matrix<'_, T> {
    fn lanes(&self) -> usize {
        self.rows.len() * self.call.group
    }

    /// Row (counted from the sequence's first) and query head of a lane.
    fn row_head(&self, lane: usize) -> (usize, usize) {
        let group = self.call.group;
        (
            self.rows.start + lane / group,
            self.head * group + lane % group,
        )
    }

    /// The query rows that have lanes in a block.
    fn rows_of<S: Simd>(&self, block: &Block<S>) -> Range<usize> {
        let last = block.lanes().end.min(self.lanes()) - 1;
        self.row_head(block.lane).0..self.row_head(last).0 + 1
    }

    /// Keys of the chunk that any of some query rows sees.
    fn keys(&self, rows: Range<usize>) -> Range<usize> {
        let (mask, len) = (self.call.options.mask, self.plan.len);
        let first = self.plan.position(rows.start).max(0);
        let last = self.plan.position(rows.end - 1);
        let chunk = self.plan.chunk_keys(self.chunk);
        let start = visible(mask, first, len).start.max(chunk.start);
        start..visible(mask, last, len).end.min(chunk.end).max(start)
    }

    /// Keys that all of some query rows see.
    fn keys_of_all(&self, rows: Range<usize>) -> Range<usize> {
        let (mask, len) = (self.call.options.mask, self.plan.len);
        let first = visible(mask, self.plan.position(rows.start), len);
        let last = visible(mask, self.plan.position(rows.end - 1), len);
        last.start..first.end
    }

    #[inline(always)]
    fn start<S: Simd>(&mut self) {
        let dim = self.call.k_dim;
        let mut row = [0.0; MAX_DIM];
        let row = &mut row[..dim];
        self.q.fill(0.0);
        for block in blocks::<S>(self.lanes()) {
            for lane in block.lanes().start..block.lanes().end.min(self.lanes()) {
                let (number, head) = self.row_head(lane);
                let number = self.plan.rows.start + number;
                let scale = self.call.options.scale;
                self.call.q.load(number, head, scale, row);
                let q = &mut self.q[block.lane * dim + lane - block.lane..];
                for (q, x) in q.iter_mut().step_by(block.width()).zip(&*row) {
                    *q = *x;
                }
            }
        }
        self.sums.fill(0.0);
        self.max.fill(Running::EMPTY.max);
        self.sum.fill(Running::EMPTY.sum);
    }

    #[inline(always)]
    fn emit<S: Simd>(&mut self) {
        let dim = self.call.v_dim;
        let mut row = [0.0; MAX_DIM];
        let row = &mut row[..dim];
        for block in blocks::<S>(self.lanes()) {
            for lane in block.lanes().start..block.lanes().end.min(self.lanes()) {
                let sums = &self.sums[block.lane * dim + lane - block.lane..];
                for (x, sum) in row.iter_mut().zip(sums.iter().step_by(block.width())) {
                    *x = *sum;
                }
                let running = Running {
                    max: self.max[lane],
                    sum: self.sum[lane],
                };
                let row_head = self.row_head(lane);
                self.call
                    .emit(self.plan, self.chunk, row_head, running, row);
            }
        }
    }

    /// What a block has of the keys `seen`, whose K and V these are.
    #[inline(always)]
    fn step<S: Simd, const R: usize>(
        &mut self,
        simd: S,
        block: Block<S>,
        seen: Range<usize>,
        k: &[*const f32],
        v: &[*const f32],
        [ahead_k, ahead_v]: &mut [Ahead<'_, T>; 2],
    ) {
        let (lanes, width) = (block.lanes(), R * S::LANES);
        let q = &self.q[block.lane * self.call.k_dim..][..width * self.call.k_dim];
        // SAFETY: the rows of K have `k_dim` elements.
        unsafe { multiply_keys::<S, T, R>(simd, q, k, self.scores, ahead_k) };
        self.finish_scores(&block, &seen);
        let scores = &mut self.scores[..seen.len() * width];
        let shrink = &mut self.shrink[..width];
        let (max, sum) = (&mut self.max[lanes.clone()], &mut self.sum[lanes]);
        absorb(simd, max, sum, shrink, scores);
        let sums = &mut self.sums[block.lane * self.call.v_dim..][..width * self.call.v_dim];
        // SAFETY: the rows of V have `v_dim` elements.
        unsafe { multiply_values::<S, T, R>(simd, scores, v, shrink, sums, ahead_v) };
    }

    /// Cap, slope and mask of the scaled products of a block with the keys `seen`.
    #[inline(always)]
    fn finish_scores<S: Simd>(&mut self, block: &Block<S>, seen: &Range<usize>) {
        let (options, width) = (self.call.options, block.width());
        let lanes = block.lane..block.lanes().end.min(self.lanes());
        let all_see = self.keys_of_all(self.rows_of(block));
        let scores = &mut self.scores[..seen.len() * width];
        if let Some(cap) = options.softcap {
            cap_scores(scores, cap);
        }
        if let Some(slopes) = &options.alibi_slopes {
            let mut slope = [0.0; WIDTH];
            let mut position = [0; WIDTH];
            for (i, lane) in lanes.clone().enumerate() {
                let row = self.rows.start + lane / self.call.group;
                position[i] = self.plan.position(row);
                slope[i] = slopes[self.head * self.call.group + lane % self.call.group];
            }
            for (key, scores) in seen.clone().zip(scores.chunks_exact_mut(width)) {
                for ((s, slope), position) in scores.iter_mut().zip(&slope).zip(&position) {
                    *s += slope * (key as i64 - position) as f32;
                }
            }
        }
        if all_see.start <= seen.start && seen.end <= all_see.end {
            return;
        }
        for (i, lane) in lanes.enumerate() {
            let row = self.rows.start + lane / self.call.group;
            let keys = visible(options.mask, self.plan.position(row), self.plan.len);
            // By assignment, so that whatever was there does not matter.
            let before = seen.start..keys.start.min(seen.end);
            let behind = keys.end.max(seen.start)..seen.end;
            for key in before.chain(behind) {
                scores[(key - seen.start) * width + i] = f32::NEG_INFINITY;
            }
        }
    }
}
