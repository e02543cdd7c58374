//! What ops and caches ask of a device.

use candle_core::Device;

use crate::error::{Error, Result};

/// Whether there are kernels for the device; where there are none, the ops are `portable`.
pub(crate) fn has_kernels(device: &Device) -> bool {
    device.is_cpu() || device.is_cuda()
}

/// Refuses a CUDA device on the per-thread default stream: work of two threads would run on
/// two streams, and a read of one could pass a write of the other.
pub(crate) fn check_stream(op: &'static str, device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        return super::cuda::check_stream(op, cuda);
    }
    let _ = (op, device);
    Ok(())
}

/// Bytes of device memory that are free now.
///
/// # Errors
/// [`Error::InvalidArgument`] for a device that cannot tell: any but a CUDA device.
pub(crate) fn free_memory(op: &'static str, device: &Device) -> Result<u64> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        return super::cuda::free_memory(cuda);
    }
    Err(Error::InvalidArgument {
        op,
        what: "size".into(),
        expected: "a number of bytes, blocks or tokens (only a CUDA device tells its free memory)"
            .into(),
        got: format!("a fraction of the free memory of {:?}", device.location()),
    })
}
