//! The paged KV cache: tensors, sequences and step plans. It knows neither models nor text nor
//! sampling, so that any model and any loop can use it.
#![forbid(unsafe_code)]

mod admission;
#[allow(clippy::module_inception)]
mod cache;
mod epoch;
mod host;
mod plan;
mod pool;
mod prefix;
mod register;
mod sequence;
mod spec;
mod state;
mod step;
mod swap;
mod transfer;
mod usage;

pub use admission::{AddOptions, Added, Cost};
pub use cache::{CacheEvent, PagedKvCache, Pin};
pub use plan::{Feed, LayerStep, Logits, StepPlan};
pub use pool::{CacheConfig, CacheSize, DEFAULT_BLOCK_SIZE, LayerKv};
pub use sequence::SequenceId;
pub use spec::{CacheSpec, GroupSpec, KvFormat, LayerShape};
pub use swap::SwapId;
pub use usage::{Counters, GroupUsage};
