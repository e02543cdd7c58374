#!/usr/bin/env python3
"""Compiles the kernels and prints what ptxas says: kernels_compile.py OUT_FOLDER [ptx | ARCH ...]

A table of registers: used on each architecture, and the budget, which is what the intended number of
blocks per multiprocessor leaves to a thread; and how many bytes these blocks keep on their way from
memory, and how many the memory's latency asks for. Ends non-zero if a kernel spills, is missing on an
architecture, needs more registers than its budget, or has less on its way than it needs. Also writes
paged_attn.ptx (compute_80) into OUT_FOLDER, for the interpreter; `ptx`: nothing else.
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

# A multiprocessor has 65,536 registers, and of the memory's bandwidth its share. To use that share, it
# has to have latency x bandwidth / multiprocessors bytes on their way at any time (Little's law). The
# latency is taken to be 0.7 us, that of a busy memory; an assumption, not yet measured.
#      bandwidth in bytes/s, multiprocessors, shared memory in KiB (1 KiB of each block is the system's)
MEMORY = {
    "80": (2.04e12, 108, 164),   # A100, 80 GB
    "90": (4.8e12, 132, 228),    # H200
    "100": (8.0e12, 148, 228),   # B200
    "120": (1.79e12, 170, 100),  # RTX 5090
}
LATENCY = 0.7e-6

# Kernels; threads of a block; blocks that shall fit by registers; KiB of shared memory of a block (as in
# src/ops/launch.rs); KiB of reads that a block has on their way; their share of the memory traffic.
BUDGET = [
    # A stage of K and V is under way while the one before is multiplied: 64 keys of 64 or 128 dims, 32
    # of 256. Three blocks of d128: 96 KiB, and as many as shared memory takes; the third covers one
    # that starts, or that merges.
    (r"decode_mma_wide_\w+_d256", 128, 2, 80, 32, 1),
    (r"decode_mma_wide_\w+_d128", 128, 3, 72, 32, 1),
    (r"decode_mma_wide_\w+_d64", 128, 3, 36, 16, 1),
    (r"decode_mma_\w+_d256", 64, 3, 72, 32, 1),
    (r"decode_mma_\w+_d128", 128, 3, 68, 32, 1),
    (r"decode_mma_\w+_d64", 128, 3, 34, 16, 1),
    # Bound by the tensor cores: two blocks, so that one's softmax runs beside the other's products.
    (r"prefill_mma_", 128, 2, None, None, None),
    # A stage is 32 KiB at every dim. Two blocks, so that one computes while the other waits. Queries and
    # outputs of 256 and 512 dims leave registers to one: where memory is the bound its warps wait, and
    # then both stages are on their way.
    (r"attend_simt_\w+_d(64|128)", 256, 2, 64, 32, 1),
    (r"attend_simt_", 256, 1, 65, 64, 1),
    # Two chunks of 8 elements per thread, 16 bytes each at least, half of the traffic.
    (r"write_kv_", 256, 4, 0, 256 * 2 * 16 / 1024, 0.5),
    # Four vectors of 16 bytes per thread, half of the traffic.
    (r"copy_blocks", 128, 6, 0, 128 * 4 * 16 / 1024, 0.5),
    # A float4 per lane of four chunks.
    (r"reduce", 128, 5, 9, 128 * 4 * 16 / 1024, 1),
    # Four floats of each state per lane, two thirds of the traffic.
    (r"merge_states", 128, 7, 0, 128 * 4 * 2 * 4 / 1024, 2 / 3),
]


def needed(arch, share):
    bandwidth, multiprocessors, _ = MEMORY[arch]
    return LATENCY * bandwidth * share / multiprocessors / 1024


def under_way(arch, blocks, shared, reads):
    """KiB on their way, with as many blocks as registers and shared memory hold."""
    return min(blocks, MEMORY[arch][2] // (shared + 1)) * reads


def compile_for(arch, folder):
    command = ["nvcc", *FLAGS, f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", str(SOURCE), "-o",
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
    print(f"sm_{arch}: {len(found)} kernels in {time.time() - start:.0f} s")
    return found


def main():
    folder, architectures = Path(sys.argv[1]), sys.argv[2:] or list(MEMORY)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["nvcc", *FLAGS, "-arch=compute_80", "--ptx", str(SOURCE), "-o", str(folder / "paged_attn.ptx")],
                   check=True)
    if architectures == ["ptx"]:
        return
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(architectures, pool.map(lambda arch: compile_for(arch, folder), architectures)))
    names = sorted(set().union(*results.values()))
    faults = []
    columns = "".join(f"{'sm_' + a:>9}" for a in architectures)
    print(f"\n{'':28}registers of a thread: used (spilled bytes)         KiB under way / needed\n"
          f"{'':28}budget = blocks x threads{columns}   {columns}")
    for name in names:
        threads, blocks, shared, reads, share = next(row for pattern, *row in BUDGET if re.match(pattern, name))
        budget = min(65536 // (blocks * threads) // 8 * 8, 255)
        used, flight = [], []
        for arch in architectures:
            found = results[arch].get(name)
            if not found:
                faults.append(f"{name} is missing on sm_{arch}")
                continue
            registers, spilled = found["registers"], found["spill"]
            used.append(f"{registers}" + (f" ({spilled})" if spilled else ""))
            if spilled:
                faults.append(f"{name} spills on sm_{arch}")
            if registers > budget:
                faults.append(f"{name}: {registers} registers on sm_{arch} leave no room for {blocks} blocks")
            if reads is None:
                flight.append("-")
                continue
            has, needs = under_way(arch, blocks, shared, reads), needed(arch, share)
            flight.append(f"{has:.0f}/{needs:.0f}")
            if has < needs:
                faults.append(f"{name}: {has:.0f} KiB under way on sm_{arch}, {needs:.0f} needed")
        print(f"{name:28}{budget:6} = {blocks:2} x {threads:3}      " + "".join(f"{c:>9}" for c in used) + "   "
              + "".join(f"{c:>9}" for c in flight))
    for fault in faults:
        print("FAULT:", fault)
    sys.exit(1 if faults else 0)


main()
