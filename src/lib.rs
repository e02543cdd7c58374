#![doc = include_str!("../README.md")]

pub mod block;
pub mod cache;
pub mod engine;
pub mod error;
pub mod load;
pub mod models;
pub mod ops;

mod attention;
mod layer_cache;

pub use attention::PagedAttention;
pub use error::{Error, Result};
pub use layer_cache::LayerCache;
