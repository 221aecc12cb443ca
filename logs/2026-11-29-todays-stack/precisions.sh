#!/usr/bin/env bash
# Train encoder_cpu_tiny to its target with five seeds in three precisions: precisions.sh DATA OUT
set -euo pipefail
export OMP_NUM_THREADS=1
for seed in 1 2 3 4 5; do
    for precision in fp32 bf16_autocast bf16; do
        run=$2/$precision-$seed
        [ ! -e "$run/run_0/outcome.json" ] || continue
        python -m mlperf_bert train --config encoder_cpu_tiny --data "$1" --run-dir "$run" \
            --set run.seed=$seed --set model.precision=$precision --set run.log_interval_steps=10 \
            --set parallel.ranks_per_node=1 --set parallel.local_batch_size=32 >"$run.txt" 2>&1 || true
        tail -n 1 "$run.txt"
    done
done
