//! The paged KV cache.
mod plan;
mod spec;
pub use plan::StepPlan;
pub use spec::{CacheSpec, GroupSpec, KvFormat, LayerShape};
