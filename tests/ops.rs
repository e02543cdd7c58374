//! The ops against the dense f64 reference, and the field cases that concern them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

#[path = "ops/cascade.rs"]
mod cascade;
#[path = "ops/golden.rs"]
mod golden;
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
