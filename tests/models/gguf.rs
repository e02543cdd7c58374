//! The GGUF side: neighbours turned, corrected frequencies, quantised weights.

use std::collections::HashMap;
use std::io::Cursor;
use std::ops::Range;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::models::{Decoder, LinearWeight, spec_from_gguf};
use candle_transformers::models::quantized_llama::ModelWeights;
use gguf_file::Value;
use serde_json::json;

use crate::checkpoint::{Memory, Tiny, distance, ggml_name, tokens};
use crate::reference::{self, Reference, frequencies};
use crate::run::{in_chunks, load};

fn metadata(tiny: &Tiny) -> Vec<(&'static str, Value)> {
    let count = |n: usize| Value::U32(n as u32);
    vec![
        ("general.architecture", Value::String("llama".into())),
        ("llama.embedding_length", count(tiny.hidden)),
        ("llama.block_count", count(tiny.layers)),
        ("llama.feed_forward_length", count(tiny.inner)),
        ("llama.attention.head_count", count(tiny.heads)),
        ("llama.attention.head_count_kv", count(tiny.kv_heads)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.dimension_count", count(tiny.head_dim)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("llama.context_length", count(tiny.context)),
        (
            "tokenizer.ggml.tokens",
            Value::Array(vec![Value::String("x".into()); tiny.vocab]),
        ),
    ]
}

/// Rows of q or k, or their biases, as the converter of llama.cpp orders them: the pair
/// `(i, i + dim / 2)` of a head becomes `(2i, 2i + 1)`.
pub fn permuted(tensor: &Tensor, heads: usize) -> Tensor {
    let rows = tensor.dim(0).unwrap();
    let half = rows / heads / 2;
    let order: Vec<u32> = (0..heads)
        .flat_map(|head| (0..half).flat_map(move |i| [i, i + half].map(|i| (head, i))))
        .map(|(head, i)| (head * 2 * half + i) as u32)
        .collect();
    let order = Tensor::new(order, &Device::Cpu).unwrap();
    tensor.index_select(&order, 0).unwrap()
}

/// The checkpoint under GGUF's names, q and k permuted.
fn as_gguf(tiny: &Tiny, weights: &Memory) -> Memory {
    let mut gguf = Memory::default();
    for (name, tensor) in weights.tensors() {
        let heads = match &name {
            name if name.contains("q_proj") => Some(tiny.heads),
            name if name.contains("k_proj") => Some(tiny.kv_heads),
            _ => None,
        };
        let tensor = heads.map_or(tensor.clone(), |heads| permuted(&tensor, heads));
        gguf.insert(ggml_name(&name), tensor);
    }
    gguf
}

fn load_gguf(metadata: Vec<(&str, Value)>, weights: &Memory) -> Decoder {
    let metadata: HashMap<String, Value> = metadata
        .into_iter()
        .map(|(field, value)| (field.to_string(), value))
        .collect();
    let spec = spec_from_gguf(&metadata, "tiny.gguf").unwrap();
    Decoder::load(spec, weights, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn permuted_weights_and_neighbours_equal_the_hf_layout() {
    for (tied, bias) in [(false, false), (true, true)] {
        let tiny = Tiny {
            tied,
            bias,
            ..Tiny::new(3)
        };
        let weights = tiny.weights(41);
        let prompt = tokens(42, 33, tiny.vocab);
        let want = in_chunks(&load(&tiny, &weights, DType::F32), &prompt, 33);
        let model = load_gguf(metadata(&tiny), &as_gguf(&tiny, &weights));
        for chunk in [33, 4] {
            let far = distance(&in_chunks(&model, &prompt, chunk), &want);
            assert!(far <= 1e-5, "tied {tied}, chunks of {chunk}: {far}");
        }
    }
}

#[test]
fn rope_freqs_divide_like_the_llama3_scaling_they_come_from() {
    let tiny = Tiny {
        extra: json!({"rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }}),
        ..Tiny::new(2)
    };
    let weights = tiny.weights(43);
    let prompt = tokens(44, 50, tiny.vocab);
    let want = in_chunks(&load(&tiny, &weights, DType::F32), &prompt, 50);
    // As llama.cpp's converter works them out.
    let divisors: Vec<f32> = frequencies(tiny.head_dim, 10_000.0)
        .into_iter()
        .map(|frequency| {
            let wavelength = 2.0 * std::f64::consts::PI / frequency;
            if wavelength < 64.0 / 4.0 {
                1.0
            } else if wavelength > 64.0 {
                8.0
            } else {
                let smooth = (64.0 / wavelength - 1.0) / 3.0;
                (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32
            }
        })
        .collect();
    let mut gguf = as_gguf(&tiny, &weights);
    gguf.insert(
        "rope_freqs.weight",
        Tensor::new(divisors, &Device::Cpu).unwrap(),
    );
    let model = load_gguf(metadata(&tiny), &gguf);
    let far = distance(&in_chunks(&model, &prompt, 50), &want);
    assert!(far <= 1e-5, "{far}");
}

#[test]
fn a_part_of_the_head_is_turned() {
    let tiny = Tiny::new(2);
    let weights = tiny.weights(45);
    let prompt = tokens(46, 30, tiny.vocab);
    // The rows are not permuted: the reference turns neighbours as well.
    let mut gguf = as_gguf(&tiny, &weights);
    for layer in 0..tiny.layers {
        for (ggml, hf) in [("attn_q", "q_proj"), ("attn_k", "k_proj")] {
            let tensor = weights.dense(&format!("model.layers.{layer}.self_attn.{hf}.weight"));
            gguf.insert(format!("blk.{layer}.{ggml}.weight"), tensor);
        }
    }
    let mut metadata = metadata(&tiny);
    metadata.retain(|(field, _)| *field != "llama.rope.dimension_count");
    metadata.push(("llama.rope.dimension_count", Value::U32(10)));
    let model = load_gguf(metadata, &gguf);
    let tensors = weights.tensors();
    let reference = Reference {
        frequencies: frequencies(10, 10_000.0),
        halves: false,
        ..Reference::new(&tiny, &tensors)
    };
    let far = distance(&in_chunks(&model, &prompt, 30), &reference.logits(&prompt));
    assert!(far <= 1e-5, "{far}");
}

/// A model whose rows hold whole blocks of every format, and whole super-blocks or not.
fn quantizable(hidden: usize) -> Tiny {
    let heads = hidden / 32;
    Tiny {
        hidden,
        heads,
        kv_heads: heads / 2,
        head_dim: 32,
        inner: hidden,
        vocab: 80,
        ..Tiny::new(1)
    }
}

/// Candle's `quantized_llama` and our decoder.
struct Both {
    candle: ModelWeights,
    ours: Decoder,
}

impl Both {
    /// The logits of the last row.
    fn last(&mut self, prompt: &[u32]) -> [Vec<f32>; 2] {
        let batch = Tensor::new(prompt, &Device::Cpu).unwrap().unsqueeze(0);
        let candle = self.candle.forward(&batch.unwrap(), 0).unwrap();
        let ours = in_chunks(&self.ours, prompt, prompt.len());
        [candle.to_vec2().unwrap(), ours].map(|mut logits| logits.pop().unwrap())
    }

    /// The middle one of the distances of some prompts.
    fn median_distance(&mut self, seeds: Range<u64>, len: usize, vocab: usize) -> f64 {
        let mut far: Vec<f64> = seeds
            .map(|seed| {
                let [candle, ours] = self.last(&tokens(seed, len, vocab));
                distance(&[ours], &[candle])
            })
            .collect();
        far.sort_by(f64::total_cmp);
        far[far.len() / 2]
    }
}

/// Both models from one file.
fn from_one_file(tiny: &Tiny, weights: &Memory) -> Both {
    let mut tensors: Vec<(String, Arc<QTensor>)> = Vec::new();
    for (name, weight) in &weights.0 {
        let tensor = match weight {
            LinearWeight::Quantized(tensor) => tensor.clone(),
            _ => Arc::new(QTensor::quantize(&weights.dense(name), GgmlDType::F32).unwrap()),
        };
        tensors.push((name.clone(), tensor));
    }
    let metadata = metadata(tiny);
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (*k, v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, t)| (&**k, &**t)).collect();
    let mut file = Cursor::new(Vec::new());
    gguf_file::write(&mut file, &metadata, &tensors).unwrap();

    file.set_position(0);
    let content = gguf_file::Content::read(&mut file).unwrap();
    let spec = spec_from_gguf(&content.metadata, "tiny.gguf").unwrap();
    let mut read = Memory::default();
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut file, name, &Device::Cpu).unwrap();
        read.0
            .insert(name.clone(), LinearWeight::Quantized(Arc::new(tensor)));
    }
    let ours = Decoder::load(spec, &read, DType::F32, &Device::Cpu).unwrap();
    let candle = ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
    Both { candle, ours }
}

/// Sums have another order than candle's. Where that moves an activation across a rounding edge,
/// logits differ by a part of what rounding adds to the exact ones: by less than two independent
/// roundings would. Elsewhere they are equal but for the rounding of f32 sums: for most single
/// tokens, and for some prompts of 32, whose many activations seldom all stay where they are.
#[test]
fn quantised_linears_give_the_logits_of_quantized_llama() {
    for (hidden, kind) in [
        (256, GgmlDType::Q4_0),
        (256, GgmlDType::Q4_1),
        (192, GgmlDType::Q4_1),
        (320, GgmlDType::Q8_0),
        (192, GgmlDType::Q8_0),
        (256, GgmlDType::Q4K),
        (256, GgmlDType::Q6K),
    ] {
        for tied in [false, true] {
            let tiny = Tiny {
                tied,
                ..quantizable(hidden)
            };
            let mut weights = tiny.weights(47);
            let mut gguf = as_gguf(&tiny, &weights);
            for part in ["attn_", "ffn_", "output.weight"] {
                gguf.quantize(part, kind);
            }
            for part in ["_proj", "lm_head"] {
                weights.quantize(part, kind);
            }
            // Q8_0 with 256 columns has a test of its own.
            let embedding = match hidden {
                256 => GgmlDType::Q4_0,
                _ => GgmlDType::Q8_0,
            };
            gguf.quantize("token_embd", embedding);
            weights.quantize("embed_tokens", embedding);
            let mut both = from_one_file(&tiny, &gguf);
            for (len, least_equal) in [(1, 5), (32, 1)] {
                let mut equal = 0;
                for seed in 48..57 {
                    let prompt = tokens(seed, len, tiny.vocab);
                    let exact = reference::logits(&tiny, &weights, &prompt).split_off(len - 1);
                    let [candle, ours] = both.last(&prompt).map(|logits| [logits]);
                    let apart = distance(&ours, &candle);
                    let noise = distance(&candle, &exact).hypot(distance(&ours, &exact));
                    assert!(
                        apart <= 1e-6 || apart <= noise,
                        "{kind:?} {hidden}, tied {tied}, {len} tokens: {apart}, noise {noise}"
                    );
                    equal += usize::from(apart <= 1e-6);
                }
                assert!(
                    equal >= least_equal,
                    "{kind:?} {hidden}, tied {tied}, {len} tokens: {equal} of 9 are candle's"
                );
            }
        }
    }
}

/// On machines with products of bytes candle rounds the activations of Q8_0 in blocks of 256
/// where the columns allow, and elsewhere, as ours does, in blocks of 32. So our logits are
/// candle's, or they are nearer to those of the stored weights without any rounding.
#[test]
fn q8_0_with_256_columns_is_as_near_as_candle() {
    for tied in [false, true] {
        let tiny = Tiny {
            tied,
            ..quantizable(256)
        };
        let mut weights = tiny.weights(47);
        let mut gguf = as_gguf(&tiny, &weights);
        for part in ["attn_", "ffn_", "output.weight", "token_embd"] {
            gguf.quantize(part, GgmlDType::Q8_0);
        }
        for part in ["_proj", "lm_head", "embed_tokens"] {
            weights.quantize(part, GgmlDType::Q8_0);
        }
        let mut both = from_one_file(&tiny, &gguf);
        for len in [1, 32] {
            let mut squares = [0.0; 2];
            for seed in 48..53 {
                let prompt = tokens(seed, len, tiny.vocab);
                let exact = reference::logits(&tiny, &weights, &prompt).split_off(len - 1);
                for (sum, logits) in squares.iter_mut().zip(both.last(&prompt)) {
                    *sum += distance(&[logits], &exact).powi(2);
                }
            }
            let [candle, ours] = squares;
            let far = both.median_distance(48..53, len, tiny.vocab);
            assert!(
                far <= 1e-6 || ours < candle,
                "tied {tied}, {len}: {ours}, candle {candle}"
            );
        }
    }
}

/// What quantisers make of a file of 4 bits: v and down in a finer format, so that q and k are
/// fused and v is not, and so the head, which is the embedding where there is no other.
#[test]
fn mixed_formats_in_one_layer() {
    for tied in [false, true] {
        let tiny = Tiny {
            tied,
            ..quantizable(256)
        };
        let mut weights = as_gguf(&tiny, &tiny.weights(49));
        for part in ["attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"] {
            weights.quantize(part, GgmlDType::Q4K);
        }
        for part in ["attn_v", "ffn_down", "output.weight"] {
            weights.quantize(part, GgmlDType::Q6K);
        }
        let embedding = if tied { GgmlDType::Q6K } else { GgmlDType::Q4K };
        weights.quantize("token_embd", embedding);
        let mut both = from_one_file(&tiny, &weights);
        for len in [1, 20] {
            let far = both.median_distance(50..55, len, tiny.vocab);
            assert!(far <= 1e-6, "tied {tied}, {len} tokens: {far}");
        }
    }
}

/// Batching must not change answers: quantised rows in chunks and one by one.
#[test]
fn quantised_logits_do_not_depend_on_the_number_of_rows() {
    for kind in [GgmlDType::Q4_1, GgmlDType::Q8_0, GgmlDType::Q6K] {
        let tiny = quantizable(256);
        let mut weights = as_gguf(&tiny, &tiny.weights(51));
        for part in ["attn_", "ffn_", "output.weight", "token_embd"] {
            weights.quantize(part, kind);
        }
        let model = load_gguf(metadata(&tiny), &weights);
        for chunk in [1, 7] {
            // Attention sums in another order for chunks. Where that moves an activation
            // across a rounding edge, the step shows; it must be the exception. Prompts are
            // short: every further token is another chance to meet an edge.
            let mut far = [51, 52, 53, 54, 55, 56, 57, 58, 59].map(|seed| {
                let prompt = tokens(seed, 9, tiny.vocab);
                let whole = in_chunks(&model, &prompt, 9);
                distance(&in_chunks(&model, &prompt, chunk), &whole)
            });
            far.sort_by(f64::total_cmp);
            println!("{kind:?}, chunks of {chunk}: {far:?}");
            assert!(far[4] <= 1e-5, "{kind:?}, chunks of {chunk}: {far:?}");
        }
    }
}
