//! The paged KV cache: tensors, sequences and step plans. It knows neither models nor text nor
//! sampling, so that any model and any loop can use it.
#![forbid(unsafe_code)]

#[allow(clippy::module_inception)]
mod cache;
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

pub use cache::{AddOptions, Added, CacheEvent, Cost, GroupUsage, PagedKvCache, Pin};
pub use plan::{Feed, LayerStep, Logits, StepPlan};
pub use pool::{CacheConfig, CacheSize, DEFAULT_BLOCK_SIZE, LayerKv};
pub use sequence::SequenceId;
pub use spec::{CacheSpec, GroupSpec, KvFormat, LayerShape};
pub use state::Counters;
pub use swap::SwapId;
