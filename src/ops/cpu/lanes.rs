//! The softmax of the streaming kernel, for all of its query vectors at once.
//!
//! Scores lie token by token, `[tokens, lanes]`, so that every step is a loop over lanes and
//! nothing is reduced across a register.

use super::plan::SeqPlan;
use super::scores::{Running, base, exp, tanh, visible};
use crate::ops::AttentionOptions;

/// A *lane* is a query vector: KV head, then row, then head within the group.
pub(super) struct Lanes<'a> {
    /// Largest score so far, `[lanes]`.
    max: &'a mut [f32],
    /// Sum of `e^(score − max)` so far, `[lanes]`.
    sum: &'a mut [f32],
    /// Factor by which what was accumulated before the last step shrinks, `[lanes]`.
    pub shrink: &'a mut [f32],
    /// Room for what the largest score of a step is subtracted from, `[lanes]`.
    base: &'a mut [f32],
    rows: usize,
    group: usize,
}

impl<'a> Lanes<'a> {
    /// Floats of memory that `lanes` lanes need.
    pub(super) fn memory(lanes: usize) -> usize {
        4 * lanes
    }

    pub(super) fn new(memory: &'a mut [f32], rows: usize, group: usize) -> Self {
        let lanes = memory.len() / 4;
        let (max, memory) = memory.split_at_mut(lanes);
        let (sum, memory) = memory.split_at_mut(lanes);
        let (shrink, base) = memory.split_at_mut(lanes);
        max.fill(Running::EMPTY.max);
        sum.fill(Running::EMPTY.sum);
        Self {
            max,
            sum,
            shrink,
            base,
            rows,
            group,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.max.len()
    }

    /// Row (counted from the sequence's first) and query head of a lane.
    pub(super) fn row_head(&self, lane: usize) -> (usize, usize) {
        let per_head = self.rows * self.group;
        let (kv_head, within) = (lane / per_head, lane % per_head);
        (
            within / self.group,
            kv_head * self.group + within % self.group,
        )
    }

    pub(super) fn running(&self, lane: usize) -> Running {
        Running {
            max: self.max[lane],
            sum: self.sum[lane],
        }
    }

    /// Cap, slope and mask of the scaled products with the tokens from `first` on.
    #[inline(always)]
    pub(super) fn finish_scores(
        &self,
        scores: &mut [f32],
        first: usize,
        plan: &SeqPlan,
        options: &AttentionOptions,
    ) {
        if let Some(cap) = options.softcap {
            let inverse = 1.0 / cap;
            for s in scores.iter_mut() {
                *s = cap * tanh(*s * inverse);
            }
        }
        let lanes = self.len();
        let end = first + scores.len() / lanes;
        for row in 0..self.rows {
            let position = plan.position(row);
            let keys = visible(options.mask, position, plan.len);
            let all_visible = keys.start <= first && end <= keys.end;
            if all_visible && options.alibi_slopes.is_none() {
                continue;
            }
            for (token, scores) in (first..end).zip(scores.chunks_exact_mut(lanes)) {
                let of_row = scores
                    .chunks_exact_mut(self.group)
                    .skip(row)
                    .step_by(self.rows);
                if !keys.contains(&token) {
                    of_row.for_each(|scores| scores.fill(f32::NEG_INFINITY));
                } else if let Some(slopes) = &options.alibi_slopes {
                    let distance = (token as i64 - position) as f32;
                    for (scores, slopes) in of_row.zip(slopes.chunks_exact(self.group)) {
                        for (s, slope) in scores.iter_mut().zip(slopes) {
                            *s += slope * distance;
                        }
                    }
                }
            }
        }
    }

    /// As [`Running::absorb`], for every lane.
    #[inline(always)]
    pub(super) fn absorb(&mut self, scores: &mut [f32]) {
        let lanes = self.len();
        self.shrink.copy_from_slice(self.max);
        for token in scores.chunks_exact(lanes) {
            for (max, &s) in self.max.iter_mut().zip(token) {
                *max = if s > *max { s } else { *max };
            }
        }
        for (b, &max) in self.base.iter_mut().zip(&*self.max) {
            *b = base(max);
        }
        for (shrink, &b) in self.shrink.iter_mut().zip(&*self.base) {
            *shrink = exp(*shrink - b);
        }
        for (sum, &shrink) in self.sum.iter_mut().zip(&*self.shrink) {
            *sum *= shrink;
        }
        for token in scores.chunks_exact_mut(lanes) {
            for (s, &b) in token.iter_mut().zip(&*self.base) {
                *s = exp(*s - b);
            }
            for (sum, &s) in self.sum.iter_mut().zip(&*token) {
                *sum += s;
            }
        }
    }
}
