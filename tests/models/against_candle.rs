//! Logits of `candle_transformers::models::llama` on the same weights.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use serde_json::json;

use crate::checkpoint::{Memory, Tiny, distance, tokens};
use crate::reference;
use crate::run::{cache, in_chunks, load, sequence, step};

struct Stock {
    model: Llama,
    config: Config,
    dtype: DType,
}

impl Stock {
    fn new(tiny: &Tiny, weights: &Memory, dtype: DType) -> Self {
        let config: LlamaConfig = serde_json::from_value(tiny.config()).unwrap();
        let config = config.into_config(false);
        let vars = VarBuilder::from_tensors(weights.tensors(), dtype, &Device::Cpu);
        let model = Llama::load(vars, &config).unwrap();
        Self {
            model,
            config,
            dtype,
        }
    }

    /// Logits of every row. It gives only those of the last, so each row is a prompt of its own.
    fn logits(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        (1..=tokens.len())
            .map(|end| {
                let mut cache = Cache::new(false, self.dtype, &self.config, &Device::Cpu).unwrap();
                let prompt = Tensor::new(&tokens[..end], &Device::Cpu).unwrap();
                let prompt = prompt.unsqueeze(0).unwrap();
                let logits = self.model.forward(&prompt, 0, &mut cache).unwrap();
                logits.to_vec2().unwrap().remove(0)
            })
            .collect()
    }
}

const TOLERANCE: f64 = 1e-4;

/// Every way to run `tiny` gives stock candle's logits.
fn assert_equal_to_stock(tiny: &Tiny) {
    let weights = tiny.weights(11);
    let stock = Stock::new(tiny, &weights, DType::F32);
    let model = load(tiny, &weights, DType::F32);

    let prompt = tokens(12, 37, tiny.vocab);
    let want = stock.logits(&prompt);
    for chunk in [37, 7, 16, 1] {
        let far = distance(&in_chunks(&model, &prompt, chunk), &want);
        assert!(far <= TOLERANCE, "chunks of {chunk}: {far}");
    }

    // Three sequences of different lengths, their prompts in one step, then decoded together.
    let all: Vec<Vec<u32>> = [(13, 30), (14, 9), (15, 21)]
        .map(|(seed, len)| tokens(seed, len, tiny.vocab))
        .into();
    let prompts = [25usize, 4, 16];
    let cache = cache(&model, DType::F32);
    let ids: Vec<_> = all
        .iter()
        .zip(prompts)
        .map(|(tokens, prompt)| sequence(&cache, &tokens[..prompt]))
        .collect();
    let mut got: Vec<Vec<Vec<f32>>> = vec![Vec::new(); all.len()];
    let mut run = |ranges: Vec<std::ops::Range<usize>>| {
        let feeds: Vec<_> = ids
            .iter()
            .zip(&all)
            .zip(&ranges)
            .map(|((id, tokens), range)| (*id, &tokens[range.clone()]))
            .collect();
        let mut rows = step(&model, &cache, &feeds).into_iter();
        for (got, range) in got.iter_mut().zip(&ranges) {
            got.extend(rows.by_ref().take(range.len()));
        }
    };
    run(prompts.map(|prompt| 0..prompt).into());
    for more in 0..5 {
        run(prompts
            .map(|prompt| prompt + more..prompt + more + 1)
            .into());
    }
    for (tokens, got) in all.iter().zip(&got) {
        let far = distance(got, &stock.logits(tokens));
        assert!(far <= TOLERANCE, "batched, {} tokens: {far}", tokens.len());
    }
}

#[test]
fn one_query_head_per_kv_head() {
    assert_equal_to_stock(&Tiny::new(1));
}

#[test]
fn three_query_heads_per_kv_head() {
    assert_equal_to_stock(&Tiny::new(3));
}

#[test]
fn four_query_heads_per_kv_head() {
    assert_equal_to_stock(&Tiny::new(4));
}

#[test]
fn eight_query_heads_per_kv_head() {
    assert_equal_to_stock(&Tiny::new(8));
}

#[test]
fn tied_head() {
    assert_equal_to_stock(&Tiny {
        tied: true,
        ..Tiny::new(3)
    });
}

#[test]
fn llama3_rope_scaling() {
    // Wavelengths from 6 to 32,000 tokens: some are kept, some blended, some divided.
    let scaled = json!({
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    });
    let tiny = Tiny {
        extra: scaled,
        ..Tiny::new(4)
    };
    assert_equal_to_stock(&tiny);
    // The scaling is seen at all.
    let weights = tiny.weights(11);
    let prompt = tokens(12, 37, tiny.vocab);
    let plain = load(&Tiny::new(4), &weights, DType::F32);
    let scaled = load(&tiny, &weights, DType::F32);
    let far = distance(
        &in_chunks(&scaled, &prompt, 37),
        &in_chunks(&plain, &prompt, 37),
    );
    assert!(far > 100.0 * TOLERANCE, "{far}");
}

/// Of the error that stock candle has in f16, against f64 on the same weights, ours is no more;
/// nor 8 times as much in bf16, which has 3 bits less.
#[test]
fn sixteen_bit_models_round_no_more_than_stock() {
    for tied in [false, true] {
        let tiny = Tiny {
            tied,
            ..Tiny::new(3)
        };
        let prompt = tokens(26, 24, tiny.vocab);
        let rounded = |dtype| {
            let mut rounded = Memory::default();
            for (name, tensor) in tiny.weights(25).tensors() {
                rounded.insert(name, tensor.to_dtype(dtype).unwrap());
            }
            rounded
        };
        let error = |dtype| {
            let weights = rounded(dtype);
            let model = load(&tiny, &weights, dtype);
            let cache = cache(&model, dtype);
            let id = sequence(&cache, &prompt);
            let mut got = step(&model, &cache, &[(id, &prompt[..20])]);
            for token in 20..24 {
                got.extend(step(&model, &cache, &[(id, &prompt[token..token + 1])]));
            }
            distance(&got, &reference::logits(&tiny, &weights, &prompt))
        };
        let half = rounded(DType::F16);
        let want = reference::logits(&tiny, &half, &prompt);
        let stock = distance(&Stock::new(&tiny, &half, DType::F16).logits(&prompt), &want);
        let (f16, bf16) = (error(DType::F16), error(DType::BF16));
        assert!(f16 <= stock, "tied {tied}: f16 {f16}, stock {stock}");
        assert!(
            bf16 <= 8.0 * stock,
            "tied {tied}: bf16 {bf16}, stock f16 {stock}"
        );
    }
}
