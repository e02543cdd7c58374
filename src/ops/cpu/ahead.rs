//! Fetching K/V rows before they are needed.

use super::simd::Simd;

/// Tokens between two softmax steps of the streaming kernel.
pub(super) const TILE: usize = 16;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// How far ahead rows are fetched, in bytes, if that is less than a tile. What is fetched
/// should still be in the first cache level when it is needed: reading it from the second
/// would disturb the hardware's own prefetching, which follows the order of our fetches.
const AHEAD: usize = 32 << 10;

/// The first lines of a row are fetched a row early: hardware follows a run of addresses up to
/// the end of a page only, and a row often is one.
const OPENING: usize = 2;

/// Asks for the rows that a tile needs later, a line at a time and in the order of memory.
/// Evenly spread between the products they arrive in time, while asking for all at once would
/// fill the queues to memory and stall.
pub(super) struct Ahead<T> {
    /// Those of this tile, then those of the next.
    rows: [*const T; 2 * TILE],
    /// Lines of a row.
    lines: usize,
    row: usize,
    line: usize,
    end: usize,
}

impl<T> Ahead<T> {
    /// While a tile is computed, fetches as many rows as it has, of `len` elements each.
    #[inline(always)]
    pub(super) fn new(now: &[*const T; TILE], next: &[*const T; TILE], len: usize) -> Self {
        let mut rows = [now[0]; 2 * TILE];
        rows[..TILE].copy_from_slice(now);
        rows[TILE..].copy_from_slice(next);
        let bytes = len * size_of::<T>();
        let row = (AHEAD / bytes).clamp(TILE / 4, TILE);
        Self {
            rows,
            lines: bytes.div_ceil(LINE),
            row,
            line: 0,
            end: row + TILE,
        }
    }

    /// Asks for the next lines.
    #[inline(always)]
    pub(super) fn fetch<S: Simd>(&mut self, simd: S, lines: usize) {
        for _ in 0..lines {
            if self.row >= self.end {
                return;
            }
            let byte = self.line * LINE;
            simd.prefetch(self.rows[self.row].wrapping_byte_add(byte));
            if self.line < OPENING
                && let Some(next) = self.rows.get(self.row + 1)
            {
                simd.prefetch(next.wrapping_byte_add(byte));
            }
            self.line += 1;
            if self.line == self.lines {
                (self.row, self.line) = (self.row + 1, 0);
            }
        }
    }
}
