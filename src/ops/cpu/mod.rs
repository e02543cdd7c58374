//! The kernels for a CPU. The only folder of the ops with `unsafe`: what crosses into it was
//! checked at the public door (`ops::check`), and nothing is checked twice.
//!
//! `plan` cuts a call into tasks, `attention` runs them and merges their results; `decode` and
//! `prefill` compute one task each; `simd` compiles both for the machine's instruction sets.
#![allow(unsafe_code)]

mod ahead;
mod attention;
mod cache;
mod decode;
mod disjoint;
mod element;
#[cfg(test)]
mod every_isa;
mod gate;
mod lanes;
pub(super) mod linear;
mod norm;
mod plan;
mod prefill;
mod products;
mod rows;
mod scores;
mod simd;
mod tile;

pub(super) use attention::attention;
pub(super) use element::Element;
pub(super) use gate::gate_row;
pub(super) use norm::rms_norm_row;
pub(super) use rows::{copy_blocks, gather, write_rows};
