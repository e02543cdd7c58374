//! The executor: runs a plan of launches on a stream.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, LaunchConfig, PushKernelArg};

use super::kernels::Kernels;
use crate::error::{Error, Result};
use crate::ops::launch::{Arg, Launch, Plan, Slot};
use std::sync::Arc;

/// Where the buffers of a call lie.
#[derive(Debug, Default)]
pub(super) struct Bindings(Vec<(Slot, u64)>);

impl Bindings {
    pub(super) fn new(addresses: impl IntoIterator<Item = (Slot, u64)>) -> Self {
        Self(addresses.into_iter().collect())
    }

    pub(super) fn bind(&mut self, slot: Slot, address: u64) {
        self.0.push((slot, address));
    }

    fn address(&self, launch: &Launch, slot: Slot) -> Result<u64> {
        let bound = self.0.iter().find(|(bound, _)| *bound == slot);
        bound
            .map(|(_, address)| *address)
            .ok_or_else(|| Error::Invariant {
                op: "cuda",
                what: format!("{} reads {slot:?}, which is not bound", launch.kernel),
            })
    }
}

/// Queues the launches of `plan` on `stream`, one after the other.
///
/// # Safety
/// Every bound address must be that of a buffer in the stream's context that stays allocated
/// until the stream has passed the launches, with the size and element type that the function
/// of [`launch`](crate::ops::launch) which made the plan states for its slot, and the index
/// arrays must be those of a table that was checked against the caches.
pub(super) unsafe fn run(stream: &Arc<CudaStream>, plan: &Plan, bindings: &Bindings) -> Result<()> {
    if plan.launches.is_empty() {
        return Ok(());
    }
    let kernels = Kernels::of(stream.context())?;
    for launch in &plan.launches {
        let function = kernels.function(launch)?;
        let pointers = launch.args.iter().map(|arg| match *arg {
            Arg::Buffer(slot, offset) => Ok(bindings.address(launch, slot)? + offset as u64),
            _ => Ok(0),
        });
        let pointers = pointers.collect::<Result<Vec<u64>>>()?;
        let mut builder = stream.launch_builder(&function);
        for (arg, pointer) in launch.args.iter().zip(&pointers) {
            match arg {
                Arg::Buffer(..) | Arg::Null => builder.arg(pointer),
                Arg::U32(x) => builder.arg(x),
                Arg::I64(x) => builder.arg(x),
                Arg::F32(x) => builder.arg(x),
            };
        }
        let [x, y, z] = launch.grid;
        let config = LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (launch.block, 1, 1),
            shared_mem_bytes: launch.shared,
        };
        // SAFETY: number, order and size of the arguments are those of the kernel's
        // parameters (`launch` makes both, the test of the PTX parameter lists compares them);
        // the caller vouches for what the pointers point to.
        unsafe { builder.launch(config) }.w()?;
    }
    Ok(())
}
