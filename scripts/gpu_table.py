#!/usr/bin/env python3
"""The figures of scripts/gpu-check.sh as a short table: gpu_table.py FOLDER"""
import json
import sys
from pathlib import Path


def load(name):
    path = Path(sys.argv[1]) / name
    return json.loads(path.read_text()) if path.exists() else {}


def main():
    ours, peer = load("figures.json"), load("peer.json")
    if not ours:
        sys.exit("no figures")
    print(f"copy: {ours['copy_gigabytes_per_second']:.0f} GB/s; per layer: "
          f"{ours['overhead']['microseconds_per_layer']:.1f} us of overhead; "
          f"write_kv: {ours['write_kv']['of_copy']:.2f} of copy")
    theirs = {(f["batch"], f["tokens"]): f["microseconds"] for f in peer.get("decode", [])}
    print("\ndecode   batch  tokens       us    GB/s  of copy  torch us")
    for f in ours["decode"]:
        other = theirs.get((f["batch"], f["tokens"]))
        print(f"{f['batch']:14} {f['tokens']:7} {f['microseconds']:8.1f} {f['gigabytes_per_second']:7.0f}"
              f" {f['of_copy']:8.2f}  {f'{other:8.1f}' if other else '       -'}")
    theirs = {f["tokens"]: f["teraflops"] for f in peer.get("prefill", [])}
    print("\nprefill        tokens       us  TFLOP/s  torch TFLOP/s")
    for f in ours["prefill"]:
        other = theirs.get(f["tokens"])
        print(f"{f['tokens']:21} {f['microseconds']:8.1f} {f['teraflops']:8.0f}  {f'{other:13.0f}' if other else '            -'}")
    f = ours["cascade"]
    print(f"\ncascade: {f['sequences']} sequences that share {f['shared_tokens']} tokens: "
          f"{f['microseconds']:.1f} us, without {f['plain_microseconds']:.1f} us")


main()
