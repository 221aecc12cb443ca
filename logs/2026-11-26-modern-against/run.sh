#!/usr/bin/env bash
# ModernBERT's table of docs/how/speed.md: `bench against --architecture modern` at three sizes and two lengths, one after
# the other, nothing else running. About 20 minutes on two cores. What is here already is not measured again.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_WAIT_POLICY=PASSIVE
# The C library keeps what it has had from the kernel: fast for every contender, and for the padded ones most.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000

measure() { # layers, hidden size, length, batch, then options
    local log="logs/2026-11-26-modern-against/$1x$2-$3"
    [ ! -e "$log.json" ] || return 0
    .venv/bin/mlperf_bert bench against --architecture modern --json --set "model.num_layers=$1" --set "model.hidden_size=$2" \
        --set "data.max_seq_length=$3" --set "parallel.local_batch_size=$4" "${@:5}" 2>&1 >"$log.json.part" | tee "$log.txt"
    mv "$log.json.part" "$log.json"
}

measure 2 128 512 16 --steps 24 --seconds 60
measure 2 128 2048 8 --steps 24 --seconds 90
measure 4 256 512 16 --steps 24 --seconds 120
measure 4 256 2048 4 --steps 12 --seconds 150
measure 12 768 512 4 --steps 8 --seconds 180
measure 12 768 2048 2 --steps 8 --seconds 240
