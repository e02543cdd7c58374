//! The index arrays that every op takes.

use candle_core::Device;

use super::resident::Placement;
use crate::error::{Error, Result};

/// Which pages hold the context of each sequence of a batch, which rows of the batch are its
/// queries, and where the new K/V rows go.
///
/// Compressed sparse rows, as in FlashInfer's paged KV layout: the pages of sequence `s` are
/// `indices[indptr[s]..indptr[s + 1]]`, the first of them is logical page `first_page[s]`
/// (pages that a sliding window has left behind are not listed), and they end at
/// `ceil(seq_lens[s] / block_size)`, never later. Its query rows are
/// `query_offsets[s]..query_offsets[s + 1]`; they are the *last* tokens of the context, so row
/// `i` of `n` stands at position `seq_lens[s] - n + i` (bottom-right causal). `slots[row]` is
/// the cache row (`block * block_size + offset`) of each new K/V row, −1 for padding.
///
/// A table is valid by construction: [`PageTable::push`] checks every rule it can without
/// the cache tensors; the ops check page ids and slots against the cache they are given.
#[derive(Debug, Clone)]
pub struct PageTable {
    block_size: usize,
    indptr: Vec<u32>,
    indices: Vec<u32>,
    first_page: Vec<u32>,
    seq_lens: Vec<u32>,
    query_offsets: Vec<u32>,
    slots: Vec<i64>,
    max_page: Option<u32>,
    max_slot: i64,
    #[cfg(feature = "cuda")]
    on_device: super::cuda::OnDevice,
}

const OP: &str = "page_table";

impl Default for PageTable {
    /// An empty table for pages of 16 tokens.
    fn default() -> Self {
        Self::empty(16)
    }
}

impl PageTable {
    fn empty(block_size: usize) -> Self {
        Self {
            block_size,
            indptr: vec![0],
            indices: Vec::new(),
            first_page: Vec::new(),
            seq_lens: Vec::new(),
            query_offsets: vec![0],
            slots: Vec::new(),
            max_page: None,
            max_slot: -1,
            #[cfg(feature = "cuda")]
            on_device: Default::default(),
        }
    }

    /// An empty table for pages of `block_size` tokens.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless `block_size` is a power of two from 1 to 256.
    pub fn new(block_size: usize) -> Result<Self> {
        crate::block::check_block_size(OP, block_size)?;
        Ok(Self::empty(block_size))
    }

    /// Builds a table from whole arrays, the form in which other engines keep them.
    ///
    /// `indptr` and `query_offsets` have one entry more than there are sequences;
    /// `first_page` may be empty, which means 0 for every sequence.
    ///
    /// # Errors
    /// [`Error::PageTable`] names the first rule that is broken.
    pub fn from_parts(
        block_size: usize,
        indptr: &[u32],
        indices: &[u32],
        first_page: &[u32],
        seq_lens: &[u32],
        query_offsets: &[u32],
        slots: &[i64],
    ) -> Result<Self> {
        let n = seq_lens.len();
        let rule = |rule: &'static str, got: String| Error::PageTable { op: OP, rule, got };
        for (name, array, total) in [
            (
                "indptr starts at 0, never decreases and ends at the number of pages",
                indptr,
                indices.len(),
            ),
            (
                "query_offsets starts at 0, never decreases and ends at the number of slots",
                query_offsets,
                slots.len(),
            ),
        ] {
            let sound = array.len() == n + 1
                && array.first() == Some(&0)
                && array.windows(2).all(|w| w[0] <= w[1])
                && array.last().is_some_and(|&last| last as usize == total);
            if !sound {
                return Err(rule(
                    name,
                    format!("{array:?} for {n} sequences and {total} entries"),
                ));
            }
        }
        if !first_page.is_empty() && first_page.len() != n {
            return Err(rule(
                "first_page is empty or has one entry per sequence",
                format!("{} entries for {n} sequences", first_page.len()),
            ));
        }
        let mut table = Self::new(block_size)?;
        for s in 0..n {
            table.push(
                &indices[indptr[s] as usize..indptr[s + 1] as usize],
                first_page.get(s).copied().unwrap_or(0),
                seq_lens[s] as usize,
                &slots[query_offsets[s] as usize..query_offsets[s + 1] as usize],
            )?;
        }
        Ok(table)
    }

    /// Appends a sequence: its listed pages, the logical index of the first of them, its
    /// context length *including* the new tokens, and the slot of each new row (−1: padding).
    ///
    /// # Errors
    /// [`Error::PageTable`] if the pages do not end at `ceil(seq_len / block_size)`, a slot is
    /// below −1, or a count passes the range of u32; the table is unchanged then.
    pub fn push(
        &mut self,
        pages: &[u32],
        first_page: u32,
        seq_len: usize,
        slots: &[i64],
    ) -> Result<()> {
        let rule = |rule: &'static str, got: String| Error::PageTable { op: OP, rule, got };
        let end = seq_len.div_ceil(self.block_size);
        if first_page as usize + pages.len() != end && !(seq_len == 0 && pages.is_empty()) {
            return Err(rule(
                "the pages of a sequence end at ceil(seq_len / block_size)",
                format!(
                    "{} pages from page {first_page} for {seq_len} tokens in blocks of {}",
                    pages.len(),
                    self.block_size
                ),
            ));
        }
        if let Some(slot) = slots.iter().find(|&&slot| slot < -1) {
            return Err(rule(
                "a slot is -1 (padding) or a cache row",
                slot.to_string(),
            ));
        }
        let narrow =
            |what: &'static str, n: usize| u32::try_from(n).map_err(|_| rule(what, n.to_string()));
        let seq_len = narrow("a sequence has less than 2^32 tokens", seq_len)?;
        let pages_end = narrow(
            "a table lists less than 2^32 pages",
            self.indices.len() + pages.len(),
        )?;
        let rows_end = narrow(
            "a batch has less than 2^32 rows",
            self.slots.len() + slots.len(),
        )?;
        self.indices.extend_from_slice(pages);
        self.slots.extend_from_slice(slots);
        self.indptr.push(pages_end);
        self.query_offsets.push(rows_end);
        self.first_page.push(first_page);
        self.seq_lens.push(seq_len);
        self.max_page = self.max_page.max(pages.iter().copied().max());
        self.max_slot = slots.iter().copied().fold(self.max_slot, i64::max);
        #[cfg(feature = "cuda")]
        self.on_device.outdate();
        Ok(())
    }

