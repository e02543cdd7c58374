#!/usr/bin/env python3
"""Plants faults in copies of the CUDA kernels and shows which layer catches each.

    kernels_planted.py WORK_FOLDER [--all] [NUMBER ...]

Layers: plain (emulator), asan and tsan (emulator under sanitizers), far and long (emulator, with a
test of its own), ptx (interpreter on what nvcc makes of the faulty source). Without --all a fault meets the layers named with it only; with --all it
meets every layer, and the table says what each one sees. Ends non-zero if a fault is caught by none of
the layers named with it, or if the unchanged source is "caught".

Environment: that of scripts/cuda_toolchain.sh.
"""
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MMA, SIMT, PROBLEM, CACHE = "attend_mma.cuh", "attend_simt.cuh", "problem.cuh", "cache_ops.cuh"
PLATFORM, MERGE = "platform.cuh", "merge.cuh"

# Number (that of the first prototype's table up to 21, D1 to D3), what, layers, edits (file, old, new).
FAULTS = [
    ("0", "nothing changed", "", []),
    ("1", "global access one vector past the end", "plain", [
        (CACHE, "= block_len / Vector<T>::LEN;", "= block_len / Vector<T>::LEN + 1;")]),
    ("2", "static shared memory 4 bytes short", "asan", [
        (MERGE, "STATIC_SHARED(float, part_sums, WARPS)", "STATIC_SHARED(float, part_sums, WARPS - 1)")]),
    ("3", "no barrier before the merge across warps", "plain", [
        (MMA, "    __syncthreads();\n    merge_parts", "    merge_parts")]),
    ("3b", "the same without tensor cores", "plain", [
        (SIMT, "  __syncthreads();\n  merge_parts", "  merge_parts")]),
    ("4", "cp.async not waited for on the last tile", "plain", [(MMA, "copy_wait<0>()", "copy_wait<1>()")]),
    ("4b", "the same without tensor cores", "plain", [(SIMT, "copy_wait<0>()", "copy_wait<1>()")]),
    ("5", "no barrier before a tile is refilled", "plain", [
        (MMA, "    __syncthreads();\n  }\n\n  UNROLL", "  }\n\n  UNROLL")]),
    ("5b", "the same without tensor cores", "plain", [
        (SIMT, "    __syncthreads();\n  }\n\n  // The keys", "  }\n\n  // The keys")]),
    ("6", "full-mask shuffle in a branch of some lanes", "plain", [
        (SIMT, "for (int offset = LANES / 2; offset > 0;", "if (key < w.end) for (int offset = LANES / 2; offset > 0;")]),
    ("7", "idle warps leave before the barrier", "plain", [
        (SIMT, "  // The keys of a warp that different lanes took.\n",
         "  if (w.begin + part * KEYS >= w.end) return;\n")]),
    ("8", "16-byte load at another address than a multiple of 16", "plain", [
        (CACHE, "load_vector(from[b] + i * Vector<S>::LEN, true)", "load_vector(from[b] + 1 + i * Vector<S>::LEN, true)")]),
    ("9", "keys past the end of the last page's tokens are read", "plain", [
        (PROBLEM, "return key < w.end; };", "return key < (w.end + 15) / 16 * 16; };")]),
    ("10", "no __syncwarp before lanes read each other's weights", "plain", [
        (MERGE, "= share;\n    __syncwarp();\n", "= share;\n")]),
    ("10b", "no __syncwarp before the weights are overwritten", "long", [
        (MERGE, "    }\n    __syncwarp();\n  }\n", "    }\n  }\n")]),
    ("11", "accumulator not rescaled", "plain", [(MMA, "          values[t][i][2 * r] *= shrink;\n", "")]),
    ("12", "shared memory read before it is written", "plain", [
        (MERGE, "if (lane == 0) part_sums", "if (lane == 0 && sum > 0.f) part_sums")]),
    ("13", "all chunks write one record", "plain", [(PROBLEM, "int64_t(slot) * a.stream_rows", "int64_t(0) * a.stream_rows")]),
    ("14", "mma: fragments a1 and a2 swapped", "plain", [
        (MMA, "multiply<T>(s[t][2 * n], fragment[t], b[0], b[1]);",
         "uint32_t f[4] = {fragment[t][0], fragment[t][2], fragment[t][1], fragment[t][3]};\n"
         "multiply<T>(s[t][2 * n], f, b[0], b[1]);")]),
    ("15", "permutation forgotten where V is read", "plain", [
        (MMA, "v_offset = offset(warp_n * NW + lane % 16, lane / 16);",
         "v_offset = (warp_n * NW + lane % 16) * D + lane / 16 * 8;")]),
    ("16", "32-bit cache offsets", "far", [
        (PROBLEM, "return block * block_stride +", "return int32_t(block) * int32_t(block_stride) +")]),
    ("17", "no barrier after the wait for cp.async", "plain", [
        (MMA, "    __syncthreads();\n    T *tile_k", "    T *tile_k")]),
    ("17b", "the same without tensor cores", "plain", [
        (SIMT, "    __syncthreads();\n    const C *tile_k", "    const C *tile_k")]),
    ("18", "dynamic shared memory 16 bytes short", "plain", [
        (MMA, "reinterpret_cast<T*>(shared);", "reinterpret_cast<T*>(shared + 16);")]),
    ("20", "causal mask one too short from position 91 on", "plain", [
        (PROBLEM, "uint32_t(position - key) < w.span", "uint32_t(position - (position > 90) - key) < w.span")]),
    ("21", "last token lost in contexts of more than 400", "plain", [
        (PROBLEM, "    end = len;\n", "    end = len - (len > 400);\n")]),
    ("22", "remainders of the weights forgotten", "plain", [
        (MMA, "const bool exact = WN > 1 || a.out_code == CODE_F32;", "const bool exact = false;")]),
    ("23", "lse without the maximum", "plain", [(PROBLEM, "max_score + logf(sum)", "logf(sum)")]),
    ("24", "a chunk forgotten by reduce", "plain", [
        (MERGE, "min((stream.chunks - first + WARPS - 1)", "min((stream.chunks - 1 - first + WARPS - 1)")]),
    ("25", "copy_blocks leaves the last vector out", "plain", [
        (CACHE, "= block_len / Vector<T>::LEN;", "= block_len / Vector<T>::LEN - 1;")]),
    ("26", "the neighbour's KV head", "plain", [
        (PROBLEM, "a.kv_heads + kv_head) * dim", "a.kv_heads + (kv_head ^ 1)) * dim")]),
    ("27", "all threads write the one log-sum-exp", "tsan", [
        (PROBLEM, "if (d == 0 && a.lse)", "if (a.lse)")]),
    ("28", "window without the query itself", "plain", [
        (PROBLEM, "min(a.window, 1u << 31)", "min(a.window - 1, 1u << 31)")]),
    ("29", "ALiBi slope of the head within its group", "plain", [
        (PROBLEM, "a.slopes[w.head(pair)]", "a.slopes[pair % w.group]")]),
    ("30", "soft cap after the slope", "plain", [
        (SIMT, """        if (a.softcap > 0.f) score = capped(a, score);
        if (a.slopes) score += query[g].bias(key);
""", """        if (a.slopes) score += query[g].bias(key);
        if (a.softcap > 0.f) score = capped(a, score);
""")]),
    ("30b", "the mask forgotten on tensor cores where a tile is open to some", "plain", [
        (MMA, "min(w.position(a, w.first_pair) + 1, w.end);", "w.end;")]),
    ("31", "sink taken for a key with a value", "plain", [
        (PROBLEM, "return w / (sum * w + weight(sink, top));", "return w / (sum * w);")]),
    ("32", "without causality each query sees no more than up to its own place", "plain", [
        (PROBLEM, "(a.window == EVERY_KEY ? 1 : int32_t(rows))", "int32_t(rows)"),
        (PROBLEM, "(a.window == EVERY_KEY ? 0 : int32_t(pair / group))", "int32_t(pair / group)")]),
    ("33", "without causality the slopes take all queries for the last one", "plain", [
        (MMA, "top[t][r] += w.late_bias", "w.late_bias")]),
    ("33b", "the same where warps share pairs", "plain", [(PROBLEM, "top += w.late_bias", "w.late_bias")]),
    ("34", "reduce leaves out what is streamed without causality alone", "plain", [
        (MERGE, "heads / kv_heads, window)", "heads / kv_heads, 0)")]),
    ("35", "without causality the last tile shows keys past the end", "plain ptx", [
        (MMA, "(a.window == 0 || a.window == EVERY_KEY) &&", "a.window == EVERY_KEY || a.window == 0 &&")]),
    ("D1", "operands of mma swapped in the assembly", "ptx", [
        (PLATFORM, '"r"(b0), "r"(b1));', '"r"(b1), "r"(b0));')]),
    ("D2", ".trans missing in the assembly", "ptx", [(PLATFORM, "x4.trans.shared", "x4.shared")]),
    ("D3", "cp.async reads where it should write zeros", "ptx", [(PLATFORM, '"r"(valid ? 16 : 0)', '"r"(16)')]),
    ("D4", "bf16 products where f16 was meant", "ptx", [(PLATFORM, 'MULTIPLY("f16", __half)', 'MULTIPLY("bf16", __half)')]),
    ("D5", "cp.async.wait_group off by one in the assembly", "ptx", [(PLATFORM, '"n"(pending)', '"n"(pending + 1)')]),
]


