//! The spec-driven decoder: configurations, linears, and whole forward passes against an f64
//! reference and candle's own models.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "models/against_candle.rs"]
mod against_candle;
#[path = "models/bad_input.rs"]
mod bad_input;
#[path = "models/checkpoint.rs"]
mod checkpoint;
#[path = "models/config_keys.rs"]
mod config_keys;
#[path = "models/configs.rs"]
mod configs;
#[path = "models/decoding.rs"]
mod decoding;
#[path = "models/examples.rs"]
mod examples;
#[path = "models/families.rs"]
mod families;
#[path = "models/families_gguf.rs"]
mod families_gguf;
#[path = "models/gguf.rs"]
mod gguf;
#[path = "models/golden.rs"]
mod golden;
#[path = "models/groups.rs"]
mod groups;
#[path = "models/inventory.rs"]
mod inventory;
#[path = "models/linears.rs"]
mod linears;
#[path = "models/reference.rs"]
mod reference;
#[path = "models/run.rs"]
mod run;
#[path = "models/sparse.rs"]
mod sparse;
