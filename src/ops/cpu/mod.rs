//! The kernels for a CPU. The only folder of the ops with `unsafe`: what crosses into it was
//! checked at the public door, and each file says which of those checks it relies on.
//!
//! [`attention`] plans tasks and merges their results; `decode` and `prefill` compute one task
//! each; `simd` compiles both for the instruction sets of the machine.
#![allow(unsafe_code)]

mod attention;
mod cache;
mod decode;
mod disjoint;
mod element;
mod lanes;
mod plan;
mod prefill;
mod products;
mod rows;
mod scores;
mod simd;

pub(super) use attention::attention;
pub(super) use rows::{copy_blocks, gather, write_rows};