    /// Removes every sequence and keeps the memory of the arrays.
    pub fn clear(&mut self) {
        for array in [&mut self.indptr, &mut self.query_offsets] {
            array.clear();
            array.push(0);
        }
        for array in [&mut self.indices, &mut self.first_page, &mut self.seq_lens] {
            array.clear();
        }
        self.slots.clear();
        self.max_page = None;
        self.max_slot = -1;
        #[cfg(feature = "cuda")]
        self.on_device.outdate();
    }

    /// As [`clear`](Self::clear), for pages of a block size that another table has.
    pub(super) fn restart(&mut self, block_size: usize) {
        self.clear();
        self.block_size = block_size;
    }

    /// Makes room for `pages` listed pages and `rows` query rows, so that filling the table
    /// up to there allocates nothing.
    pub(crate) fn reserve(&mut self, sequences: usize, pages: usize, rows: usize) {
        self.indices.reserve(pages);
        self.slots.reserve(rows);
        for array in [
            &mut self.indptr,
            &mut self.query_offsets,
            &mut self.first_page,
            &mut self.seq_lens,
        ] {
            array.reserve(sequences + 1);
        }
    }

    /// Tokens per page.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of sequences.
    pub fn num_seqs(&self) -> usize {
        self.seq_lens.len()
    }

    /// Number of query rows, which is also the number of new K/V rows.
    pub fn num_rows(&self) -> usize {
        self.slots.len()
    }

    /// CSR offsets into [`Self::indices`], `[num_seqs + 1]`.
    pub fn indptr(&self) -> &[u32] {
        &self.indptr
    }

    /// Physical pages of all sequences, one sequence after the other.
    pub fn indices(&self) -> &[u32] {
        &self.indices
    }

    /// Logical index of the first listed page of each sequence, `[num_seqs]`.
    pub fn first_page(&self) -> &[u32] {
        &self.first_page
    }

    /// Context length of each sequence in tokens, new tokens included, `[num_seqs]`.
    pub fn seq_lens(&self) -> &[u32] {
        &self.seq_lens
    }

    /// CSR offsets of each sequence's query rows, `[num_seqs + 1]`.
    pub fn query_offsets(&self) -> &[u32] {
        &self.query_offsets
    }

    /// Cache row of each new K/V row, −1 for padding, `[num_rows]`.
    pub fn slots(&self) -> &[i64] {
        &self.slots
    }

    /// The listed pages of sequence `seq` and the logical index of the first of them.
    /// Empty if there is no such sequence.
    pub fn pages(&self, seq: usize) -> (&[u32], usize) {
        match (
            self.indptr.get(seq),
            self.indptr.get(seq + 1),
            self.first_page.get(seq),
        ) {
            (Some(&start), Some(&end), Some(&first)) => {
                (&self.indices[start as usize..end as usize], first as usize)
            }
            _ => (&[], 0),
        }
    }

    /// The query rows of sequence `seq`, which must be one of the table's.
    pub(crate) fn rows(&self, seq: usize) -> std::ops::Range<usize> {
        self.query_offsets[seq] as usize..self.query_offsets[seq + 1] as usize
    }

    /// Copies the arrays to the memory of `device` now, if they have changed since the last op
    /// there, and not with the next op. A replay of a captured CUDA graph needs that before it:
    /// the graph repeats the launches it saw, on what the arrays hold then.
    ///
    /// Returns where the ops find them, `None` for a device whose ops read the table itself (any
    /// but a CUDA device). A graph may be replayed while this equals what it was after the
    /// capture; else buffers have moved or the batch passes the grids, and the step has to be
    /// captured anew. The options of the captured calls must live as long as the graph, which
    /// reads their slopes and sinks. Cost: one copy of the arrays.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a CUDA device on the per-thread default stream; errors of
    /// the device.
    pub fn upload(&self, device: &Device) -> Result<Option<Placement>> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = device {
            return super::cuda::upload(self, cuda).map(Some);
        }
        let _ = device;
        Ok(None)
    }

    /// Its arrays in the memory of a GPU.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(&self) -> &super::cuda::OnDevice {
        &self.on_device
    }

    /// Largest page id in the table, `None` if it lists no page. Kept while the table is
    /// built, so that an op checks a table against its cache in O(1).
    pub fn max_page(&self) -> Option<u32> {
        self.max_page
    }

    /// Largest slot in the table, −1 if every row is padding.
    pub fn max_slot(&self) -> i64 {
        self.max_slot
    }
}
