#!/usr/bin/env bash
# A CUDA 13.0 tool chain without a GPU and without root: nvcc, ptxas, headers and the libraries
# that a `--features cuda` binary links, from pinned PyPI wheels, in a folder of the user's
# cache. Compiles and links; to run anything a real driver is needed.
#
#   eval "$(scripts/cuda_toolchain.sh)"     # CUDA_HOME, PATH, CUDA_COMPUTE_CAP for this shell
#
# CUDA_PYTHON is a python with numpy, for the interpreter of scripts/kernels_ptx.py.
#
# Stdout carries the exports alone, everything else goes to stderr. A second call finds the
# finished folder and only prints.
set -euo pipefail
cd "$(dirname "$0")/.."

root="${CANDLE_PAGED_ATTN_CUDA:-${XDG_CACHE_HOME:-$HOME/.cache}/candle-paged-attn/cuda-13.0}"

# nvcc asks for nvvm and crt without a version; the newest ones write a PTX that its ptxas
# refuses, so every wheel is pinned. numpy is for scripts/kernels_ptx.py.
wheels=(
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    nvidia-cublas==13.0.2.14 nvidia-curand==10.4.0.35 nvidia-cuda-nvrtc==13.0.88
    numpy==2.3.5
)

home_of() { # the toolkit folder of a venv
    echo "$1"/lib/python3.*/site-packages/nvidia/cu13
}

install_into() {
    local venv="$1" home lib stem
    python3 -m venv "$venv" >&2
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "${wheels[@]}" >&2
    home=$(home_of "$venv")
    # The wheels lack what a linker looks for: lib64 and the names without a version.
    ln -sfn lib "$home/lib64"
    for lib in "$home"/lib/lib*.so.*; do
        stem="${lib%%.so.*}.so"
        [ -e "$stem" ] || ln -s "$(basename "$lib")" "$stem"
    done
}

# libcuda belongs to the driver. To link, an object of its name that defines the functions is
# enough; cudarc, which is the only caller, says which those are.
stub_driver() {
    local home="$1" cudarc names
    cudarc=$(cargo metadata --format-version 1 --locked --features cuda |
        python3 -c 'import json, os, sys
packages = json.load(sys.stdin)["packages"]
print(next(os.path.dirname(p["manifest_path"]) for p in packages if p["name"] == "cudarc"))')
    names=$(grep -rhoE '\bfn cu[A-Z][A-Za-z0-9_]*' "$cudarc/src/driver/sys" | sed 's/^fn //' | sort -u)
    [ -n "$names" ] || { echo "no driver functions found below $cudarc" >&2; exit 1; }
    mkdir -p "$home/lib/stubs"
    sed 's/.*/void &(void) {}/' <<<"$names" |
        gcc -shared -fPIC -fno-builtin -Wl,-soname,libcuda.so.1 -x c - -o "$home/lib/stubs/libcuda.so"
    ln -sfn libcuda.so "$home/lib/stubs/libcuda.so.1"
}

if [ "$(cat "$root/complete" 2>/dev/null)" != "${wheels[*]}" ]; then
    echo "installing the CUDA tool chain into $root (about 1 GB)" >&2
    mkdir -p "$(dirname "$root")"
    install_into "$root"
    stub_driver "$(home_of "$root")"
    echo "${wheels[*]}" >"$root/complete"
fi

home=$(home_of "$root")
cat <<EXPORTS
export CUDA_HOME="$home" CUDA_PYTHON="$root/bin/python"
export PATH="$home/bin:\$PATH"
export CUDA_COMPUTE_CAP="\${CUDA_COMPUTE_CAP:-90}"
export LIBRARY_PATH="$home/lib:$home/lib/stubs\${LIBRARY_PATH:+:\$LIBRARY_PATH}"
EXPORTS
