//! The block allocator, its prefix index and block tables.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "block/model.rs"]
mod model;
#[path = "block/replay.rs"]
mod replay;
