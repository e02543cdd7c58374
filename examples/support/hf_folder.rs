//! A Llama GGUF as a Hugging Face folder in f32, so that both loaders can be compared on the
//! same weights.

use std::{collections::HashMap, path::Path};

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use candle_paged_attn::load::{gguf::GgufFile, tokenizer};
use serde_json::json;

/// Writes config.json, model.safetensors (f32), tokenizer.json and tokenizer_config.json.
///
/// GGUF stores the rows of the query and key matrices for interleaved rotary embedding,
/// Hugging Face for rotation of halves: they are put back in the latter order.
pub fn write_hf_folder(gguf: &Path, out: &Path) -> Result<()> {
    let file = GgufFile::open(gguf)?;
    std::fs::create_dir_all(out)?;
    let heads = file.u32("llama.attention.head_count")? as usize;
    let kv_heads = file.u32("llama.attention.head_count_kv")? as usize;
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    for name in file.tensor_names() {
        let mut tensor = file.tensor(name, &Device::Cpu)?.dequantize(&Device::Cpu)?;
        if name.ends_with("attn_q.weight") {
            tensor = halves(&tensor, heads)?;
        } else if name.ends_with("attn_k.weight") {
            tensor = halves(&tensor, kv_heads)?;
        }
        tensors.insert(hf_name(name)?, tensor);
    }
    let tied = !tensors.contains_key("lm_head.weight");
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize_to_file(&tensors, Some(format), &out.join("model.safetensors"))?;

    let token = |name: &str| file.u32(&format!("tokenizer.ggml.{name}_token_id"));
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": file.u32("llama.embedding_length")?,
        "intermediate_size": file.u32("llama.feed_forward_length")?,
        "num_hidden_layers": file.u32("llama.block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": file.u32("llama.vocab_size")?,
        "rms_norm_eps": decimal(file.f32("llama.attention.layer_norm_rms_epsilon")?)?,
        "rope_theta": decimal(file.f32("llama.rope.freq_base")?)?,
        "max_position_embeddings": file.u32("llama.context_length")?,
        "tie_word_embeddings": tied,
        "bos_token_id": token("bos")?,
        "eos_token_id": token("eos")?,
        "attention_bias": false,
        "mlp_bias": false,
        "torch_dtype": "float32",
        "rope_scaling": null,
    });
    write_json(&out.join("config.json"), &config)?;
    tokenizer::from_gguf(&file)?
        .save(out.join("tokenizer.json"), false)
        .map_err(|e| anyhow::anyhow!("tokenizer.json: {e}"))?;
    let tokens = file.strings("tokenizer.ggml.tokens")?;
    let tokenizer_config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens.get(token("eos")? as usize),
        "chat_template": file.optional("tokenizer.chat_template", GgufFile::string)?,
    });
    write_json(&out.join("tokenizer_config.json"), &tokenizer_config)
}

/// The number that was meant: 1e-5 and not 9.999999747378752e-6.
fn decimal(x: f32) -> Result<f64> {
    Ok(x.to_string().parse()?)
}

fn write_json(path: &Path, value: &serde_json::Value) -> Result<()> {
    std::fs::write(path, serde_json::to_string_pretty(value)?)
        .with_context(|| format!("{}", path.display()))
}

/// Rows of each head from (even, odd) pairs to first half, second half.
fn halves(w: &Tensor, heads: usize) -> Result<Tensor> {
    let (rows, columns) = w.dims2()?;
    Ok(w.reshape((heads, rows / heads / 2, 2, columns))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape((rows, columns))?)
}

fn hf_name(name: &str) -> Result<String> {
    let top = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(top) = top {
        return Ok(top.into());
    }
    let part = |kind: &str| {
        Some(match kind {
            "attn_norm" => "input_layernorm",
            "ffn_norm" => "post_attention_layernorm",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_output" => "self_attn.o_proj",
            _ => return None,
        })
    };
    match name.split('.').collect::<Vec<_>>()[..] {
        ["blk", layer, kind, "weight"] if part(kind).is_some() => Ok(format!(
            "model.layers.{layer}.{}.weight",
            part(kind).unwrap_or_default()
        )),
        _ => bail!("{name}: not a tensor of a Llama model"),
    }
}
