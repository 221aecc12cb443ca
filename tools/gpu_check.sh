#!/usr/bin/env bash
# Everything that needs a GPU, in one go: tests, then measurements; logs go to $OUT. Not run on one yet.
#
#   OUT=logs/<day>-gpu tools/gpu_check.sh      PYTHON: an interpreter with the dependencies [python3]
set -uo pipefail # a failing part must not keep the others from running
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
OUT=${OUT:-runs/gpu_check}
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD/benchmarks/bert/implementations/pytorch:$PWD/tests
mkdir -p "$OUT"
failed=0

part() { # log, command...
    local log=$OUT/$1
    shift
    echo "$*" | tee "$log"
    "$@" >>"$log" 2>&1 || {
        failed=1
        echo "failed; see $log" >&2
    }
}

nvidia-smi >"$OUT/machine.txt" 2>&1
part tests.txt "$PYTHON" -m pytest -p no:cacheprovider tests/gpu
part loader.txt "$PYTHON" -m mlperf_bert bench loader --dir "${TMPDIR:-/tmp}/mlperf-bert-loader"
for precision in fp32 bf16; do
    part "cost_$precision.txt" "$PYTHON" -m mlperf_bert bench cost --layers 24 --hidden 1024 \
        --precision "$precision" --device cuda --seconds 60
done
part optimizer.txt "$PYTHON" -m mlperf_bert bench optimizer --layers 24 --hidden 1024 --device cuda
exit "$failed"
