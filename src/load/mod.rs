//! Checkpoints, tokenizers and chat templates.
#![deny(clippy::indexing_slicing)]
