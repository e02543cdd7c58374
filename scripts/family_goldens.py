#!/usr/bin/env python3
"""Logits of tiny random models of every family, by transformers: tests/data/families/*.json.

    python3 -m venv V && V/bin/pip install torch==2.15.0 transformers==5.19.0 numpy==2.4.6
    V/bin/python scripts/family_goldens.py [NAME ...]

A case is a configuration and a prompt. transformers makes the model and saves it, which gives
the names and shapes of the tensors on disk; their content is then replaced by `values` below,
which tests/models/families.rs computes again, bit for bit; transformers loads that checkpoint
from disk and runs it (float32, eager attention, one forward over the whole prompt). Stored are
the configuration as transformers wrote it, the tensors with their centre and size, the prompt,
and the logits of a few rows. No weights are stored.
"""

import json
import os
import pathlib
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import numpy
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "families"
MASK = (1 << 64) - 1


def seed_of(name):
    """FNV-1a, 64 bits."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def values(name, shape, centre, size):
    """centre + size * u, u uniform in [-1, 1) with 24 bits, by splitmix64 of seed + index."""
    count = int(numpy.prod(shape))
    with numpy.errstate(over="ignore"):
        step = numpy.uint64(0x9E3779B97F4A7C15)
        z = numpy.uint64(seed_of(name)) + (numpy.arange(count, dtype=numpy.uint64) + numpy.uint64(1)) * step
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    u = (z >> numpy.uint64(40)).astype(numpy.float32) / numpy.float32(1 << 23) - numpy.float32(1)
    return (numpy.float32(centre) + numpy.float32(size) * u).reshape(shape)


def centre_and_size(name, shape, plus_one):
    """Large q and k, so that most rows prefer few keys and a lost or extra one shows."""
    if name.endswith("sinks"):
        return 1.0, 1.0
    if "norm" in name and name.endswith("weight"):
        return (0.0 if plus_one else 1.0), 0.25
    if "bias" in name:
        return 0.0, 0.25
    if "embed_tokens" in name:
        return 0.0, 1.0
    # GPT-OSS keeps its experts as [inputs, outputs].
    inputs = shape[-2] if len(shape) == 3 else shape[-1]
    gain = 1.0
    if "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
        gain = 2.0
    if "router" in name or name.endswith("mlp.gate.weight") or name.endswith("block_sparse_moe.gate.weight"):
        gain = 4.0
    # A power of two: exact in float32 whatever multiplies it.
    return 0.0, gain * 2.0 ** round(numpy.log2((3.0 / inputs) ** 0.5))


BASE = dict(
    vocab_size=61, hidden_size=48, intermediate_size=72, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
    pad_token_id=None, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
)


def rope(kind="default", theta=10000.0, **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


LLAMA3 = rope("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = rope("yarn", 10000.0, factor=4.0, original_max_position_embeddings=64)
# One divisor for each of the 6 pairs that 0.75 of a head of 16 turns.
SHORT = [1.0, 1.05, 1.2, 1.4, 1.7, 2.0]
LONG = [1.0, 1.5, 2.5, 4.0, 7.0, 12.0]


def longrope():
    return rope("longrope", short_factor=SHORT, long_factor=LONG, partial_rotary_factor=0.75,
                original_max_position_embeddings=32)


# name: (model class, configuration over BASE, prompt length, other options)
CASES = {
    "llama": ("Llama", dict(rope_parameters=LLAMA3), 40, {}),
    "llama_bias_head_dim": ("Llama", dict(head_dim=24, attention_bias=True, mlp_bias=True, tie_word_embeddings=True), 24, {}),
    "llama_linear": ("Llama", dict(rope_parameters=rope("linear", factor=4.0)), 40, {}),
    "llama_dynamic": ("Llama", dict(rope_parameters=rope("dynamic", factor=2.0)), 40, {}),
    "llama_yarn": ("Llama", dict(rope_parameters=YARN), 90, {}),
    "llama_proportional": ("Llama", dict(head_dim=16, rope_parameters=rope("proportional", partial_rotary_factor=0.5, factor=2.0)), 40, {}),
    "llama_bf16": ("Llama", dict(rope_parameters=LLAMA3), 40, {"dtype": "bfloat16"}),
    "mistral_window": ("Mistral", dict(sliding_window=9, head_dim=16), 40, {}),
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=None), 40, {}),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=1), 40, {}),
    "qwen2_no_window": ("Qwen2", dict(use_sliding_window=False, sliding_window=7, max_window_layers=1, tie_word_embeddings=True), 40, {}),
    "qwen2_moe": ("Qwen2Moe", dict(
        num_hidden_layers=4, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, decoder_sparse_step=2, mlp_only_layers=[3],
        use_sliding_window=True, sliding_window=8, max_window_layers=3), 40, {}),
    # What llama.cpp writes: experts in every layer, no windows.
    "qwen2_moe_all_sparse": ("Qwen2Moe", dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40), 24, {}),
    "qwen3": ("Qwen3", dict(head_dim=16, attention_bias=True), 40, {}),
    "qwen3_moe": ("Qwen3Moe", dict(
        head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True, mlp_only_layers=[1]), 40, {}),
    "qwen3_moe_all_sparse": ("Qwen3Moe", dict(
        head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True), 24, {}),
    "phi3": ("Phi3", dict(hidden_size=96, sliding_window=11, original_max_position_embeddings=512), 40, {}),
    "phi3_longrope_short": ("Phi3", dict(
        hidden_size=96, max_position_embeddings=128, original_max_position_embeddings=32,
        rope_parameters=longrope()), 30, {}),
    "phi3_longrope_long": ("Phi3", dict(
        hidden_size=96, max_position_embeddings=128, original_max_position_embeddings=32,
        rope_parameters=longrope(), tie_word_embeddings=True), 60, {}),
    "phi": ("Phi", dict(hidden_size=96, rope_parameters=rope(partial_rotary_factor=0.5)), 40, {}),
    "phi_qk_layernorm": ("Phi", dict(hidden_size=96, qk_layernorm=True, rope_parameters=rope(partial_rotary_factor=0.5)), 24, {}),
    "gemma": ("Gemma", dict(head_dim=16, tie_word_embeddings=True), 40, {"plus_one": True}),
    "gemma2": ("Gemma2", dict(
        head_dim=16, tie_word_embeddings=True, sliding_window=9, query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0, final_logit_softcapping=5.0), 40, {"plus_one": True}),
    "gemma3": ("Gemma3", dict(
        num_hidden_layers=7, head_dim=16, tie_word_embeddings=True, sliding_window=9,
        query_pre_attn_scalar=24, rope_parameters={
            "full_attention": rope("linear", 1000000.0, factor=8.0),
            "sliding_attention": rope("default", 10000.0)}), 40, {"plus_one": True}),
    "starcoder2": ("Starcoder2", dict(sliding_window=9, tie_word_embeddings=True), 40, {}),
    "starcoder2_no_window": ("Starcoder2", dict(tie_word_embeddings=False), 24, {}),
    "stablelm": ("StableLm", dict(hidden_size=96, use_qkv_bias=True, rope_parameters=rope(partial_rotary_factor=0.25)), 40, {}),
    "stablelm_parallel": ("StableLm", dict(hidden_size=96, use_parallel_residual=True, rope_parameters=rope(partial_rotary_factor=0.25)), 24, {}),
    "granite": ("Granite", dict(
        embedding_multiplier=3.0, logits_scaling=2.5, residual_multiplier=0.3,
        attention_multiplier=0.2, tie_word_embeddings=True), 40, {}),
    "olmo": ("Olmo", dict(clip_qkv=1.5), 40, {}),
    "olmo2": ("Olmo2", dict(num_key_value_heads=3), 40, {}),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=5, no_rope_layer_interval=2, tie_word_embeddings=True), 40, {}),
    "smollm3_every_fourth": ("SmolLM3", dict(num_hidden_layers=5), 24, {}),
    "glm4": ("Glm4", dict(head_dim=16, attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5)), 40, {}),
    "helium": ("Helium", dict(head_dim=8), 40, {}),
    "gpt_oss": ("GptOss", dict(
        num_hidden_layers=4, head_dim=16, sliding_window=9, num_local_experts=5, num_experts_per_tok=2,
        swiglu_limit=1.5, rope_parameters=rope("yarn", 150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                             original_max_position_embeddings=64)), 40, {"dtype": "bfloat16"}),
    "gpt_oss_limit_7": ("GptOss", dict(
        num_hidden_layers=2, head_dim=16, sliding_window=9, num_local_experts=5, num_experts_per_tok=2,
        rope_parameters=rope("yarn", 150000.0, factor=4.0, truncate=False,
                             original_max_position_embeddings=64)), 24, {}),
}


def run(name, model_class, over, length, options):
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(model_class, model_class + "Config"))
    model_class = getattr(transformers, model_class + "ForCausalLM")
    fields = {**BASE, **over}
    config = config_class(**fields)
    stored = getattr(torch, options.get("dtype", "float32"))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder)
        path = pathlib.Path(folder, "model.safetensors")
        tensors, content = [], {}
        for tensor, data in sorted(load_file(path).items()):
            centre, size = centre_and_size(tensor, data.shape, options.get("plus_one", False))
            tensors.append([tensor, list(data.shape), centre, size])
            content[tensor] = torch.from_numpy(values(tensor, data.shape, centre, size)).to(stored)
        save_file(content, path, metadata={"format": "pt"})
        model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        config_json = json.loads(pathlib.Path(folder, "config.json").read_text())
    prompt = [(7 * i * i + 3 * i + 5) % 61 for i in range(length)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    # The first rows, one in the middle, and the last.
    rows = sorted({0, 1, 8, 9, length // 2, length - 2, length - 1})
    return {
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "config": config_json,
        "stored": options.get("dtype", "float32"),
        "tensors": tensors,
        "prompt": prompt,
        "rows": rows,
        "logits": [[float(f"{x:.7g}") for x in logits[row].tolist()] for row in rows],
    }


def frequencies():
    """Radians per position and factor of cos and sin of every rope kind, from ROPE_INIT_FUNCTIONS."""
    out = []
    for kind, more in [
        ("linear", dict(factor=4.0)),
        ("yarn", dict(factor=4.0, original_max_position_embeddings=8192)),
        ("yarn", dict(factor=32.0, original_max_position_embeddings=4096, truncate=False)),
        ("yarn", dict(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0, beta_fast=16.0, beta_slow=2.0)),
        ("yarn", dict(factor=8.0, original_max_position_embeddings=4096, attention_factor=1.25)),
        ("llama3", dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)),
        ("proportional", dict(partial_rotary_factor=0.25, factor=2.0)),
        ("dynamic", dict(factor=2.0)),
        ("longrope", dict(
            short_factor=[1.0 + 0.01 * i for i in range(32)], long_factor=[1.0 + 0.5 * i for i in range(32)],
            original_max_position_embeddings=4096)),
    ]:
        parameters = rope(kind, 150000.0, **more)
        config = transformers.LlamaConfig(
            hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
            max_position_embeddings=32768, rope_parameters=dict(parameters))
        for seq_len in [4096, 32768]:
            inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len)
            out.append({"parameters": parameters, "context": seq_len,
                        "frequencies": inv_freq.tolist(), "factor": float(factor)})
    return {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}", "ropes": out}


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:]
    if not wanted or "rope" in wanted:
        (OUT / "rope.json").write_text(json.dumps(frequencies()) + "\n")
    for name, case in CASES.items():
        if not wanted or name in wanted:
            (OUT / f"{name}.json").write_text(json.dumps(run(name, *case)) + "\n")
            print(name, flush=True)


if __name__ == "__main__":
    main()
