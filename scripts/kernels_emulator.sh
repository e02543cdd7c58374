#!/usr/bin/env bash
# Builds the emulator of the CUDA kernels: kernels_emulator.sh fast|asan|tsan OUTPUT [KERNELS_FOLDER]
# CUDA_INCLUDE names the toolkit's headers; nothing else of CUDA is needed.
set -euo pipefail

kind="$1" output="$2" folder="${3:-$(cd "$(dirname "$0")/.." && pwd)/kernels}/emulator"
# No memcpy made of loops: the run time must not call what a sanitizer intercepts.
flags=(-std=c++17 -fno-strict-aliasing -g1 -fno-tree-loop-distribute-patterns -isystem "$CUDA_INCLUDE")
case "$kind" in
fast) runtime=() program=(-O2) ;;
asan) runtime=(-DEMU_ASAN) program=(-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer) ;;
tsan) runtime=(-DEMU_TSAN) program=(-O1 -fsanitize=thread) ;;
*) echo "kernels_emulator.sh fast|asan|tsan OUTPUT" >&2; exit 2 ;;
esac
mkdir -p "$(dirname "$output")"
# The run time itself is never instrumented: it switches stacks.
g++ "${flags[@]}" -O2 "${runtime[@]}" -c "$folder/runtime.cpp" -o "$output.runtime.o"
g++ "${flags[@]}" "${program[@]}" "$folder/main.cpp" "$output.runtime.o" -o "$output"
