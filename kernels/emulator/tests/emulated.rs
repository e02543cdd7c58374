//! The CUDA kernels on the emulator, driven by the launch code, against the f64 reference and the
//! CPU ops. `scripts/kernels_check.sh` runs these tests: plain, and under the sanitizers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/common/mod.rs"]
mod common;

#[path = "emulated/call.rs"]
mod call;
#[path = "emulated/edges.rs"]
mod edges;
#[path = "emulated/full.rs"]
mod full;
#[path = "emulated/matrix.rs"]
mod matrix;
#[path = "emulated/moves.rs"]
mod moves;
#[path = "emulated/resident.rs"]
mod resident;
#[path = "emulated/small.rs"]
mod small;
