//! SmolLM2-135M-Instruct against recorded answers: 20 prompts, 64 greedy tokens each, on which
//! candle's `llama`, llama.cpp, transformers and vLLM agree to the token (`tests/data`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../examples/support/mod.rs"]
mod support;

use std::path::Path;
use std::sync::OnceLock;

use candle_core::quantized::gguf_file;
use candle_core::{DType, Device, Tensor};
use candle_paged_attn::cache::{AddOptions, CacheConfig, Feed, Logits, PagedKvCache, SequenceId};
use candle_paged_attn::load::{LoadOptions, Pretrained, from_pretrained};
use candle_paged_attn::models::CausalLm;
use candle_transformers::models::quantized_llama;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    name: String,
    text: Option<String>,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

fn goldens() -> Vec<Golden> {
    serde_json::from_str(include_str!("data/smollm2_135m_instruct_f32.json")).unwrap()
}

/// The GGUF with its linears dequantised to f32: the weights the answers were recorded with.
fn f32_model(test: &str) -> Option<&'static Pretrained> {
    static MODEL: OnceLock<Pretrained> = OnceLock::new();
    let path = support::model_or_skip(test)?;
    let options = LoadOptions::default().with_dtype(DType::F32);
    Some(MODEL.get_or_init(|| from_pretrained(path, &options).unwrap()))
}

fn new_cache(model: &Pretrained, tokens: usize, block_size: usize) -> PagedKvCache {
    let spec = model.model.cache_spec(DType::F32).unwrap();
    let config = CacheConfig::tokens(tokens).with_block_size(block_size);
    PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap()
}

/// Feeds a prompt in chunks and answers the logits of its last row.
fn prefill(
    model: &Pretrained,
    cache: &PagedKvCache,
    id: SequenceId,
    prompt: &[u32],
    chunk: usize,
) -> Tensor {
    let mut logits = None;
    for piece in prompt.chunks(chunk) {
        let plan = cache.plan(&[Feed::new(id, piece)]).unwrap();
        logits = Some(model.model.forward(plan.tokens(), &plan).unwrap());
        plan.commit().unwrap();
    }
    logits.unwrap()
}

fn greedy(logits: &Tensor) -> Vec<u32> {
    logits.argmax(1).unwrap().to_vec1().unwrap()
}

/// One sequence at a time, as long as the recorded answer.
fn check_each(model: &Pretrained, goldens: &[Golden], block_size: usize, chunk: usize) {
    for golden in goldens {
        let cache = new_cache(
            model,
            golden.prompt_ids.len() + golden.greedy_ids.len(),
            block_size,
        );
        let id = cache
            .add(&golden.prompt_ids, AddOptions::default())
            .unwrap()
            .id;
        let mut logits = prefill(model, &cache, id, &golden.prompt_ids, chunk);
        let mut tokens = vec![];
        for _ in 0..golden.greedy_ids.len() {
            let next = greedy(&logits)[0];
            tokens.push(next);
            let plan = cache.plan(&[Feed::new(id, &[next])]).unwrap();
            logits = model.model.forward(plan.tokens(), &plan).unwrap();
            plan.commit().unwrap();
        }
        assert_eq!(tokens, golden.greedy_ids, "{}", golden.name);
    }
}

#[test]
fn golden_one_at_a_time() {
    let Some(model) = f32_model("golden_one_at_a_time") else {
        return;
    };
    check_each(model, &goldens(), 16, usize::MAX);
}

#[test]
fn golden_block_sizes_1_4_64() {
    let Some(model) = f32_model("golden_block_sizes_1_4_64") else {
        return;
    };
    for block_size in [1, 4, 64] {
        check_each(model, &goldens(), block_size, usize::MAX);
    }
}

#[test]
fn golden_chunked_prefill() {
    let Some(model) = f32_model("golden_chunked_prefill") else {
        return;
    };
    for chunk in [7, 64] {
        check_each(model, &goldens(), 16, chunk);
    }
    let short: Vec<_> = goldens()
        .into_iter()
        .filter(|g| g.prompt_ids.len() <= 64)
        .collect();
    assert_eq!(short.len(), 11);
    check_each(model, &short, 16, 1);
}

