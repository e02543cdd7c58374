//! Addresses in a paged cache: one place computes them.

use candle_core::Layout;

use crate::error::Result;

/// Where the rows of a cache tensor `[num_blocks, block_size, kv_heads, dim]` lie in its
/// storage. All arithmetic is in `usize`: a tensor of more elements than it can count cannot
/// exist.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    start: usize,
    block_stride: usize,
    block_size: usize,
    /// Elements of a token: `kv_heads * dim`.
    row: usize,
}

impl Rows {
    pub(super) fn of(layout: &Layout) -> Result<Self> {
        let (_, block_size, kv_heads, dim) = layout.shape().dims4()?;
        Ok(Self {
            start: layout.start_offset(),
            block_stride: layout.stride()[0],
            block_size,
            row: kv_heads * dim,
        })
    }

    /// Elements of a token.
    pub(super) fn row_len(self) -> usize {
        self.row
    }

    /// Elements of a block.
    pub(super) fn block_len(self) -> usize {
        self.block_size * self.row
    }

    /// First element of the row of a block.
    #[inline(always)]
    pub(super) fn offset(self, block: usize, row: usize) -> usize {
        self.start + block * self.block_stride + row * self.row
    }

    /// First element of the row that a slot names.
    pub(super) fn slot_offset(self, slot: usize) -> usize {
        self.offset(slot / self.block_size, slot % self.block_size)
    }
}

/// The K or V rows of one sequence in token order.
#[derive(Clone, Copy)]
pub(super) struct Context<'a, T> {
    data: &'a [T],
    rows: Rows,
    pages: &'a [u32],
    first_page: usize,
    /// log2 of the block size, and the mask of the row within a block.
    shift: u32,
    mask: usize,
}

impl<'a, T> Context<'a, T> {
    pub(super) fn new(data: &'a [T], rows: Rows, pages: &'a [u32], first_page: usize) -> Self {
        Self {
            data,
            rows,
            pages,
            first_page,
            shift: rows.block_size.trailing_zeros(),
            mask: rows.block_size - 1,
        }
    }

    /// The row of a token, all heads. The token lies in a listed page.
    #[inline(always)]
    pub(super) fn row(&self, token: usize) -> &'a [T] {
        let at = self.offset(token);
        &self.data[at..at + self.rows.row]
    }

    /// Points at the rows of the tokens from `first` on, all before `end`, which lie in listed
    /// pages. Behind the last of them its row stands in.
    #[inline(always)]
    pub(super) fn point(&self, first: usize, end: usize, rows: &mut [*const T]) {
        let row = self.rows.row;
        let len = rows.len().min(end - first);
        let (there, behind) = rows.split_at_mut(len);
        let mut token = first;
        let mut last = std::ptr::null();
        // A block's rows are contiguous: one look into the table for all of them.
        while token < first + len {
            let n = (self.mask + 1 - (token & self.mask)).min(first + len - token);
            let at = self.offset(token);
            let mut start = self.data[at..at + n * row].as_ptr();
            for place in &mut there[token - first..][..n] {
                (*place, last) = (start, start);
                start = start.wrapping_add(row);
            }
            token += n;
        }
        behind.fill(last);
    }

    /// First element of a token's row.
    #[inline(always)]
    fn offset(&self, token: usize) -> usize {
        let block = self.pages[(token >> self.shift) - self.first_page] as usize;
        self.rows.offset(block, token & self.mask)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Shape;

    use super::*;

    #[test]
    fn a24_offsets_do_not_wrap_at_32_bits() -> Result<()> {
        let rows = |block_stride| {
            let shape = Shape::from((200_000, 16, 8, 128));
            let strides = vec![block_stride, 8 * 128, 128, 1];
            Rows::of(&Layout::new(shape, strides, 0))
        };
        assert_eq!(rows(16_384)?.offset(131_072, 0), 2_147_483_648);
        assert_eq!(rows(1_039_680)?.offset(2_066, 0), 2_147_978_880);
        assert_eq!(rows(16_384)?.slot_offset(131_072 * 16 + 3), 2_147_486_720);
        Ok(())
    }

    #[test]
    fn rows_across_blocks_are_those_of_their_tokens() -> Result<()> {
        let data: Vec<usize> = (0..6 * 4 * 3).collect();
        let rows = Rows::of(&Layout::contiguous((6, 4, 3, 1)))?;
        let pages = [5, 0, 3];
        // The first page is the second of the sequence: its token 0 is number 4.
        let context = Context::new(&data, rows, &pages, 1);
        let mut pointers = [std::ptr::null(); 8];
        context.point(6, 12, &mut pointers);
        let want = [22, 23, 0, 1, 2, 3, 3, 3].map(|row: usize| &raw const data[row * 3]);
        assert_eq!(pointers, want);
        Ok(())
    }
}
