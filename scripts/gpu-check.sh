#!/usr/bin/env bash
# Everything that is to be run once on a machine with a GPU (meant for an H200 with CUDA 13.0
# and no Rust), in at most 8 minutes. NOT YET RUN ON A GPU.
#
#   scripts/gpu-check.sh build [FOLDER]   without a GPU: compiles for sm_90 into FOLDER (gpu/)
#   scripts/gpu-check.sh run [FOLDER]     with a GPU: tests, compute-sanitizer, benches
#
# `build` checks that the tracked files and FOLDER are at most 50 MiB together, so that they
# can be carried there. `run` writes its logs and figures to $OUT (default: FOLDER/out), prints
# a short table last and ends non-zero if a test failed; a part that takes too long is cut off
# and the others still run.
set -euo pipefail
cd "$(dirname "$0")/.."

limit_bytes=$((50 * 1024 * 1024))

build() {
    local folder="$1" toolchain binary size
    toolchain=$(scripts/cuda_toolchain.sh)
    eval "$toolchain"
    export CUDA_COMPUTE_CAP=90
    binary=$(cargo test --locked --features cuda --no-run --test cuda_device --message-format=json-render-diagnostics |
        python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("target", {}).get("name") == "cuda_device" and message.get("executable"):
        print(message["executable"])')
    mkdir -p "$folder"
    strip -o "$folder/cuda_device" "$binary"
    # 60 MB of kernels, as PTX and machine code, that compress to 7.
    xz --force --threads=2 -6 "$folder/cuda_device"
    size=$(($(git ls-files -z | xargs -0 cat | wc -c) + $(cat "$folder"/cuda_device.xz | wc -c)))
    echo "repository and binary: $((size / 1024 / 1024)) MiB"
    if [ "$size" -gt "$limit_bytes" ]; then
        echo "more than 50 MiB" >&2
        exit 1
    fi
}

# run_part NAME SECONDS COMMAND...: logs to $OUT/NAME.log; remembers what failed.
failed=()
run_part() {
    local name="$1" seconds="$2" status=0
    shift 2
    echo "-- $name (at most ${seconds} s)"
    timeout "$seconds" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    tail -n 3 "$OUT/$name.log"
    if [ "$status" -ne 0 ]; then
        failed+=("$name: exit $status")
    fi
}

run() {
    local folder="$1" binary libraries
    export OUT="${OUT:-$folder/out}"
    mkdir -p "$OUT"
    binary="$(mktemp -d)/cuda_device"
    xz --decompress --stdout "$folder/cuda_device.xz" >"$binary"
    chmod +x "$binary"
    # The toolkit's libraries, else those that came with torch.
    libraries=$(python3 -c 'import glob, sys
print(":".join(sorted({f for p in sys.path for f in glob.glob(p + "/nvidia/*/lib")})))')
    export LD_LIBRARY_PATH="/usr/local/cuda/lib64:$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export CANDLE_PAGED_ATTN_TEST_DEVICE=cuda CANDLE_PAGED_ATTN_FIGURES="$OUT/figures.json"

    nvidia-smi | tee "$OUT/nvidia-smi.log" | head -n 15
    run_part golden 60 "$binary" golden::
    run_part greedy 60 "$binary" --ignored --test-threads=1 greedy::
    # One test at a time: they share the one stream of the device.
    run_part ops 120 "$binary" --test-threads=1 --skip greedy:: --skip bench::
    run_part sanitizer 90 compute-sanitizer --error-exitcode 9 "$binary" --test-threads=1 golden::
    run_part bench 100 "$binary" --ignored --nocapture bench::
    run_part peer 45 python3 scripts/gpu_peer.py "$OUT/peer.json"

    python3 scripts/gpu_table.py "$OUT" | tee "$OUT/table.txt"
    if [ "${#failed[@]}" -gt 0 ]; then
        printf 'FAILED %s\n' "${failed[@]}" | tee "$OUT/failed.txt"
        exit 1
    fi
}

case "${1:-}" in
build) build "${2:-gpu}" ;;
run) run "$(realpath "${2:-gpu}")" ;;
*)
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
