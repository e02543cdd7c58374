//! Loaders: GGUF and safetensors good and bad, chat templates, and whole models.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "load/chat.rs"]
mod chat;
#[path = "load/gguf.rs"]
mod gguf;
#[path = "load/gguf_headers.rs"]
mod gguf_headers;
#[path = "load/pretrained.rs"]
mod pretrained;
#[path = "load/real_model.rs"]
mod real_model;
#[path = "load/safetensors.rs"]
mod safetensors;
#[path = "../examples/support/mod.rs"]
mod support;
#[path = "load/tiny.rs"]
mod tiny;

use candle_paged_attn::Error;

/// Asserts that an error is about the *content* of the file at `path`.
fn assert_blames(error: &Error, path: &std::path::Path) {
    assert!(
        matches!(error, Error::Format { path: p, .. } if p == path),
        "expected a format error of {}, got: {error}",
        path.display()
    );
}
