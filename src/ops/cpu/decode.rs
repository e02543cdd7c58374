//! The streaming kernel: few queries, any number of keys.
//!
//! A task takes all heads of a chunk of tokens, so that memory is read in whole token rows,
//! once, for every query head of a group. Tokens go by in tiles of 16: products with K for all
//! heads, one softmax step, then V.

use super::attention::{Call, with_scratch};
use super::element::Element;
use super::plan::SeqPlan;
use super::scores::{Running, finish_scores, visible};
use super::simd::{Simd, Task, dispatch};

/// Tokens between two softmax steps.
const TILE: usize = 16;

/// Computes one chunk of one sequence, all rows and heads.
///
/// A *lane* is a query vector: KV head, then row, then head within the group.
pub(super) fn stream_task<T: Element>(call: &Call<'_, T>, plan: &SeqPlan, chunk: usize) {
    let lanes = call.heads * plan.rows.len();
    let len = lanes * (call.k_dim + call.v_dim + TILE + 3);
    with_scratch(len, |scratch| {
        let (q, scratch) = scratch.split_at_mut(lanes * call.k_dim);
        let (sums, scratch) = scratch.split_at_mut(lanes * call.v_dim);
        let (scores, scratch) = scratch.split_at_mut(lanes * TILE);
        let (max, scratch) = scratch.split_at_mut(lanes);
        let (sum, shrink) = scratch.split_at_mut(lanes);
        dispatch(Stream {
            call,
            plan,
            chunk,
            q,
            sums,
            scores,
            max,
            sum,
            shrink,
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
    /// `[lanes, TILE]`.
    scores: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    shrink: &'a mut [f32],
}

impl<T: Element> Stream<'_, T> {
    /// Row and query head of a lane.
    #[inline(always)]
    fn row_head(&self, lane: usize) -> (usize, usize) {
        let group = self.call.group;
        let per_head = self.plan.rows.len() * group;
        let within = lane % per_head;
        (within / group, lane / per_head * group + within % group)
    }

    fn start(&mut self) {
        let scale = self.call.options.scale;
        for lane in 0..self.max.len() {
            let (row, head) = self.row_head(lane);
            let k_dim = self.call.k_dim;
            let q = &mut self.q[lane * k_dim..][..k_dim];
            let row = self.plan.rows.start + row;
            self.call.q.load(row, head, scale, q);
        }
        self.sums.fill(0.0);
        self.max.fill(Running::EMPTY.max);
        self.sum.fill(Running::EMPTY.sum);
    }

    /// One online softmax step over a tile of `n` tokens from `first` on.
    #[inline(always)]
    fn softmax(&mut self, first: usize, n: usize) {
        let options = self.call.options;
        for lane in 0..self.max.len() {
            let (row, head) = self.row_head(lane);
            let position = self.plan.position(row);
            let keys = visible(options.mask, position, self.plan.len);
            let scores = &mut self.scores[lane * TILE..][..n];
            finish_scores(scores, first, position, &keys, head, options);
            let mut running = Running {
                max: self.max[lane],
                sum: self.sum[lane],
            };
            self.shrink[lane] = running.absorb(scores);
            (self.max[lane], self.sum[lane]) = (running.max, running.sum);
        }
    }

    fn emit(&self) {
        let v_dim = self.call.v_dim;
        for lane in 0..self.max.len() {
            let running = Running {
                max: self.max[lane],
                sum: self.sum[lane],
            };
            let sums = &self.sums[lane * v_dim..][..v_dim];
            self.call
                .emit(self.plan, self.chunk, self.row_head(lane), running, sums);
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
        let per_head = self.plan.rows.len() * self.call.group;
        let empty: &[T] = &[];
        let (mut k_rows, mut v_rows) = ([empty; TILE], [empty; TILE]);
        for first in keys.clone().step_by(TILE) {
            let n = TILE.min(keys.end - first);
            for i in 0..n {
                (k_rows[i], v_rows[i]) = (k.row(first + i), v.row(first + i));
            }
            let mut token = 0;
            while token < n {
                let some = &k_rows[token..n];
                let step = if S::MANY_REGISTERS { 4 } else { 2 };
                for head in 0..kv_heads {
                    let lane = head * per_head;
                    let q = &self.q[lane * k_dim..][..per_head * k_dim];
                    let out = &mut self.scores[lane * TILE + token..];
                    match (some.len() >= step, S::MANY_REGISTERS) {
                        (true, true) => dots::<S, T, 4>(simd, q, k_dim, some, head, out),
                        (true, false) => dots::<S, T, 2>(simd, q, k_dim, some, head, out),
                        _ => dots::<S, T, 1>(simd, q, k_dim, some, head, out),
                    }
                }
                token += if some.len() >= step { step } else { 1 };
            }
            self.softmax(first, n);
            for head in 0..kv_heads {
                let lanes = head * per_head..(head + 1) * per_head;
                weigh(
                    simd,
                    &mut self.sums[lanes.start * v_dim..lanes.end * v_dim],
                    v_dim,
                    &self.shrink[lanes.clone()],
                    &self.scores[lanes.start * TILE..lanes.end * TILE],
                    &v_rows[..n],
                    head,
                );
            }
        }
        self.emit();
    }
}

/// `out[lane * TILE + j] = q[lane] · k[j][head]` for all lanes of one KV head and `N` tokens.
#[inline(always)]
fn dots<S: Simd, T: Element, const N: usize>(
    simd: S,
    q: &[f32],
    dim: usize,
    k: &[&[T]],
    head: usize,
    out: &mut [f32],
) {
    let mut rows = [&k[0][..0]; N];
    for (row, k) in rows.iter_mut().zip(k) {
        *row = &k[head * dim..(head + 1) * dim];
    }
    let mut lane = 0;
    for some in q.chunks(4 * dim) {
        let out = &mut out[lane * TILE..];
        match some.len() / dim {
            4 => dot_block::<S, T, 4, N>(simd, some, dim, rows, out),
            3 => dot_block::<S, T, 3, N>(simd, some, dim, rows, out),
            2 => dot_block::<S, T, 2, N>(simd, some, dim, rows, out),
            _ => dot_block::<S, T, 1, N>(simd, some, dim, rows, out),
        }
        lane += 4;
    }
}

/// `out[h * TILE + n] = q[h] · k[n]`: `H * N` sums in registers.
#[inline(always)]
fn dot_block<S: Simd, T: Element, const H: usize, const N: usize>(
    simd: S,
    q: &[f32],
    dim: usize,
    k: [&[T]; N],
    out: &mut [f32],
) {
    assert!(q.len() == H * dim && k.iter().all(|k| k.len() == dim));
    let mut sums = [[simd.splat(0.0); N]; H];
    let whole = dim - dim % S::LANES;
    for at in (0..whole).step_by(S::LANES) {
        let mut k_part = [simd.splat(0.0); N];
        for n in 0..N {
            // SAFETY: `at + LANES <= whole <= dim`, the length of every row of k.
            k_part[n] = unsafe { T::load(simd, k[n].as_ptr().add(at)) };
        }
        for h in 0..H {
            // SAFETY: as above; q holds H rows of `dim`.
            let q_part = unsafe { simd.load_f32(q.as_ptr().add(h * dim + at)) };
            for n in 0..N {
                sums[h][n] = simd.mul_add(q_part, k_part[n], sums[h][n]);
            }
        }
    }
    for h in 0..H {
        for n in 0..N {
            let mut sum = simd.sum(sums[h][n]);
            for at in whole..dim {
                sum += q[h * dim + at] * k[n][at].to_f32();
            }
            out[h * TILE + n] = sum;
        }
    }
}

/// `sums[lane] = sums[lane] * shrink[lane] + Σ_j weights[lane * TILE + j] * v[j][head]` for all
/// lanes of one KV head.
#[inline(always)]
fn weigh<S: Simd, T: Element>(
    simd: S,
    sums: &mut [f32],
    dim: usize,
    shrink: &[f32],
    weights: &[f32],
    v: &[&[T]],
    head: usize,
) {
    let empty: &[T] = &[];
    let mut rows = [empty; TILE];
    for (row, v) in rows.iter_mut().zip(v) {
        *row = &v[head * dim..(head + 1) * dim];
    }
    let v = &rows[..v.len()];
    for (i, some) in sums.chunks_mut(4 * dim).enumerate() {
        let (shrink, weights) = (&shrink[i * 4..], &weights[i * 4 * TILE..]);
        match some.len() / dim {
            4 => weigh_block::<S, T, 4>(simd, some, dim, shrink, weights, v),
            3 => weigh_block::<S, T, 3>(simd, some, dim, shrink, weights, v),
            2 => weigh_block::<S, T, 2>(simd, some, dim, shrink, weights, v),
            _ => weigh_block::<S, T, 1>(simd, some, dim, shrink, weights, v),
        }
    }
}

#[inline(always)]
fn weigh_block<S: Simd, T: Element, const H: usize>(
    simd: S,
    sums: &mut [f32],
    dim: usize,
    shrink: &[f32],
    weights: &[f32],
    v: &[&[T]],
) {
    let mut at = 0;
    if S::MANY_REGISTERS {
        while at + 4 * S::LANES <= dim {
            weigh_columns::<S, T, H, 4>(simd, sums, dim, at, shrink, weights, v);
            at += 4 * S::LANES;
        }
    }
    while at + 2 * S::LANES <= dim {
        weigh_columns::<S, T, H, 2>(simd, sums, dim, at, shrink, weights, v);
        at += 2 * S::LANES;
    }
    if at + S::LANES <= dim {
        weigh_columns::<S, T, H, 1>(simd, sums, dim, at, shrink, weights, v);
        at += S::LANES;
    }
    for h in 0..H {
        for x in at..dim {
            let mut sum = sums[h * dim + x] * shrink[h];
            for (j, v) in v.iter().enumerate() {
                sum += weights[h * TILE + j] * v[x].to_f32();
            }
            sums[h * dim + x] = sum;
        }
    }
}

/// `C` registers of columns from `at` on, for `H` lanes.
#[inline(always)]
fn weigh_columns<S: Simd, T: Element, const H: usize, const C: usize>(
    simd: S,
    sums: &mut [f32],
    dim: usize,
    at: usize,
    shrink: &[f32],
    weights: &[f32],
    v: &[&[T]],
) {
    assert!(sums.len() == H * dim && at + C * S::LANES <= dim);
    assert!(shrink.len() >= H && weights.len() >= H * TILE && v.len() <= TILE);
    let mut acc = [[simd.splat(0.0); C]; H];
    for h in 0..H {
        let factor = simd.splat(shrink[h]);
        for c in 0..C {
            // SAFETY: row h of `sums` holds `dim` elements, of which these are some.
            let old = unsafe { simd.load_f32(sums.as_ptr().add(h * dim + at + c * S::LANES)) };
            acc[h][c] = simd.mul(old, factor);
        }
    }
    for (j, v) in v.iter().enumerate() {
        assert!(v.len() == dim);
        let mut part = [simd.splat(0.0); C];
        for c in 0..C {
            // SAFETY: the row holds `dim` elements.
            part[c] = unsafe { T::load(simd, v.as_ptr().add(at + c * S::LANES)) };
        }
        for h in 0..H {
            let weight = simd.splat(weights[h * TILE + j]);
            for c in 0..C {
                acc[h][c] = simd.mul_add(weight, part[c], acc[h][c]);
            }
        }
    }
    for h in 0..H {
        for c in 0..C {
            // SAFETY: as for the load above.
            unsafe {
                simd.store(
                    sums.as_mut_ptr().add(h * dim + at + c * S::LANES),
                    acc[h][c],
                );
            }
        }
    }
}
