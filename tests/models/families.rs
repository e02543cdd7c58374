//! Every family against transformers' logits.

use candle_core::DType;
use candle_paged_attn::cache::{Feed, Logits};
use candle_paged_attn::models::{CausalLm, Decoder, ModelSpec};

use crate::checkpoint::{distance, tokens};
use crate::golden::{Golden, NAMES, folder};
use crate::run::{cache, in_chunks, sequence, step};

/// Relative, as the issue of every family has it: f32 on both sides.
const CLOSE: f64 = 1e-4;

/// The spec of a case. LongRoPE's short divisors serve a model that ends where they do.
fn spec_of(name: &str, golden: &Golden) -> ModelSpec {
    match name {
        "phi3_longrope_short" => golden.spec().with_context_length(32),
        _ => golden.spec(),
    }
}

#[test]
fn every_stored_case_is_tested() {
    let mut stored: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "json"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_string())
        .filter(|name| name != "rope")
        .collect();
    stored.sort();
    assert_eq!(stored, NAMES);
}

#[test]
fn prompts_whole_and_in_chunks_give_the_logits_of_transformers() {
    let mut failed = Vec::new();
    for name in NAMES {
        let golden = Golden::read(name);
        let model = golden.load(spec_of(name, &golden), DType::F32);
        // Whole, in chunks, token by token.
        for chunk in [golden.prompt.len(), 7, 1] {
            let got = golden.pick(&in_chunks(&model, &golden.prompt, chunk));
            let far = distance(&got, &golden.logits);
            println!("{name}, chunks of {chunk}: {far:.1e}");
            if far > CLOSE {
                failed.push(format!("{name}, chunks of {chunk}: {far:.1e}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Runs the prompt beside two others: one that decodes, one that is fed in odd chunks.
fn among_others(model: &Decoder, prompt: &[u32]) -> Vec<Vec<f32>> {
    let cache = cache(model, DType::F32);
    let vocab = model.vocab_size();
    let others = [tokens(1, 20, vocab), tokens(2, 20, vocab)];
    let ids = [&others[0], &others[1]].map(|other| sequence(&cache, other));
    let ours = sequence(&cache, prompt);
    step(model, &cache, &[(ids[0], &others[0][..9])]);
    let (first, rest) = prompt.split_at(prompt.len() - 11);
    let mut logits = Vec::new();
    let mut run = |at: usize, chunk: &[u32]| {
        let feeds = [
            (ids[0], &others[0][9 + at..10 + at]),
            (ours, chunk),
            (ids[1], &others[1][3 * at..3 * at + 3]),
        ];
        let rows = step(model, &cache, &feeds);
        logits.extend_from_slice(&rows[1..1 + chunk.len()]);
    };
    run(0, first);
    for (at, chunk) in rest.chunks(4).enumerate() {
        run(at + 1, chunk);
    }
    logits
}

#[test]
fn batch_mates_do_not_matter() {
    for name in NAMES {
        let golden = Golden::read(name);
        let model = golden.load(spec_of(name, &golden), DType::F32);
        let got = golden.pick(&among_others(&model, &golden.prompt));
        let far = distance(&got, &golden.logits);
        assert!(far <= CLOSE, "{name}: {far:.1e}");
    }
}

/// Turning both q and k further by one angle changes nothing, so that a sequence at positions
/// from 16,384 has the logits of one from 0: the angles are exact there, for every kind of rope.
#[test]
fn logits_at_positions_past_16000_are_those_at_0() {
    for name in NAMES {
        // Which divisors serve depends on the context length.
        if *name == "phi3_longrope_short" {
            continue;
        }
        let golden = Golden::read(name);
        let mut spec = golden.spec();
        spec.context_length = 32_768;
        let model = golden.load(spec, DType::F32);
        let cache = cache(&model, DType::F32);
        let id = sequence(&cache, &golden.prompt);
        let positions: Vec<u32> = (16_384..).take(golden.prompt.len()).collect();
        let feed = Feed::new(id, &golden.prompt)
            .with_positions(&positions)
            .with_logits(Logits::All);
        let plan = cache.plan(&[feed]).unwrap();
        let logits = model.forward(plan.tokens(), &plan).unwrap();
        plan.commit().unwrap();
        let got = golden.pick(&logits.to_vec2().unwrap());
        let far = distance(&got, &golden.logits);
        assert!(far <= CLOSE, "{name}: {far:.1e}");
    }
}

/// 16-bit weights and activations: as far from f32 as 8 or 11 bits of mantissa allow. Not of
/// experts, where a rounding can send a row to another one.
#[test]
fn sixteen_bit_models_are_near_f32() {
    for (dtype, near) in [(DType::BF16, 0.15), (DType::F16, 0.02)] {
        for name in ["llama_bf16", "gemma3", "qwen3", "phi"] {
            let golden = Golden::read(name);
            let model = golden.load(golden.spec(), dtype);
            let got = golden.pick(&in_chunks(&model, &golden.prompt, 40));
            let far = distance(&got, &golden.logits);
            println!("{name} {dtype:?}: {far:.1e}");
            assert!(far <= near, "{name} {dtype:?}: {far:.1e}");
        }
    }
}
