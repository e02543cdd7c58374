//! Continuous batching: many requests, arriving at any time, share one model and one pool.
//!
//! Only this folder decides what runs when, and it decides on integers: the tensors of a step
//! belong to the model and the cache, and the one thing that comes back is a copy of the
//! logits. So a scheduling mistake can cost time, but cannot mix two requests up.
//!
//! The path of a request: [`Request`] is checked and queued (`request.rs`, `engine.rs`), each
//! step (`step.rs`) the scheduler picks tokens of some sequences (`scheduler.rs`,
//! `admission.rs`, `preemption.rs`), the model runs them, each finished row of logits becomes a token
//! (`choose.rs`, with `sampler.rs` or `beam.rs`), a branch appends it and looks for a stop
//! (`branch.rs`), and an [`Output`] leaves (`active.rs`).
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use candle_core::{DType, Device};
//! # use candle_paged_attn::cache::{CacheConfig, PagedKvCache};
//! # use candle_paged_attn::engine::{Engine, EngineConfig, Request};
//! # use candle_paged_attn::models::CausalLm;
//! # fn run(model: Arc<dyn CausalLm>) -> candle_paged_attn::Result<()> {
//! let config = CacheConfig::bytes(512 << 20);
//! let cache = PagedKvCache::new(&model.cache_spec(DType::F32)?, &config, &Device::Cpu)?;
//! let mut engine = Engine::new(model, cache, EngineConfig::default())?;
//! engine.add_request(Request::new(vec![1, 2, 3]).with_max_tokens(8))?;
//! while engine.has_work() {
//!     for output in engine.step()? {
//!         println!("{} {:?}", output.request, output.tokens);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod active;
mod admission;
mod beam;
mod branch;
mod choose;
mod config;
#[allow(clippy::module_inception)]
mod engine;
mod generate;
mod handle;
mod hook;
mod metrics;
mod output;
mod preemption;
mod random;
mod request;
mod sampler;
mod sampling;
mod scheduler;
mod sequence;
mod step;
mod stop;
mod stream;

pub use beam::EarlyStopping;
pub use config::{EngineConfig, Preemption};
pub use engine::Engine;
pub use generate::{Answer, Progress, Sample};
pub use handle::EngineHandle;
pub use hook::{HookContext, LogitsHook};
pub use metrics::Stats;
pub use output::{FinishReason, Output, Report, TokenLogprob, TokenLogprobs};
pub use request::{BeamSearch, Request, RequestId};
pub use sampling::Sampling;
pub use stream::{BlockingOutputs, OutputStream};
