#!/usr/bin/env bash
# Proves the CUDA kernels without a GPU: kernels_check.sh [compile] [emulate] [ptx] [planted]
# (all four if none is named). Needs python3 with pip, g++ and cargo; fetches a pinned compiler
# (about 105 MB) into the cache folder, or takes the one of CUDA_HOME.
#
#   compile  every kernel for sm_80, 90, 100 and 120: a table of registers; a spill fails
#   emulate  the same sources on the CPU, driven by src/ops/launch.rs, against the f64 reference and
#            the CPU ops: plain, under AddressSanitizer and UBSan, small shapes under ThreadSanitizer
#   ptx      the PTX that nvcc emitted, in an interpreter, on the small shapes
#   planted  faults planted in the kernels, and which layer catches each
set -euo pipefail
cd "$(dirname "$0")/.."

cache="${XDG_CACHE_HOME:-$HOME/.cache}/candle-paged-attn"
work="$cache/kernels"
venv="$cache/kernels-venv"
steps=" ${*:-compile emulate ptx planted} "
step() { printf '\n== kernels: %s (%ss)\n' "$*" "$SECONDS"; }
wanted() { [[ "$steps" == *" $1 "* ]]; }

if [ ! -e "$venv/complete" ]; then
    step "compiler and numpy into $venv"
    rm -rf "$venv"
    python3 -m venv "$venv"
    # nvcc asks for nvvm and crt without a version, and fails with others than its own.
    "$venv/bin/pip" install --quiet --disable-pip-version-check numpy \
        nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
        nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    touch "$venv/complete"
fi
if [ -z "${CUDA_HOME:-}" ]; then
    CUDA_HOME=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)
fi
export CUDA_INCLUDE="$CUDA_HOME/include" NVCC="${NVCC:-$CUDA_HOME/bin/nvcc}"
python="$venv/bin/python"
mkdir -p "$work/jobs"

if wanted compile; then
    step "compile for sm_80, 90, 100, 120"
    "$python" scripts/kernels_compile.py "$NVCC" "$work"
elif wanted ptx; then
    "$NVCC" -std=c++17 -O3 --expt-relaxed-constexpr -arch=compute_80 --ptx kernels/paged_attn.cu -o "$work/paged_attn.ptx"
fi

step "emulator and tests: build"
for kind in fast asan tsan; do
    if [ "$kind" = fast ] || wanted emulate; then
        scripts/kernels_emulator.sh "$kind" "$work/emulator_$kind"
    fi
done
EMULATED_TESTS=$(cargo test --locked --test cuda_emulated --no-run --message-format json |
    "$python" -c 'import json, sys
found = [m for m in map(json.loads, sys.stdin) if m.get("executable") and m["target"]["name"] == "cuda_emulated"]
print(found[-1]["executable"])')
export EMULATED_TESTS RUST_BACKTRACE=0
in_emulator() { CANDLE_PAGED_ATTN_EMULATOR="$work/emulator_$1" "$EMULATED_TESTS" "${@:2}"; }

if wanted emulate; then
    step "emulator"
    in_emulator fast
    step "emulator under AddressSanitizer and UBSan"
    in_emulator asan
    step "emulator under ThreadSanitizer, small shapes"
    in_emulator tsan small::every_kernel_once
fi
if wanted ptx || wanted planted; then
    step "jobs for the interpreter"
    rm -f "$work"/jobs/*.job
    CANDLE_PAGED_ATTN_JOBS="$work/jobs" in_emulator fast small::every_kernel_once
fi
if wanted ptx; then
    step "PTX interpreter"
    "$python" scripts/kernels_ptx.py "$work/paged_attn.ptx" "$work/jobs"
fi
if wanted planted; then
    step "planted faults"
    "$python" scripts/kernels_planted.py "$work"
fi
step "done"
