//! The index arrays of a page table in device memory, at addresses that stay from step to
//! step: a CUDA graph replays the addresses it saw.
//!
//! The bookkeeping alone, over any [`Memory`], so that it is tested where there is no GPU.

use std::sync::Arc;

use super::PageTable;
use super::launch::{Batch, Slot};
use crate::error::Result;

/// Memory that kernels read: a GPU's, or the emulator's.
pub trait Memory {
    /// An allocation.
    type Buffer;

    /// Makes a buffer of `bytes` bytes, aligned to 16, of any content.
    ///
    /// # Errors
    /// Those of the device.
    fn allocate(&self, bytes: usize) -> Result<Self::Buffer>;

    /// Overwrites the start of `buffer` after everything that was launched before, and before
    /// everything that is launched later. `bytes` may be changed when the call returns.
    ///
    /// # Errors
    /// Those of the device.
    fn write(&self, buffer: &mut Self::Buffer, bytes: &[u8]) -> Result<()>;

    /// Where a kernel finds the first byte of `buffer`.
    fn address(&self, buffer: &Self::Buffer) -> u64;
}

/// What fits into the arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Capacity {
    sequences: usize,
    pages: usize,
    rows: usize,
}

impl Capacity {
    /// The least capacity that holds `table`, each number a power of two: a growing context
    /// changes grids and addresses a few times in its life and not every few steps.
    fn of(table: &PageTable) -> Self {
        Self {
            sequences: table.num_seqs().next_power_of_two(),
            pages: table.indices().len().next_power_of_two(),
            rows: table.num_rows().next_power_of_two(),
        }
    }

    fn union(self, other: Self) -> Self {
        Self {
            sequences: self.sequences.max(other.sequences),
            pages: self.pages.max(other.pages),
            rows: self.rows.max(other.rows),
        }
    }
}

/// The arrays of a [`PageTable`] on the device. Entries past the table's own are those of
/// sequences without rows and tokens, and of rows that are padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filled {
    /// From which launches take their grids.
    pub batch: Batch,
    addresses: [(Slot, u64); 6],
}

impl Filled {
    /// The address of each array.
    pub fn addresses(&self) -> &[(Slot, u64)] {
        &self.addresses
    }
}

/// Where kernels find everything that a table has on the device, and the capacity that grids are made
/// for. Calls of the same shapes with equal placements make the same launches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    filled: Filled,
    /// The workspace and the constants.
    others: Vec<u64>,
}

/// What one table keeps on the device: its arrays in one buffer, the workspace of the kernels
/// that use them, and the constants they read.
#[derive(Debug)]
pub struct Resident<M: Memory> {
    capacity: Option<Capacity>,
    arrays: Option<M::Buffer>,
    workspace: Option<(usize, M::Buffer)>,
    constants: Vec<(Arc<[f32]>, M::Buffer)>,
    /// The arrays as bytes, kept to be filled again.
    staging: Vec<u8>,
    slots: DistinctSlots,
}

impl<M: Memory> Default for Resident<M> {
    fn default() -> Self {
        Self {
            capacity: None,
            arrays: None,
            workspace: None,
            constants: Vec::new(),
            staging: Vec::new(),
            slots: DistinctSlots::default(),
        }
    }
}

impl<M: Memory> Resident<M> {
    /// Copies the arrays of `table` to the device: one copy, and no allocation unless the
    /// table passes every capacity before.
    ///
    /// # Errors
    /// Those of the device; the arrays there are of any content then.
    pub fn fill(&mut self, memory: &M, table: &PageTable) -> Result<Filled> {
        let needed = Capacity::of(table);
        let capacity = self.capacity.map_or(needed, |c| c.union(needed));
        let offsets = self.stage(capacity, table);
        let kept = self
            .arrays
            .take()
            .filter(|_| self.capacity == Some(capacity));
        let mut arrays = match kept {
            Some(arrays) => arrays,
            None => memory.allocate(self.staging.len())?,
        };
        memory.write(&mut arrays, &self.staging)?;
        let base = memory.address(&arrays);
        self.arrays = Some(arrays);
        self.capacity = Some(capacity);
        let rows = || (0..table.num_seqs()).map(|seq| table.rows(seq).len());
        let longest = table.seq_lens().iter().copied().max().unwrap_or(0) as usize;
        Ok(Filled {
            batch: Batch {
                seqs: needed.sequences,
                rows: table.num_rows(),
                pages: needed.pages,
                min_rows: rows().filter(|&n| n > 0).min().unwrap_or(1),
                max_rows: rows().max().unwrap_or(0),
                max_len: longest.next_power_of_two(),
            },
            addresses: offsets.map(|(slot, offset)| (slot, base + offset as u64)),
        })
    }

