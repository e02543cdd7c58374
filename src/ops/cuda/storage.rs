//! candle's storages as the launch code and the executor see them.

use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, Layout};

use crate::error::{Error, Result};
use crate::ops::launch::{CacheView, Element, RowsView};

fn unexpected_dtype() -> Error {
    Error::Invariant {
        op: "cuda",
        what: "a storage that is neither F32 nor F16 nor BF16 passed the checks".into(),
    }
}

pub(super) fn element(storage: &CudaStorage) -> Result<Element> {
    match &storage.slice {
        CudaStorageSlice::F32(_) => Ok(Element::F32),
        CudaStorageSlice::F16(_) => Ok(Element::F16),
        CudaStorageSlice::BF16(_) => Ok(Element::BF16),
        _ => Err(unexpected_dtype()),
    }
}

/// The address of a storage that will be read. Drop the guard after the launches: it tells
/// other streams when the read is done.
pub(super) fn read<'a>(
    storage: &'a CudaStorage,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    match &storage.slice {
        CudaStorageSlice::F32(slice) => Ok(slice.device_ptr(stream)),
        CudaStorageSlice::F16(slice) => Ok(slice.device_ptr(stream)),
        CudaStorageSlice::BF16(slice) => Ok(slice.device_ptr(stream)),
        _ => Err(unexpected_dtype()),
    }
}

/// The address of a storage that will be written, see [`read`].
pub(super) fn write<'a>(
    storage: &'a mut CudaStorage,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    match &mut storage.slice {
        CudaStorageSlice::F32(slice) => Ok(slice.device_ptr_mut(stream)),
        CudaStorageSlice::F16(slice) => Ok(slice.device_ptr_mut(stream)),
        CudaStorageSlice::BF16(slice) => Ok(slice.device_ptr_mut(stream)),
        _ => Err(unexpected_dtype()),
    }
}

/// A storage of `len` elements of any content, for kernels that write all of them.
pub(super) fn allocate(device: &CudaDevice, element: Element, len: usize) -> Result<CudaStorage> {
    let stream = device.cuda_stream();
    // The driver refuses an allocation of nothing.
    let len = len.max(1);
    // SAFETY: every caller launches a kernel that writes each element before anything else on
    // the stream can read it.
    let slice = unsafe {
        match element {
            Element::F32 => CudaStorageSlice::F32(stream.alloc(len).w()?),
            Element::F16 => CudaStorageSlice::F16(stream.alloc(len).w()?),
            Element::BF16 => CudaStorageSlice::BF16(stream.alloc(len).w()?),
        }
    };
    Ok(CudaStorage {
        slice,
        device: device.clone(),
    })
}

pub(super) fn cache_view(storage: &CudaStorage, layout: &Layout) -> Result<CacheView> {
    let (num_blocks, block_size, kv_heads, dim) = layout.shape().dims4()?;
    Ok(CacheView {
        element: element(storage)?,
        start: layout.start_offset(),
        block_stride: layout.stride()[0],
        num_blocks,
        block_size,
        kv_heads,
        dim,
    })
}

pub(super) fn rows_view(storage: &CudaStorage, layout: &Layout) -> Result<RowsView> {
    let (_, heads, dim) = layout.shape().dims3()?;
    let strides = layout.stride();
    Ok(RowsView {
        element: element(storage)?,
        start: layout.start_offset(),
        strides: [strides[0], strides[1], strides[2]],
        heads,
        dim,
    })
}