def replace_once(text, old, new, where):
    if text.count(old) != 1:
        sys.exit(f"{where}: {old!r} occurs {text.count(old)} times; the fault no longer fits the source")
    return text.replace(old, new)


def copy_of_kernels(folder, edits):
    """The sources with a fault, and with the entry points that the few jobs need alone."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(ROOT / "kernels", folder)
    for name, old, new in edits:
        path = folder / name
        path.write_text(replace_once(path.read_text(), old, new, name))
    for name, pattern in [
        ("paged_attn.cu", r"^ATTEND_(MMA|SIMT)\(bf16.*\n|^WRITE_KV_INTO\(bf16.*\n"),
        # Lines of a macro: the last one ends it.
        ("paged_attn.cu", r"^ +ATTEND\(\w+##_d(128|256|512).*\\\n"),
        ("emulator/cpp/main.cpp", r"ENTRIES_OF_(CACHE|TENSOR_CORES)\(bf16\)|ENTRY\(\w+##_d(128|256|512)\)"),
    ]:
        path = folder / name
        path.write_text(re.sub(pattern, "", path.read_text(), flags=re.M))
    path = folder / "paged_attn.cu"
    path.write_text(re.sub(r"^ +ATTEND\(\w+##_d(128|256|512).*\n", "\n", path.read_text(), flags=re.M))


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, errors="replace",
                          env={**os.environ, **more}, timeout=400)


def last_message(text):
    for pattern in (r"CUDA emulator\w* ERROR[^:]*: .*", r"SUMMARY: .*", r"runtime error: .*", r"deadlock", r"off by \S+",
                    r"WRONG: .*", r"panicked at .*\n.*", r"the emulator stopped.*"):
        if found := re.search(pattern, text):
            return re.sub(r"\s+", " ", found[0])[:90]
    return text.strip()[-90:]


def built():
    """The test binary and the program that compiles emulators, by target name."""
    command = ["cargo", "test", "--locked", "-p", "paged-attn-emulator", "--test", "emulated", "--no-run",
               "--message-format", "json"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable")}


def in_emulator(kind, folder, test, programs):
    binary = folder / f"emulator_{kind}"
    build = run([programs["build-emulator"], kind, folder, binary])
    if build.returncode:
        sys.exit(f"{folder.name}: the emulator does not build\n{build.stderr}")
    result = run([programs["emulated"], test, "--exact"], CANDLE_PAGED_ATTN_EMULATOR=str(binary),
                 RUST_BACKTRACE="0", TSAN_OPTIONS="halt_on_error=1")
    return result.returncode != 0, last_message(result.stdout + result.stderr)


def in_interpreter(folder, jobs):
    ptx = folder / "planted.ptx"
    build = run(["nvcc", "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-arch=compute_80", "--ptx",
                 folder / "paged_attn.cu", "-o", ptx])
    if build.returncode:
        sys.exit(f"{folder.name}: nvcc fails\n{build.stderr}")
    result = run([sys.executable, ROOT / "scripts" / "kernels_ptx.py", ptx, jobs, "_F16_64", "_F32_64", "_F16_F16"])
    return result.returncode != 0, last_message(result.stdout + result.stderr)


# Layers that are the plain emulator with another test than `small::planted_faults_have_nowhere_to_hide`.
TESTS = {"far": "edges::a24_offsets_do_not_wrap_at_32_bits_f16",
         "long": "edges::a_context_of_more_chunks_than_a_block_has_threads"}


def examine(fault, work, every, programs):
    number, what, named, edits = fault
    folder = work / f"planted_{number}"
    copy_of_kernels(folder, edits)
    layers = ["plain", "far", "long", "asan", "tsan", "ptx"] if every else (named or "plain ptx").split()
    seen = {}
    for layer in layers:
        if layer == "ptx":
            seen[layer] = in_interpreter(folder, work / "jobs")
        elif layer in TESTS:
            seen[layer] = in_emulator("plain", folder, TESTS[layer], programs)
        else:
            seen[layer] = in_emulator(layer, folder, "small::planted_faults_have_nowhere_to_hide", programs)
    shutil.rmtree(folder)
    return fault, seen


def main():
    work = Path(sys.argv[1])
    every = "--all" in sys.argv
    wanted = [a for a in sys.argv[2:] if a != "--all"]
    faults = [f for f in FAULTS if not wanted or f[0] in wanted]
    failures, programs = 0, built()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for (number, what, named, _), seen in pool.map(lambda f: examine(f, work, every, programs), faults):
            caught = [layer for layer, (hit, _) in seen.items() if hit]
            good = not caught if number == "0" else any(layer in caught for layer in named.split())
            failures += not good
            told = "; ".join(f"{layer}: {text if hit else 'nothing'}" for layer, (hit, text) in seen.items())
            print(f"{'' if good else 'NOT '}{'as it should' if number == '0' else 'caught'} {number:>3} {what:54} {told}",
                  flush=True)
    print(f"{len(faults)} faults planted, {failures} wrong")
    sys.exit(1 if failures else 0)


main()