    /// The address of at least `bytes` bytes of workspace, of any content: the same one as
    /// long as no call asks for more than all calls before.
    ///
    /// # Errors
    /// Those of the device.
    pub fn workspace(&mut self, memory: &M, bytes: usize) -> Result<u64> {
        let kept = self.workspace.take().filter(|(size, _)| *size >= bytes);
        let workspace = match kept {
            Some(workspace) => workspace,
            None => {
                let size = bytes.next_power_of_two();
                (size, memory.allocate(size)?)
            }
        };
        let address = memory.address(&workspace.1);
        self.workspace = Some(workspace);
        Ok(address)
    }

    /// The address of `values`, which are copied to the device the first time and forgotten
    /// when nobody else holds them.
    ///
    /// # Errors
    /// Those of the device.
    pub fn constant(&mut self, memory: &M, values: &Arc<[f32]>) -> Result<u64> {
        let same = |held: &&(Arc<[f32]>, M::Buffer)| Arc::ptr_eq(&held.0, values);
        if let Some((_, buffer)) = self.constants.iter().find(same) {
            return Ok(memory.address(buffer));
        }
        self.constants
            .retain(|(held, _)| Arc::strong_count(held) > 1);
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut buffer = memory.allocate(bytes.len())?;
        memory.write(&mut buffer, &bytes)?;
        let address = memory.address(&buffer);
        self.constants.push((values.clone(), buffer));
        Ok(address)
    }

    /// Where everything is now, the arrays being `filled`.
    pub fn placement(&self, memory: &M, filled: &Filled) -> Placement {
        let workspace = self.workspace.iter().map(|(_, buffer)| buffer);
        let constants = self.constants.iter().map(|(_, buffer)| buffer);
        Placement {
            filled: *filled,
            others: workspace
                .chain(constants)
                .map(|buffer| memory.address(buffer))
                .collect(),
        }
    }

    /// Constants that are kept now.
    pub fn num_constants(&self) -> usize {
        self.constants.len()
    }

    /// Writes the arrays, padded to `capacity`, into the staging memory. Returns the offset of
    /// each.
    fn stage(&mut self, capacity: Capacity, table: &PageTable) -> [(Slot, usize); 6] {
        self.staging.clear();
        let pages = table.indices().len() as u32;
        let rows = table.num_rows() as u32;
        let n = capacity.sequences;
        let slots = self.slots.of(table);
        let staging = &mut self.staging;
        let mut word = |slot, values: &[u32], len, padding| {
            (
                slot,
                append(staging, values, len, padding, u32::to_le_bytes),
            )
        };
        [
            word(Slot::Indptr, table.indptr(), n + 1, pages),
            word(Slot::Indices, table.indices(), capacity.pages, 0),
            word(Slot::FirstPage, table.first_page(), n, 0),
            word(Slot::SeqLens, table.seq_lens(), n, 0),
            word(Slot::QueryOffsets, table.query_offsets(), n + 1, rows),
            (
                Slot::Slots,
                append(staging, slots, capacity.rows, -1, i64::to_le_bytes),
            ),
        ]
    }
}

/// Appends an array of `len` elements, those after `values` being `padding`, to `bytes`;
/// returns its offset.
fn append<T: Copy, const N: usize>(
    bytes: &mut Vec<u8>,
    values: &[T],
    len: usize,
    padding: T,
    encode: fn(T) -> [u8; N],
) -> usize {
    let offset = bytes.len().next_multiple_of(16);
    bytes.resize(offset, 0);
    let padding = std::iter::repeat_n(padding, len - values.len());
    for value in values.iter().copied().chain(padding) {
        bytes.extend_from_slice(&encode(value));
    }
    offset
}

/// The slots of a table with every slot at most once: rows are written in no order, and of two
/// rows with one slot the later has to stay.
#[derive(Debug, Default)]
struct DistinctSlots {
    slots: Vec<i64>,
    order: Vec<u32>,
}

impl DistinctSlots {
    fn of(&mut self, table: &PageTable) -> &[i64] {
        let given = table.slots();
        self.slots.clear();
        self.slots.extend_from_slice(given);
        self.order.clear();
        self.order.extend(0..given.len() as u32);
        self.order
            .sort_unstable_by_key(|&row| (given[row as usize], row));
        for pair in self.order.windows(2) {
            let (row, next) = (pair[0] as usize, pair[1] as usize);
            if given[row] == given[next] {
                self.slots[row] = -1;
            }
        }
        &self.slots
    }
}
