//! The spec-driven decoder: configurations, linears, and whole forward passes against an f64
//! reference and candle's own models.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "models/checkpoint.rs"]
mod checkpoint;
#[path = "models/configs.rs"]
mod configs;
#[path = "models/linears.rs"]
mod linears;
