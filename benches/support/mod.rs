//! What the benches share: contenders that take turns, rounds without company, rows of a table,
//! and batches in a paged cache. Included with `#[path]`.
#![allow(dead_code)] // Each user takes only a part.

pub mod batch;
pub mod options;
pub mod quiet;
pub mod report;
pub mod rows;
pub mod turns;
