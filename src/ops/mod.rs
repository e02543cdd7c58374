//! The custom ops. Ops see tensors and index arrays and know nothing of sequences, models or
//! text, so that any of them can be compared with a peer's kernel call by call.

mod page_table;

pub use page_table::PageTable;
