#!/usr/bin/env bash
# The table of docs/how/speed.md: `bench against` at three sizes, one after the other, nothing else running. About 20
# minutes on two cores. Each size leaves its JSON object and its progress here; one that fails leaves what was there.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_WAIT_POLICY=PASSIVE
# The C library keeps what it has had from the kernel: fast for every contender, and for the padded ones most.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000

measure() { # name, then options
    local log="logs/2026-11-23-against/$1"
    .venv/bin/mlperf_bert bench against --json "${@:2}" 2>&1 >"$log.json.part" | tee "$log.txt"
    mv "$log.json.part" "$log.json"
}

measure 2x128 --steps 24 --seconds 80 --set model.num_layers=2 --set model.hidden_size=128
measure 4x256 --steps 24 --seconds 180
measure 12x768 --steps 8 --seconds 480 --set model.num_layers=12 --set model.hidden_size=768 \
    --set parallel.local_batch_size=8