#[test]
fn golden_all_prompts_in_one_batch() {
    let Some(model) = f32_model("golden_all_prompts_in_one_batch") else {
        return;
    };
    let goldens = goldens();
    let cache = new_cache(model, 8192, 16);
    let ids: Vec<_> = goldens
        .iter()
        .map(|g| cache.add(&g.prompt_ids, AddOptions::default()).unwrap().id)
        .collect();
    let mut next: Vec<Vec<u32>> = goldens.iter().map(|g| g.prompt_ids.clone()).collect();
    let mut answers: Vec<Vec<u32>> = vec![vec![]; goldens.len()];
    for _ in 0..64 {
        let feeds: Vec<_> = ids
            .iter()
            .zip(&next)
            .map(|(&id, tokens)| Feed::new(id, tokens))
            .collect();
        let plan = cache.plan(&feeds).unwrap();
        let logits = model.model.forward(plan.tokens(), &plan).unwrap();
        plan.commit().unwrap();
        next = greedy(&logits)
            .into_iter()
            .map(|token| vec![token])
            .collect();
        for (answer, token) in answers.iter_mut().zip(&next) {
            answer.extend(token);
        }
    }
    for (golden, answer) in goldens.iter().zip(&answers) {
        assert_eq!(answer, &golden.greedy_ids, "{}", golden.name);
    }
}

