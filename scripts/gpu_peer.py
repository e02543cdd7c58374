#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on contiguous K/V, as a peer: gpu_peer.py OUT.json

The shapes of tests/cuda_device/bench.rs: 32 query and 8 KV heads of dim 128, bf16. Not yet run on
a GPU.
"""
import json
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2


def seconds(f):
    """Seconds per call: the median of five runs of about 30 ms, after a warm-up."""
    def timed(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            f()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    timed(2)
    calls = min(max(int(0.03 / timed(2)), 1), 1000)
    return sorted(timed(calls) for _ in range(5))[2]


def tensor(batch, heads, rows):
    return torch.randn(batch, heads, rows, DIM, device="cuda", dtype=torch.bfloat16)


def main():
    figures = {"torch": torch.__version__, "decode": [], "prefill": []}
    for tokens in (1 << 10, 4 << 10, 32 << 10):
        for batch in (1, 16, 64, 256):
            q, k, v = tensor(batch, HEADS, 1), tensor(batch, KV_HEADS, tokens), tensor(batch, KV_HEADS, tokens)
            t = seconds(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))
            figures["decode"].append({"batch": batch, "tokens": tokens, "microseconds": t * 1e6,
                                      "gigabytes_per_second": batch * tokens * TOKEN_BYTES / t / 1e9})
            del q, k, v
    for tokens in (1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10):
        q, k, v = tensor(1, HEADS, tokens), tensor(1, KV_HEADS, tokens), tensor(1, KV_HEADS, tokens)
        t = seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        operations = 2 * HEADS * DIM * tokens * (tokens + 1)
        figures["prefill"].append({"tokens": tokens, "microseconds": t * 1e6, "teraflops": operations / t / 1e12})
    with open(sys.argv[1], "w") as out:
        json.dump(figures, out, indent=2)


main()
