//! What a machine with a GPU runs (`scripts/gpu-check.sh`): the op tests on the device, a model
//! against its CPU run, and the benches. One binary, because candle's kernels are in each.
//! Without `CANDLE_PAGED_ATTN_TEST_DEVICE=cuda` the op tests run on the CPU; the rest is ignored
//! unless asked for, and fails then. Not yet run on a GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

#[path = "cuda_device/bench.rs"]
mod bench;
#[path = "ops/cascade.rs"]
mod cascade;
#[path = "models/checkpoint.rs"]
#[allow(dead_code)]
mod checkpoint;
#[path = "ops/golden.rs"]
mod golden;
#[path = "cuda_device/greedy.rs"]
mod greedy;
#[path = "ops/masks.rs"]
mod masks;
#[path = "ops/matrix.rs"]
mod matrix;
#[path = "ops/refusals.rs"]
mod refusals;
#[path = "ops/same_bits.rs"]
mod same_bits;
#[path = "ops/states.rs"]
mod states;
#[path = "ops/tables.rs"]
mod tables;
#[path = "ops/writes.rs"]
mod writes;

/// The GPU.
fn gpu() -> &'static candle_core::Device {
    let device = common::device();
    assert!(device.is_cuda(), "needs CANDLE_PAGED_ATTN_TEST_DEVICE=cuda");
    device
}
