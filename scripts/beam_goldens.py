#!/usr/bin/env python3
"""Makes tests/data/beams: a small random llama, and what transformers' beam search finds with it.

    python3 -m venv V
    V/bin/pip install torch==2.15.0 transformers==5.19.0 safetensors==0.8.0
    V/bin/python scripts/beam_goldens.py

The weights are rounded to bf16, so that a file of some tens of kB holds them exactly; everything
is computed in f32. A search is kept only if the same search in f64, and with logits that carry
noise ten times as large as f32's rounding, finds the same tokens: what is stored does not
hang on the last bits of anybody's sums.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent.parent / "tests" / "data" / "beams"
ANY, CRITICAL = 120, 160
NOISE = 1e-5
CONFIG = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=True,
    # Wide enough that distributions are neither flat nor certain.
    initializer_range=0.35,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
# The fields that a config.json of this model has on the hub.
PUBLISHED = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings",
]


def make_model():
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
            weight.copy_(weight.bfloat16().float())
    return model


def pick(generator, choices):
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]


def make_search(generator, model):
    """A prompt and options; the end tokens are likely ones, so that most searches meet them."""
    length = int(torch.randint(1, 24, (1,), generator=generator))
    prompt = torch.randint(CONFIG["vocab_size"], (length,), generator=generator)
    beams = pick(generator, [2, 3, 4, 5])
    greedy = run(model, prompt, dict(max_new_tokens=12, num_beams=beams))["sequences"][0]
    frequent = torch.bincount(torch.tensor(greedy), minlength=64).argsort(descending=True)
    ends = [int(frequent[i]) for i in range(pick(generator, [0, 1, 2, 3, 4]))]
    options = dict(
        num_beams=beams,
        num_return_sequences=pick(generator, [1, beams, beams]),
        length_penalty=pick(generator, [1.0, 1.0, 0.0, 2.0, 0.6, -0.5]),
        early_stopping=pick(generator, [True, False, "never"]),
        max_new_tokens=pick(generator, [1, 2, 3, 4, 5, 6, 8, 12]),
    )
    if ends:
        options["eos_token_id"] = ends
    return prompt, options


class Noise:
    """A logits processor; beam search calls it with log-probabilities."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, _, scores):
        return scores + NOISE * torch.randn(scores.shape, generator=self.generator)


def run(model, prompt, options, noise=None):
    """The continuations, without the prompt and the padding, and their scores."""
    with torch.no_grad():
        found = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            do_sample=False,
            pad_token_id=options.get("eos_token_id", [0])[0],
            output_scores=True,
            return_dict_in_generate=True,
            logits_processor=[] if noise is None else [Noise(noise)],
            **options,
        )
    sequences = []
    for row in found.sequences[:, len(prompt):].tolist():
        ends = [i for i, token in enumerate(row) if token in options.get("eos_token_id", [])]
        sequences.append(row[: ends[0] + 1] if ends else row)
    return dict(sequences=sequences, scores=found.sequences_scores.tolist())


def is_critical(options, sequences):
    """Whether the moment at which the search stopped may have decided what it found: hypotheses
    were complete when the last step brought others, or it stopped on the heuristic."""
    ended = [sequence[-1] in options.get("eos_token_id", []) for sequence in sequences]
    if options["early_stopping"] is True:
        return any(ended) and not all(ended)
    longest = max(map(len, sequences))
    return all(ended) and len(ended) == options["num_beams"] and longest < options["max_new_tokens"]


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = make_model()
    exact = make_model().double()
    generator = torch.Generator().manual_seed(2)
    kept, dropped = [], 0
    while len(kept) < ANY + CRITICAL:
        prompt, options = make_search(generator, model)
        found = run(model, prompt, options)
        if len(kept) >= ANY and not is_critical(options, found["sequences"]):
            continue
        again = [run(exact, prompt, options)] + [
            run(model, prompt, options, noise) for noise in range(3)
        ]
        if any(other["sequences"] != found["sequences"] for other in again):
            dropped += 1
            continue
        kept.append(dict(prompt=prompt.tolist(), **options, **found))

    FOLDER.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.bfloat16().contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, FOLDER / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
        rope_theta=10000.0, attention_bias=False, mlp_bias=False, torch_dtype="float32",
        **{name: CONFIG[name] for name in PUBLISHED},
    )
    (FOLDER / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    lines = ",\n".join(json.dumps(search) for search in kept)
    (FOLDER / "searches.json").write_text(f"[\n{lines}\n]\n")
    early = sum(
        len(s["sequences"][0]) < s["max_new_tokens"] for s in kept
    )
    print(f"{len(kept)} searches, {early} of them end early; {dropped} dropped as too close")


if __name__ == "__main__":
    main()
