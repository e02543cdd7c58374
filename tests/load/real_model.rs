//! The loaders on SmolLM2-135M-Instruct.

use candle_core::{DType, Device};
use candle_paged_attn::{
    load::{
        LoadOptions,
        chat::Message,
        from_pretrained,
        gguf::{GgufFile, GgufWeights},
        safetensors::SafetensorsWeights,
    },
    models::{CausalLm, WeightSource},
};

use crate::support;

#[test]
fn the_default_model_loads_with_all_it_brings() {
    let Some(path) = support::model_or_skip("the_default_model_loads_with_all_it_brings") else {
        return;
    };
    let loaded = from_pretrained(path, &LoadOptions::default()).unwrap();
    assert_eq!(loaded.model.vocab_size(), 49_152);
    assert_eq!(loaded.model.context_length(), 8_192);
    assert_eq!(loaded.eos_token_ids, [2]);
    let prompt = loaded
        .chat_template
        .unwrap()
        .render(&[Message::new("user", "Hi")], true)
        .unwrap();
    assert_eq!(
        prompt,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
         <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
}

/// The Hugging Face folder holds the GGUF's numbers, with the rows of q and k of each head
/// moved from pairs to halves: checked here row by row.
#[test]
fn the_hf_folder_holds_the_same_weights() {
    let Some(path) = support::model_or_skip("the_hf_folder_holds_the_same_weights") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    support::write_hf_folder(&path, folder.path()).unwrap();
    let hf = SafetensorsWeights::open(folder.path(), DType::F32, &Device::Cpu).unwrap();
    let file = GgufFile::open(&path).unwrap();
    let gguf = GgufWeights::new(file, Some(DType::F32), &Device::Cpu).unwrap();
    assert_eq!(hf.tensor_names().count(), 272);
    let rows = |source: &dyn WeightSource, name: &str, shape: [usize; 2]| {
        let tensor = source.tensor(name, &shape, DType::F32).unwrap();
        tensor.to_vec2::<f32>().unwrap()
    };
    let embedding = "model.embed_tokens.weight";
    assert_eq!(
        rows(&hf, embedding, [49_152, 576]),
        rows(&gguf, "token_embd.weight", [49_152, 576])
    );
    for (hf_name, gguf_name, heads) in [("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)] {
        let shape = [heads * 64, 576];
        let halves = rows(
            &hf,
            &format!("model.layers.7.self_attn.{hf_name}.weight"),
            shape,
        );
        let pairs = rows(&gguf, &format!("blk.7.{gguf_name}.weight"), shape);
        for head in 0..heads {
            for i in 0..32 {
                assert_eq!(halves[head * 64 + i], pairs[head * 64 + 2 * i]);
                assert_eq!(halves[head * 64 + 32 + i], pairs[head * 64 + 2 * i + 1]);
            }
        }
    }
    let v = "model.layers.7.self_attn.v_proj.weight";
    assert_eq!(
        rows(&hf, v, [192, 576]),
        rows(&gguf, "blk.7.attn_v.weight", [192, 576])
    );
}
