//! How a call is cut into tasks.
//!
//! The cut of a sequence depends on its own lengths alone, never on the batch, the blocks or
//! the number of threads: that is what makes its result bit-identical in any company.

use std::ops::Range;

use super::scores::visible;
use crate::ops::{Mask, PageTable};

/// Rows of a query tile of the matrix kernel: query rows times heads of a group.
const TILE_ROWS: usize = 256;

/// Up to this many rows per KV head the streaming kernel is faster: it reads whole token rows,
/// and the blocks of the matrix kernel would not be full.
const STREAM_ROWS: usize = 31;

/// One sequence of a call: its rows, the keys any of them sees, and its cut.
#[derive(Debug, Clone)]
pub(super) struct SeqPlan {
    pub seq: usize,
    pub rows: Range<usize>,
    pub len: usize,
    /// Keys that any row sees.
    pub keys: Range<usize>,
    pub kernel: Kernel,
    /// Keys of a context chunk.
    pub chunk: usize,
    pub chunks: usize,
    /// First record of this sequence in the workspace, if there are several chunks.
    pub records: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    /// All rows and all heads against a chunk of keys, streamed once.
    Stream,
    /// Tiles of this many rows of one KV head against tiles of keys, as matrix products.
    Matrix { rows: usize },
}

/// A unit of work; a merge is of all chunks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    /// Index into the plans.
    pub plan: u32,
    pub chunk: u32,
    /// KV head and first row of the tile, counted from the sequence's first; the streaming
    /// kernel takes all of both.
    pub head: u32,
    pub row: u32,
}

/// The cut of a whole call, in memory that is used again.
#[derive(Debug, Default)]
pub(super) struct Cut {
    pub plans: Vec<SeqPlan>,
    pub tasks: Vec<Task>,
    /// What to merge afterwards: one entry per row and KV head of a split sequence.
    pub merges: Vec<Task>,
    /// Records of partial results: one per (chunk, row, head) of a split sequence.
    pub records: usize,
}

impl SeqPlan {
    /// Position of row `i` of the sequence; negative if it has more rows than tokens.
    pub(super) fn position(&self, row: usize) -> i64 {
        self.len as i64 - self.rows.len() as i64 + row as i64
    }

    /// The keys of a chunk.
    pub(super) fn chunk_keys(&self, chunk: usize) -> Range<usize> {
        let start = self.keys.start + chunk * self.chunk;
        start..(start + self.chunk).min(self.keys.end)
    }
}

impl Cut {
    /// Cuts a call. Sequences without rows or without keys have no tasks.
    pub(super) fn fill(&mut self, table: &PageTable, mask: Mask, heads: usize, kv_heads: usize) {
        self.plans.clear();
        self.tasks.clear();
        self.merges.clear();
        self.records = 0;
        let group = heads / kv_heads;
        for seq in 0..table.num_seqs() {
            let rows = table.rows(seq);
            let len = table.seq_lens()[seq] as usize;
            if rows.is_empty() || len == 0 {
                continue;
            }
            let first_row = (len as i64 - rows.len() as i64).max(0);
            let keys = visible(mask, first_row, len).start..len;
            let (kernel, chunk) = cut(rows.len(), keys.len(), group);
            let mut plan = SeqPlan {
                seq,
                rows,
                len,
                chunk,
                chunks: keys.len().div_ceil(chunk),
                keys,
                kernel,
                records: self.records,
            };
            if plan.chunks > 1 {
                self.records += plan.chunks * plan.rows.len() * heads;
            } else {
                plan.records = 0;
            }
            self.push_tasks(&plan, kv_heads);
            self.plans.push(plan);
        }
    }

    fn push_tasks(&mut self, plan: &SeqPlan, kv_heads: usize) {
        let index = self.plans.len() as u32;
        let task = |chunk: usize, head: usize, row: usize| Task {
            plan: index,
            chunk: chunk as u32,
            head: head as u32,
            row: row as u32,
        };
        let mut push = |chunk, head, row| self.tasks.push(task(chunk, head, row));
        match plan.kernel {
            Kernel::Stream => (0..plan.chunks).for_each(|chunk| push(chunk, 0, 0)),
            // The last rows see the most keys: longest first keeps all threads busy to the end.
            Kernel::Matrix { rows } => {
                for row in (0..plan.rows.len()).step_by(rows).rev() {
                    for chunk in 0..plan.chunks {
                        (0..kv_heads).for_each(|head| push(chunk, head, row));
                    }
                }
            }
        }
        if plan.chunks > 1 {
            for row in 0..plan.rows.len() {
                self.merges
                    .extend((0..kv_heads).map(|head| task(0, head, row)));
            }
        }
    }
}

/// The kernel for a sequence and the keys of a context chunk.
fn cut(rows: usize, keys: usize, group: usize) -> (Kernel, usize) {
    if rows == 1 || rows * group <= STREAM_ROWS {
        // Enough chunks for the cores of a large machine, of a size that hides their merging.
        let chunk = (keys / 8).next_multiple_of(64).clamp(64, 512);
        return (Kernel::Stream, chunk);
    }
    let tile = (TILE_ROWS / group).max(1);
    let chunk = if rows <= tile {
        // One tile of queries per KV head: only the context is left to be split.
        (keys / 8).next_multiple_of(256).max(1024)
    } else {
        keys
    };
    (Kernel::Matrix { rows: tile }, chunk)
}
