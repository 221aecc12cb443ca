#!/usr/bin/env bash
# Rehearse the middle rank of every shipped config, and print the first line, the last line and the status of each.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
for file in benchmarks/bert/implementations/pytorch/mlperf_bert/configs/*.toml; do
    config=$(basename "$file" .toml)
    ranks=$(.venv/bin/mlperf_bert config get "$config" parallel.world_size)
    said=$(.venv/bin/mlperf_bert train --config "$config" --rehearse $(((ranks - 1) / 2)) 2>&1)
    echo "$config, status $?: $(tail -n 1 <<<"$said")"
done
