//! The custom ops. Ops see tensors and index arrays and know nothing of sequences, models or
//! text, so that any of them can be compared with a peer's kernel call by call.
//!
//! Every public function here checks all of its arguments first (`check`), then runs the
//! kernel of the device: `cpu`, `cuda`, or [`portable`] where there is no kernel.

mod attention;
mod cascade;
mod check;
mod copy;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod gated;
mod gather;
pub mod launch;
mod linear;
mod merge;
mod norm;
mod options;
mod page_table;
pub mod portable;
pub mod resident;
pub(crate) mod rowwise;
mod write;

pub use attention::{AttnState, paged_attention, paged_attention_state};
pub use cascade::{Cascade, cascade_attention};
pub use copy::copy_blocks;
pub(crate) use device::{check_stream, free_memory};
pub(crate) use gated::{Gate, gated};
pub use gather::gather_kv;
pub(crate) use linear::PackedLinear;
pub use merge::merge_states;
pub(crate) use norm::rms_norm;
pub use options::{AttentionOptions, Mask};
pub use page_table::PageTable;
pub use write::write_kv;
