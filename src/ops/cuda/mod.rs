//! The kernels for NVIDIA GPUs. The only folder that speaks to the driver: what to launch is
//! decided in [`launch`](super::launch), which the emulator shares, so that a wrong grid or a
//! wrong order of arguments is found where there is no GPU.
//!
//! Everything runs on candle's own stream of the device, in order: that alone makes it safe
//! to fill the index arrays of the next step while kernels of the last one are queued, and is
//! why the per-thread default stream is refused. Nothing is ever read back.
//!
//! Not yet run on a GPU.
#![allow(unsafe_code)]

mod calls;
mod device;
mod execute;
mod kernels;
mod on_device;
mod storage;

pub(super) use calls::{attention, copy_blocks, merge_states, upload, write_rows};
pub(super) use device::{check_stream, free_memory};
pub(super) use on_device::OnDevice;
