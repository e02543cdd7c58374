//! The CUDA kernels of `candle-paged-attn` on a CPU, driven by the launch code of the main crate.
//!
//! The kernels' sources are compiled by the host's C++ compiler (`cpp/`): a thread of a block is a
//! fiber, and which one goes on, and when `cp.async` copies, is a setting ([`Schedule`]). They run
//! in a process of their own, since a fault ends it; a [`Job`] is what this crate sends there.
//!
//! For tests alone: everything here panics on errors.

mod emulator;
mod job;

pub use emulator::Emulator;
pub use job::{Expect, Job, Schedule, decode, encode, encode_f32, encode_i64, encode_u32};
