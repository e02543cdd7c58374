//! A page table's arrays on the GPU, kept by the table itself: copied once per step, however
//! many layers use them, and refilled in place in the next step.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use crate::error::Result;
use crate::ops::PageTable;
use crate::ops::resident::{Filled, Memory, Resident};

/// Memory that is allocated, filled and freed in the order of one stream.
#[derive(Debug)]
pub(super) struct StreamMemory(Arc<CudaStream>);

#[derive(Debug)]
pub(super) struct Buffer {
    slice: CudaSlice<u8>,
    address: u64,
}

impl Memory for StreamMemory {
    type Buffer = Buffer;

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        // SAFETY: the bytes are filled by `write`, or are workspace that a kernel writes before
        // another reads it.
        let slice = unsafe { self.0.alloc::<u8>(bytes.max(1)) }.w()?;
        // The buffer never leaves this stream, so no other stream has to know of its use.
        let (address, _) = slice.device_ptr(&self.0);
        Ok(Buffer { slice, address })
    }

    fn write(&self, buffer: &mut Buffer, bytes: &[u8]) -> Result<()> {
        self.0.memcpy_htod(bytes, &mut buffer.slice).w()?;
        Ok(())
    }

    fn address(&self, buffer: &Buffer) -> u64 {
        buffer.address
    }
}

/// What a table has on the device it was last used with.
#[derive(Debug)]
struct Copy {
    memory: StreamMemory,
    resident: Resident<StreamMemory>,
    /// `None` once the table has changed.
    filled: Option<Filled>,
}

/// The place of the copy in a [`PageTable`].
#[derive(Debug, Default)]
pub(in crate::ops) struct OnDevice(Mutex<Option<Copy>>);

/// A copy of a table is another table.
impl Clone for OnDevice {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl OnDevice {
    /// Says that the table has changed.
    pub(in crate::ops) fn outdate(&mut self) {
        let copy = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copy {
            copy.filled = None;
        }
    }

    /// Calls `f` with the arrays of `table`, which holds `self`, as they are in device memory.
    /// What `f` is given may be used by launches on `stream` that `f` queues, not by later
    /// ones.
    pub(super) fn with<T>(
        &self,
        stream: &Arc<CudaStream>,
        table: &PageTable,
        f: impl FnOnce(&Filled, &mut Resident<StreamMemory>, &StreamMemory) -> Result<T>,
    ) -> Result<T> {
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Buffers of another stream are freed in that stream's order.
        let copy = match place.take().filter(|copy| copy.memory.0 == *stream) {
            Some(copy) => place.insert(copy),
            None => place.insert(Copy {
                memory: StreamMemory(stream.clone()),
                resident: Resident::default(),
                filled: None,
            }),
        };
        let filled = match copy.filled {
            Some(filled) => filled,
            None => *copy.filled.insert(copy.resident.fill(&copy.memory, table)?),
        };
        f(&filled, &mut copy.resident, &copy.memory)
    }
}