#[test]
fn golden_huggingface_folder() {
    let Some(path) = support::model_or_skip("golden_huggingface_folder") else {
        return;
    };
    if path.is_dir() {
        // The model at hand is such a folder already, and every other test reads it.
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("smollm2-hf");
    support::write_hf_folder(&path, &folder).unwrap();
    let model = from_pretrained(&folder, &LoadOptions::default()).unwrap();
    check_each(&model, &goldens(), 16, usize::MAX);
    for golden in goldens() {
        if let Some(text) = golden.text {
            let ids = model
                .tokenizer
                .encode(text, false)
                .unwrap()
                .get_ids()
                .to_vec();
            assert_eq!(ids, golden.prompt_ids, "{}", golden.name);
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn golden_texts_give_the_recorded_ids() {
    let Some(model) = f32_model("golden_texts_give_the_recorded_ids") else {
        return;
    };
    let mut texts = 0;
    for golden in goldens() {
        if let Some(text) = golden.text {
            let ids = model
                .tokenizer
                .encode(text, false)
                .unwrap()
                .get_ids()
                .to_vec();
            assert_eq!(ids, golden.prompt_ids, "{}", golden.name);
            texts += 1;
        }
    }
    assert_eq!(texts, 12);
}

/// A1, C15: a prompt with a cached prefix has the logits of the cold run, wherever the split.
#[test]
fn c15_cached_prefix_equals_the_cold_run() {
    let Some(model) = f32_model("c15_cached_prefix_equals_the_cold_run") else {
        return;
    };
    let prompt = &goldens()[4].prompt_ids;
    let rows = |logits: &Tensor| logits.to_vec2::<f32>().unwrap().remove(0);
    let cache = new_cache(model, 4 * prompt.len(), 4);
    let cold_id = cache.add(prompt, AddOptions::default()).unwrap().id;
    let cold = rows(&prefill(model, &cache, cold_id, prompt, usize::MAX));
    for k in 1..prompt.len() {
        cache.clear();
        let first = cache.add(&prompt[..k], AddOptions::default()).unwrap().id;
        prefill(model, &cache, first, &prompt[..k], usize::MAX);
        cache.remove(first).unwrap();
        let added = cache.add(prompt, AddOptions::default()).unwrap();
        assert_eq!(added.cached_tokens, k / 4 * 4);
        let warm = rows(&prefill(
            model,
            &cache,
            added.id,
            &prompt[added.cached_tokens..],
            usize::MAX,
        ));
        assert!(
            relative(&warm, &cold) < 1e-4,
            "split at {k}: {}",
            relative(&warm, &cold)
        );
    }
}

/// norm(a - b) / norm(b).
fn relative(a: &[f32], b: &[f32]) -> f64 {
    let sum = |f: &mut dyn Iterator<Item = f64>| f.map(|x| x * x).sum::<f64>().sqrt();
    let difference = sum(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    difference / sum(&mut b.iter().map(|&b| f64::from(b)))
}

/// The quantised path against candle's own `quantized_llama` on the same file.
///
/// Both round the activations of their products to 8 bits per block and add in another order, so
/// a difference in the last bit can flip a rounding, and later layers amplify it: on this prompt
/// candle differs from *itself* by some 3 % when it is fed in other chunks. Single tokens, where
/// attention is exact, are compared one by one: without a flip, as it is for a quarter of them at
/// least, the logits must be equal but for sums of f32. With one they are another draw of the same
/// rounding errors: over all tokens ours must be as near as candle's to the logits of the same
/// weights without rounding, but for chance. 32 tokens must agree as well as candle does with
/// itself.
#[test]
fn quantized_logits_equal_candles() {
    let test = "quantized_logits_equal_candles";
    let Some(path) = support::model_or_skip(test) else {
        return;
    };
    assert!(
        path.is_file(),
        "this test needs the GGUF; unset {}",
        support::MODEL_VARIABLE
    );
    let ours = from_pretrained(&path, &LoadOptions::default()).unwrap();
    let exact = f32_model(test).unwrap();
    let mut file = std::fs::File::open(&path).unwrap();
    let content = gguf_file::Content::read(&mut file).unwrap();
    let mut stock =
        quantized_llama::ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
    // Position 0 makes it forget what it has.
    let mut candle = |tokens: &[u32], chunk: usize| {
        let mut logits = None;
        for (i, piece) in tokens.chunks(chunk).enumerate() {
            let input = Tensor::new(piece, &Device::Cpu).unwrap();
            let input = input.unsqueeze(0).unwrap();
            logits = Some(stock.forward(&input, i * chunk).unwrap());
        }
        logits.unwrap().to_vec2::<f32>().unwrap().remove(0)
    };
    let paged = |model: &Pretrained, tokens: &[u32]| {
        let cache = new_cache(model, 64, 16);
        let id = cache.add(tokens, AddOptions::default()).unwrap().id;
        prefill(model, &cache, id, tokens, usize::MAX)
            .to_vec2::<f32>()
            .unwrap()
            .remove(0)
    };
    let prompt = &goldens()[4].prompt_ids[..32];
    let singles: std::collections::BTreeSet<u32> = prompt.iter().copied().collect();
    let mut far = Vec::new();
    let (mut ours_off, mut candle_off) = (0.0, 0.0);
    for token in singles {
        let exact = paged(exact, &[token]);
        let (ours, candle) = (paged(&ours, &[token]), candle(&[token], 1));
        far.push(relative(&ours, &candle));
        ours_off += relative(&ours, &exact).powi(2);
        candle_off += relative(&candle, &exact).powi(2);
    }
    far.sort_by(f64::total_cmp);
    assert!(far[far.len() / 4] < 1e-6, "single tokens: {far:?}");
    let ratio = (ours_off / candle_off).sqrt();
    assert!(ratio < 1.1, "off by {ratio} of what candle is");
    let whole = candle(prompt, 32);
    let own_spread = relative(&candle(prompt, 1), &whole);
    let together = relative(&paged(&ours, prompt), &whole);
    assert!(
        together <= own_spread,
        "32 tokens: {together}, candle with itself {own_spread}"
    );
}

/// All logits of a prompt, and the unused logits of a chunk, as the feeds ask for them.
#[test]
fn feeds_choose_their_logits() {
    let Some(model) = f32_model("feeds_choose_their_logits") else {
        return;
    };
    let prompt = &goldens()[0].prompt_ids;
    let cache = new_cache(model, 64, 16);
    let id = cache.add(prompt, AddOptions::default()).unwrap().id;
    let plan = cache
        .plan(&[Feed::new(id, prompt).with_logits(Logits::All)])
        .unwrap();
    let all = model.model.forward(plan.tokens(), &plan).unwrap();
    drop(plan);
    assert_eq!(all.dims(), [prompt.len(), model.model.vocab_size()]);
    let plan = cache
        .plan(&[Feed::new(id, prompt).with_logits(Logits::None)])
        .unwrap();
    assert_eq!(
        model.model.forward(plan.tokens(), &plan).unwrap().dims(),
        [0, model.model.vocab_size()]
    );
    drop(plan);
    for (end, row) in (1..=prompt.len()).zip(all.to_vec2::<f32>().unwrap()) {
        let cache = new_cache(model, 64, 16);
        let id = cache.add(&prompt[..end], AddOptions::default()).unwrap().id;
        let last = prefill(model, &cache, id, &prompt[..end], usize::MAX)
            .to_vec2::<f32>()
            .unwrap()
            .remove(0);
        assert!(relative(&row, &last) < 1e-4);
    }
}
