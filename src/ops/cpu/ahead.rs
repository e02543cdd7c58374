//! Fetching K/V rows before they are needed.

use super::simd::Simd;

/// Tokens between two softmax steps of the streaming kernel.
pub(super) const TILE: usize = 16;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// How far ahead rows are fetched, in bytes, if that is less than a tile. What is fetched
/// should still be in the first cache level when it is needed, beside the queries and sums.
const AHEAD: usize = 16 << 10;

/// The first lines of a row are fetched once more, a row early: hardware follows a run of
/// addresses up to the end of a page only, and a row often is one.
const OPENING: usize = 4;

/// The rows of a tile, K or V, all heads.
#[derive(Clone, Copy)]
pub(super) struct Rows<T> {
    /// Behind the last token its row stands in.
    pub start: [*const T; TILE],
    /// Elements of a row.
    pub len: usize,
}

/// Asks for the rows that are needed later, a line at a time and in the order of use: K of a
/// tile, its V, K of the next. Evenly spread between the products they arrive in time, while
/// asking for many at once fills the queues to memory, and what finds them full is lost.
pub(super) struct Ahead<T> {
    rows: [*const T; 2 * TILE],
    /// Lines of a row of the first tile, and of the second.
    lines: [usize; 2],
    row: usize,
    line: usize,
    end: usize,
}

impl<T> Ahead<T> {
    /// While the tile `now` is computed, fetches as many rows as it has, of itself and of `next`.
    #[inline(always)]
    pub(super) fn new(now: &Rows<T>, next: &Rows<T>) -> Self {
        let mut rows = [now.start[0]; 2 * TILE];
        rows[..TILE].copy_from_slice(&now.start);
        rows[TILE..].copy_from_slice(&next.start);
        let bytes = |rows: &Rows<T>| rows.len * size_of::<T>();
        let row = (AHEAD / bytes(now)).clamp(TILE / 4, TILE);
        Self {
            rows,
            lines: [bytes(now).div_ceil(LINE), bytes(next).div_ceil(LINE)],
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
            if self.line >= self.lines[self.row / TILE] {
                (self.row, self.line) = (self.row + 1, 0);
            }
        }
    }
}
