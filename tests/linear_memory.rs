//! A model on a CPU holds its weights once: packed, and none of them as they were stored.
//!
//! A test binary of its own, because it counts every allocation of the process.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::borrow::Cow;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::Result;
use candle_paged_attn::models::{Decoder, LinearWeight, WeightSource, spec_from_hf};
use serde_json::json;

/// Counts the bytes that are in use.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came; counting changes nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A checkpoint of zeros that reads each tensor when it is asked for, as the loaders do.
struct Zeros {
    stored: Stored,
    tied: bool,
    /// Bytes of all matrices so far, and of the largest.
    bytes: Cell<usize>,
    largest: Cell<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Stored {
    Dense(DType),
    Blocks(GgmlDType),
}

impl WeightSource for Zeros {
    fn place(&self) -> String {
        "zeros".into()
    }

    fn contains(&self, name: &str) -> bool {
        let left_out = self.tied && name.contains("lm_head");
        !left_out && !name.ends_with(".bias")
    }

    fn tensor(&self, _: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Ok(Tensor::zeros(shape, dtype, &Device::Cpu)?)
    }

    fn linear(&self, _: &str, out: usize, inp: usize) -> Result<LinearWeight> {
        let elements = out * inp;
        let (weight, bytes) = match self.stored {
            Stored::Dense(dtype) => {
                let weight = Tensor::zeros((out, inp), dtype, &Device::Cpu)?;
                (
                    LinearWeight::Dense(weight),
                    elements * dtype.size_in_bytes(),
                )
            }
            Stored::Blocks(kind) => {
                let bytes = elements / kind.block_size() * kind.type_size();
                let zeros = Cow::Owned(vec![0; bytes]);
                let storage = QStorage::from_data(zeros, &Device::Cpu, kind)?;
                let weight = QTensor::new(storage, (out, inp))?;
                (LinearWeight::Quantized(Arc::new(weight)), bytes)
            }
        };
        self.bytes.set(self.bytes.get() + bytes);
        self.largest.set(self.largest.get().max(bytes));
        Ok(weight)
    }
}

/// Bytes of packed matrices. Of Q4_K and Q5_K the 16 numbers of 6 bits of a superblock take 8.
fn packed(stored: Stored, bytes: usize) -> usize {
    match stored {
        Stored::Blocks(kind @ (GgmlDType::Q4K | GgmlDType::Q5K)) => {
            bytes / kind.type_size() * (kind.type_size() + 4)
        }
        _ => bytes,
    }
}

/// One test, since tests side by side would be counted together.
#[test]
fn a_loaded_model_holds_its_weights_once() {
    for stored in [
        Stored::Dense(DType::F32),
        Stored::Dense(DType::F16),
        Stored::Dense(DType::BF16),
        Stored::Blocks(GgmlDType::Q8_0),
        Stored::Blocks(GgmlDType::Q4_0),
        Stored::Blocks(GgmlDType::Q4_1),
        Stored::Blocks(GgmlDType::Q4K),
        Stored::Blocks(GgmlDType::Q5K),
        Stored::Blocks(GgmlDType::Q6K),
    ] {
        for tied in [false, true] {
            let config = json!({
                "model_type": "llama", "hidden_act": "silu", "hidden_size": 256,
                "intermediate_size": 768, "vocab_size": 3000, "num_hidden_layers": 6,
                "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 64, "tie_word_embeddings": tied,
            });
            let spec = spec_from_hf(&config, "config.json").unwrap();
            let weights = Zeros {
                stored,
                tied,
                bytes: Cell::new(0),
                largest: Cell::new(0),
            };
            let dtype = match stored {
                Stored::Dense(dtype) => dtype,
                Stored::Blocks(_) => DType::F32,
            };
            let before = LIVE.load(Ordering::Relaxed);
            PEAK.store(before, Ordering::Relaxed);
            let model = Decoder::load(spec, &weights, dtype, &Device::Cpu).unwrap();
            let held = LIVE.load(Ordering::Relaxed) - before;
            let peak = PEAK.load(Ordering::Relaxed) - before;
            let stored_bytes = weights.bytes.get();
            let [bytes, largest] = [stored_bytes, weights.largest.get()].map(|x| packed(stored, x));
            let name = format!("{stored:?}, tied {tied}");
            // Beside the matrices: norms, rope tables and what describes the layers, and the
            // rows that fill up the last tile of the head.
            let rest = 100_000;
            assert!(held >= stored_bytes, "{name}: the counter counts");
            assert!(held <= bytes + rest, "{name}: {held} for {bytes}");
            // While it is packed a matrix is there twice.
            assert!(
                peak <= bytes + largest + rest,
                "{name}: {peak} for {bytes} and {largest}"
            );
            drop(model);
        }
    }
}
