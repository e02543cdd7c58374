//! Layer groups at work under a model: windowed groups give blocks back and read only their
//! window, and prefixes and forks serve all groups.

use candle_core::{DType, Device};
use candle_paged_attn::cache::{AddOptions, CacheConfig, PagedKvCache, SequenceId};
use candle_paged_attn::models::{CausalLm, Decoder};

use crate::checkpoint::{distance, tokens};
use crate::golden::Golden;
use crate::run::{cache, in_chunks, step};

const BLOCK: usize = 16;

fn blocks(cache: &PagedKvCache, sequence: SequenceId) -> Vec<usize> {
    (0..cache.spec().groups.len())
        .map(|group| cache.block_table(sequence, group).unwrap().1.len())
        .collect()
}

/// A model of the stored weights whose layers with a window have `window`.
fn with_window(name: &str, window: usize) -> (Golden, Decoder) {
    let golden = Golden::read(name);
    let mut spec = golden.spec();
    spec.context_length = 1 << 20;
    for layer in &mut spec.layers {
        layer.attention.window = layer.attention.window.map(|_| window);
    }
    let model = golden.load(spec, DType::F32);
    (golden, model)
}

/// Gemma 3's pattern with its window of 512, at 4,000 tokens: the full layers hold
/// 4000 / 16 blocks, the others those from the one of token 4001 - 512, the first that the next
/// token sees.
#[test]
fn gemma3_holds_the_blocks_of_its_windows() {
    let (_, model) = with_window("gemma3", 512);
    let spec = model.cache_spec(DType::F32).unwrap();
    assert_eq!(spec.groups[0].layers, [0, 1, 2, 3, 4, 6]);
    assert_eq!(spec.groups[1].layers, [5]);
    let config = CacheConfig::blocks(600);
    let cache = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap();
    assert_eq!(cache.block_size(), BLOCK);
    let prompt = tokens(71, 4000, 61);
    let id = cache.add(&prompt, AddOptions::default()).unwrap().id;
    let mut last = Vec::new();
    for chunk in prompt.chunks(400) {
        last = step(&model, &cache, &[(id, chunk)]);
    }
    assert_eq!(blocks(&cache, id), [250 - (4001 - 512) / 16, 250]);
    cache.check_invariants().unwrap();

    // Chunks of another size see the same keys.
    let other = in_chunks(&model, &prompt, 1000);
    let far = distance(&[last.pop().unwrap()], &other[3999..]);
    assert!(far <= 1e-4, "{far}");
}

/// Mistral's window in every layer: a pool of 6 blocks serves a sequence of any length, and
/// each row sees what 3 layers of 9 keys see, 25 tokens in all.
#[test]
fn a_window_only_model_runs_on_in_bounded_memory() {
    let (_, model) = with_window("mistral_window", 9);
    let spec = model.cache_spec(DType::F32).unwrap();
    assert_eq!(spec.groups.len(), 1);
    let cache = PagedKvCache::new(&spec, &CacheConfig::blocks(6), &Device::Cpu).unwrap();
    let prompt = tokens(72, 6000, 61);
    let id = cache.add(&prompt[..1], AddOptions::default()).unwrap().id;
    let mut last = Vec::new();
    for chunk in prompt.chunks(32) {
        last = step(&model, &cache, &[(id, chunk)]);
        assert!(blocks(&cache, id)[0] <= 2, "{:?}", blocks(&cache, id));
    }
    assert_eq!(cache.len(id).unwrap(), 6000);
    cache.check_invariants().unwrap();
    let seen = in_chunks(&model, &prompt[6000 - 25..], 25);
    let far = distance(&[last.pop().unwrap()], &seen[24..]);
    assert!(far <= 1e-4, "{far}");
}

#[test]
fn prefix_hits_and_forks_serve_all_groups() {
    for name in ["gemma3", "gpt_oss", "gemma2", "qwen2"] {
        let golden = Golden::read(name);
        let model = golden.load(golden.spec(), DType::F32);
        let cache = cache(&model, DType::F32);
        assert_eq!(cache.spec().groups.len(), 2, "{name}");
        let prompt = &golden.prompt;
        let first = cache.add(prompt, AddOptions::default()).unwrap();
        step(&model, &cache, &[(first.id, prompt)]);
        // The whole blocks of 39 tokens.
        let second = cache.add(prompt, AddOptions::default()).unwrap();
        assert_eq!(second.cached_tokens, 32, "{name}");
        let mut rows = step(&model, &cache, &[(second.id, &prompt[32..])]);
        let far = distance(
            &[rows.pop().unwrap()],
            &golden.logits[golden.rows.len() - 1..],
        );
        assert!(far <= 1e-4, "{name}: {far:.1e}");

        // A fork goes on as its origin does.
        let fork = cache.fork(second.id).unwrap();
        let next = [(second.id, &prompt[..5]), (fork, &prompt[..5])];
        let both = step(&model, &cache, &next);
        let far = distance(&both[..5], &both[5..]);
        assert!(far <= 1e-6, "{name}: {far:.1e}");
        cache.check_invariants().unwrap();
    }
}
