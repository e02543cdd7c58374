#!/usr/bin/env python3
"""Compiles the kernels and prints what ptxas says: kernels_compile.py NVCC OUT_FOLDER [ARCH ...]

A table of registers and blocks per multiprocessor. Ends non-zero if a kernel spills, is missing on
an architecture, or needs more registers than its intended occupancy leaves. Also writes
paged_attn.ptx (compute_80) into OUT_FOLDER, for the interpreter.
"""
import concurrent.futures
import os
import re
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "kernels" / "paged_attn.cu"
# As in build.rs.
FLAGS = ["-std=c++17", "-O3", "--expt-relaxed-constexpr"]
# Threads of a block, and blocks that shall fit into the 65,536 registers of a multiprocessor.
BUDGET = [
    (r"decode_mma_\w+_d(64|128)", 128, 3),
    (r"decode_mma_\w+_d256", 64, 3),
    (r"prefill_mma_", 128, 2),
    (r"attend_simt_\w+_d(64|128)", 128, 3),
    (r"attend_simt_", 128, 2),
    (r"write_kv_", 256, 6),
    (r"", 128, 4),
]


def registers_per_block(registers, threads):
    return -(-registers // 8) * 8 * threads


def compile_for(nvcc, arch, folder):
    command = [nvcc, *FLAGS, f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", str(SOURCE), "-o",
               str(folder / f"paged_attn_sm{arch}.cubin")]
    start = time.time()
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"sm_{arch}: nvcc failed\n{result.stderr}")
    found, name = {}, None
    for line in result.stderr.splitlines():
        if entry := re.search(r"entry function '(\w+)'", line):
            name = entry[1]
            found[name] = {}
        elif spill := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found[name]["spill"] = sum(map(int, spill.groups()))
        elif used := re.search(r"Used (\d+) registers", line):
            found[name]["registers"] = int(used[1])
            shared = re.search(r"(\d+) bytes smem", line)
            found[name]["shared"] = int(shared[1]) if shared else 0
    print(f"sm_{arch}: {len(found)} kernels in {time.time() - start:.0f} s")
    return found


def main():
    nvcc, folder = sys.argv[1], Path(sys.argv[2])
    architectures = sys.argv[3:] or ["80", "90", "100", "120"]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([nvcc, *FLAGS, "-arch=compute_80", "--ptx", str(SOURCE), "-o", str(folder / "paged_attn.ptx")],
                   check=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(architectures, pool.map(lambda arch: compile_for(nvcc, arch, folder), architectures)))
    names = sorted(set().union(*results.values()))
    faults = []
    print("\nregisters per thread (spilled bytes)" + " " * 2 + "".join(f"{'sm_' + a:>9}" for a in architectures)
          + "   static shared  blocks wanted")
    for name in names:
        threads, blocks = next((t, b) for pattern, t, b in BUDGET if re.match(pattern, name))
        cells, shared = [], 0
        for arch in architectures:
            found = results[arch].get(name)
            if not found:
                faults.append(f"{name} is missing on sm_{arch}")
                cells.append("-")
                continue
            shared = found["shared"]
            spilled = found["spill"]
            cells.append(f"{found['registers']}" + (f" ({spilled})" if spilled else ""))
            if spilled:
                faults.append(f"{name} spills on sm_{arch}")
            if registers_per_block(found["registers"], threads) * blocks > 65536:
                faults.append(f"{name}: {found['registers']} registers on sm_{arch} leave no room for {blocks} blocks")
        print(f"{name:38}" + "".join(f"{c:>9}" for c in cells) + f"{shared:16}  {blocks} x {threads} threads")
    for fault in faults:
        print("FAULT:", fault)
    sys.exit(1 if faults else 0)


main()
