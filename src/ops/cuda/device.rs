//! What a CUDA device must be, and what it has left.

use candle_core::CudaDevice;
use candle_core::cuda_backend::WrapErr;

use crate::error::{Error, Result};

/// The handle by which the driver names the per-thread default stream.
const PER_THREAD_STREAM: usize = 2;

/// See [`check_stream`](crate::ops::check_stream).
pub(in crate::ops) fn check_stream(op: &'static str, device: &CudaDevice) -> Result<()> {
    if device.cuda_stream().cu_stream() as usize != PER_THREAD_STREAM {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        op,
        what: "device".into(),
        expected: "a CUDA device with a stream of its own (Device::new_cuda_with_stream): on \
                   the per-thread default stream two threads would use two streams"
            .into(),
        got: "the per-thread default stream (Device::new_cuda)".into(),
    })
}

/// See [`free_memory`](crate::ops::free_memory).
pub(in crate::ops) fn free_memory(device: &CudaDevice) -> Result<u64> {
    let (free, _) = device.cuda_stream().context().mem_get_info().w()?;
    Ok(free as u64)
}
