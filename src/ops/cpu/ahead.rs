//! Fetching K/V rows before they are needed.

use super::simd::Simd;

/// Tokens between two softmax steps of the streaming kernel.
pub(super) const TILE: usize = 16;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// How far ahead rows are fetched, in bytes, if that is less than a tile. What is fetched
/// should still be in the first cache level when it is needed, beside the queries and sums.
const AHEAD: usize = 16 << 10;

/// Rows of up to so many bytes are short.
const SHORT: usize = 1 << 10;

/// The first lines of a row are fetched once more, a row early: hardware follows a run of
/// addresses up to the end of a page only, and a row often is one.
const OPENING: usize = 4;

/// Asks for the rows that are needed later, in the order of use: K of a tile, its V, K of the
/// next. Evenly spread between the products they arrive in time, while asking for many at once
/// fills the queues to memory, and what finds them full is lost.
///
/// Long rows are asked for a line at a time, one row after the other. Of short rows several fit
/// a page and all of their heads go by quickly, so that order matters less than the work of
/// keeping it: with a part of a row the same part of a later one is asked for.
pub(super) struct Ahead<'a, T> {
    /// Those of the tile that is computed, and of the one after it.
    rows: &'a [*const T],
    /// Lines of a row of the first tile, and of the second.
    lines: [usize; 2],
    short: bool,
    /// log2 of the register blocks that go through the same rows, rounded down.
    blocks: u32,
    /// Rows from one in use to the one that is asked for meanwhile.
    distance: usize,
    row: usize,
    line: usize,
}

impl<'a, T> Ahead<'a, T> {
    /// While the first [`TILE`] of `rows` are computed, by so many register blocks, fetches as
    /// many from a later one on; `lens`: elements of a row of the first tile, and of the second.
    #[inline(always)]
    pub(super) fn new(rows: &'a [*const T], lens: [usize; 2], blocks: usize) -> Self {
        assert!(rows.len() == 2 * TILE);
        let [bytes, next] = lens.map(|len| len * size_of::<T>());
        let distance = (AHEAD / bytes).clamp(TILE / 4, TILE);
        Self {
            rows,
            lines: [bytes.div_ceil(LINE), next.div_ceil(LINE)],
            short: bytes <= SHORT,
            blocks: blocks.ilog2(),
            distance,
            row: distance,
            line: 0,
        }
    }

    /// The rows to ask for while those from `token` of the first tile on are used, if they are
    /// short.
    #[inline(always)]
    pub(super) fn later(&self, token: usize) -> &'a [*const T] {
        &self.rows[token + self.distance..]
    }

    /// Called with every part of `elements` elements that a register block loads of `N` rows,
    /// which begins `at` elements behind the start of the `later` ones.
    #[inline(always)]
    pub(super) fn fetch<S: Simd, const N: usize>(
        &mut self,
        simd: S,
        later: [*const T; N],
        at: usize,
        elements: usize,
    ) {
        let bytes = elements * size_of::<T>();
        if self.short {
            for later in later {
                for byte in (0..bytes).step_by(LINE) {
                    simd.prefetch(later.wrapping_add(at).wrapping_byte_add(byte));
                }
            }
        } else {
            // Every line once: each block asks for its share.
            let lines = (N * bytes).div_ceil(LINE);
            self.fetch_lines(simd, lines.div_ceil(1 << self.blocks));
        }
    }

    /// Asks for the next lines.
    #[inline(always)]
    fn fetch_lines<S: Simd>(&mut self, simd: S, lines: usize) {
        for _ in 0..lines {
            if self.row >= self.distance + TILE {
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
