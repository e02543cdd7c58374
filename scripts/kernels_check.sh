#!/usr/bin/env bash
# Proves the CUDA kernels without a GPU: kernels_check.sh [compile] [emulate] [ptx] [planted]
# (all four if none is named). Needs python3 with pip, g++ and cargo; the compiler is that of
# scripts/cuda_toolchain.sh.
#
#   compile  every kernel for sm_80, 90, 100 and 120: a table of registers; a spill fails
#   emulate  the same sources on the CPU (kernels/emulator), driven by src/ops/launch.rs, against the
#            f64 reference and the CPU ops: plain, under AddressSanitizer and UBSan, small shapes
#            under ThreadSanitizer
#   ptx      the PTX that nvcc emitted, in an interpreter, on the small shapes
#   planted  faults planted in the kernels, and which layer catches each
set -euo pipefail
cd "$(dirname "$0")/.."

work="${XDG_CACHE_HOME:-$HOME/.cache}/candle-paged-attn/kernels"
steps=" ${*:-compile emulate ptx planted} "
step() { printf '\n== kernels: %s (%ss)\n' "$*" "$SECONDS"; }
wanted() { [[ "$steps" == *" $1 "* ]]; }

toolchain=$(scripts/cuda_toolchain.sh)
eval "$toolchain"
export RUST_BACKTRACE=0
emulator() { cargo test --locked -p paged-attn-emulator --test emulated "$@"; }

if wanted compile; then
    step "compile for sm_80, 90, 100, 120"
    "$CUDA_PYTHON" scripts/kernels_compile.py "$work"
elif wanted ptx; then
    "$CUDA_PYTHON" scripts/kernels_compile.py "$work" ptx
fi
if wanted emulate; then
    step "the emulator: format and clippy"
    cargo fmt -p paged-attn-emulator --check
    cargo clippy --locked -p paged-attn-emulator --all-targets -- -D warnings
    step "emulator"
    emulator
    step "emulator under AddressSanitizer and UBSan"
    emulator --features asan
    step "emulator under ThreadSanitizer, small shapes"
    emulator --features tsan -- --exact small::every_kernel_once
fi
if wanted ptx || wanted planted; then
    step "jobs for the interpreter"
    rm -rf "$work/jobs"
    mkdir -p "$work/jobs"
    CANDLE_PAGED_ATTN_JOBS="$work/jobs" emulator -- --exact small::every_kernel_once
fi
if wanted ptx; then
    step "PTX interpreter"
    "$CUDA_PYTHON" scripts/kernels_ptx.py "$work/paged_attn.ptx" "$work/jobs"
fi
if wanted planted; then
    step "planted faults"
    "$CUDA_PYTHON" scripts/kernels_planted.py "$work"
fi
step "done"
