#!/usr/bin/env bash
# What can be known of the feature `cuda` without a GPU: that it compiles without a warning and
# links, that launches pass what the compiled kernels take, and that a missing or unsuitable
# compiler is one clear error. The kernels themselves: scripts/kernels_*. Called by .ci/run.
#
# The first run installs a tool chain (scripts/cuda_toolchain.sh) and compiles candle's own
# kernels, about ten minutes on two idle cores.
set -euo pipefail
cd "$(dirname "$0")/.."

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

toolchain=$(scripts/cuda_toolchain.sh)
eval "$toolchain"

echo "-- arguments against the parameters of the compiled kernels"
nvcc -std=c++17 -O3 --expt-relaxed-constexpr -arch=compute_80 --ptx -o "$work/paged_attn.ptx" kernels/paged_attn.cu
CANDLE_PAGED_ATTN_PTX="$work/paged_attn.ptx" cargo test --locked --test cuda_params -- --include-ignored

echo "-- build script"
rustc --edition 2024 build.rs -o "$work/build"
build() { # its messages to cargo, with only the given environment
    (cd "$work" && env -i OUT_DIR="$work" "$@" "$work/build")
}
expect_error() { # text, environment
    local errors
    errors=$(build CARGO_FEATURE_CUDA=1 "${@:2}" | grep '^cargo::error=' || true)
    if [ "$(wc -l <<<"$errors")" != 1 ] || [[ "$errors" != *"$1"* ]]; then
        echo "expected one error with \"$1\", got: $errors" >&2
        exit 1
    fi
}
if build PATH=/nowhere | grep -v '^cargo::rerun-if-changed='; then
    echo "the build script does something without the feature" >&2
    exit 1
fi
if [ ! -e /usr/local/cuda/bin/nvcc ]; then
    expect_error "nvcc not found" PATH=/nowhere CUDA_HOME=/nowhere
fi
expect_error "75 is not one of" PATH="$PATH" NVCC="$CUDA_HOME/bin/nvcc" CUDA_COMPUTE_CAP=80,75

echo "-- clippy"
# All targets here and tests below: cargo resolves both to the same features of the
# dependencies, so candle's kernels are compiled once.
cargo clippy --locked --features cuda --all-targets -- -D warnings

echo "-- a linked binary"
cargo test --locked --features cuda --no-run --test cuda_device
