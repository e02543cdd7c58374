//! The engine on a toy model that reads its K/V back from the cache, so that any row of
//! another request, lost or stale, changes the answer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

#[path = "engine/beams.rs"]
mod beams;
#[path = "engine/cases.rs"]
mod cases;
#[path = "engine/groups.rs"]
mod groups;
#[path = "engine/handle.rs"]
mod handle;
#[path = "engine/hash_lm.rs"]
mod hash_lm;
#[path = "common/random_llama.rs"]
mod random_llama;
#[path = "engine/refusals.rs"]
mod refusals;
#[path = "engine/sampling.rs"]
mod sampling;
#[path = "engine/survival.rs"]
mod survival;
#[path = "engine/text.rs"]
mod text;
#[path = "engine/workloads.rs"]
mod workloads;
