//! The softmax of the streaming kernel, for all of its query vectors at once.
//!
//! Scores lie token by token, `[tokens, width]`, so that every step is a loop over lanes and
//! nothing is reduced across a register.

use super::plan::SeqPlan;
use super::scores::{Running, absorb, cap_scores, visible};
use super::simd::{MAX_LANES, Simd};
use crate::ops::AttentionOptions;

/// A *lane* is a query vector: KV head, then row, then head within the group. Behind the last
/// lane there are idle ones, up to whole registers; what is computed for them is finite or not,
/// and never looked at.
pub(super) struct Lanes<'a> {
    /// Largest score so far, `[width]`.
    max: &'a mut [f32],
    /// Sum of `e^(score − max)` so far, `[width]`.
    sum: &'a mut [f32],
    /// Factor by which what was accumulated before the last step shrinks, `[width]`.
    pub shrink: &'a mut [f32],
    len: usize,
    rows: usize,
    group: usize,
}

impl<'a> Lanes<'a> {
    /// `lanes`, and idle ones up to whole registers.
    pub(super) fn width(lanes: usize) -> usize {
        lanes.next_multiple_of(MAX_LANES)
    }

    /// Floats of memory that `lanes` lanes need.
    pub(super) fn memory(lanes: usize) -> usize {
        3 * Self::width(lanes)
    }

    pub(super) fn new(memory: &'a mut [f32], len: usize, rows: usize, group: usize) -> Self {
        let width = Self::width(len);
        let (max, memory) = memory.split_at_mut(width);
        let (sum, shrink) = memory.split_at_mut(width);
        max.fill(Running::EMPTY.max);
        sum.fill(Running::EMPTY.sum);
        Self {
            max,
            sum,
            shrink,
            len,
            rows,
            group,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
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
            cap_scores(scores, cap);
        }
        let width = self.max.len();
        let end = first + scores.len() / width;
        for row in 0..self.rows {
            let position = plan.position(row);
            let keys = visible(options.mask, position, plan.len);
            let all_visible = keys.start <= first && end <= keys.end;
            if all_visible && options.alibi_slopes.is_none() {
                continue;
            }
            for (token, scores) in (first..end).zip(scores.chunks_exact_mut(width)) {
                let of_row = scores[..self.len]
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

    /// One softmax step of every lane: scores become weights.
    #[inline(always)]
    pub(super) fn absorb<S: Simd>(&mut self, simd: S, scores: &mut [f32]) {
        const { assert!(MAX_LANES.is_multiple_of(S::LANES)) };
        absorb(simd, self.max, self.sum, self.shrink, scores);
    }
}
