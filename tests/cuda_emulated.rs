//! The CUDA kernels on the CPU emulator, driven by the launch code, against the f64 reference
//! and the CPU ops. `scripts/kernels_check.sh` builds the emulator and runs these tests; without
//! it (`CANDLE_PAGED_ATTN_EMULATOR` is not set) they say so and pass.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

#[path = "cuda_emulated/call.rs"]
mod call;
#[path = "cuda_emulated/edges.rs"]
mod edges;
#[path = "cuda_emulated/job.rs"]
mod job;
#[path = "cuda_emulated/matrix.rs"]
mod matrix;
#[path = "cuda_emulated/moves.rs"]
mod moves;
#[path = "cuda_emulated/resident.rs"]
mod resident;
#[path = "cuda_emulated/small.rs"]
mod small;
