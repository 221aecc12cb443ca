#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under ten minutes: tests, measurements, ablations, profiles, and a summary.
#
#   OUT=logs/<day>-gpu tools/gpu_check.sh    on a machine with a GPU [logs/gpu_check]
#   tools/gpu_check.sh --dry-run             every form of part at tiny size on the CPU; or DRY_RUN=1
#   tools/gpu_check.sh --list                name and command of every part, none of which runs
#
# PYTHON: an interpreter with the dependencies [python3]. LIMIT_S: seconds for all parts together [570]: the most
# important come first, each has a limit of its own, and none begins when the time is over. ONLY: a regular expression
# of the names of parts, for a second run of some of them.
set -uo pipefail # a failing part must not keep the others from running
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
OUT=${OUT:-logs/gpu_check}
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-570}
ONLY=${ONLY:-}
MODE=run
if [[ ${1:-} == --dry-run || ${DRY_RUN:-0} == 1 ]]; then MODE=dry; fi
if [[ ${1:-} == --list ]]; then MODE=list; fi
if [[ ${1:-} != "" && $MODE == run ]]; then
    echo "tools/gpu_check.sh: unknown argument $1; see the top of the file" >&2
    exit 2
fi
export PYTHONPATH=$PWD/benchmarks/bert/implementations/pytorch:$PWD/tests

# Device and sizes: here and nowhere else.
CONFIG=benchmarks/bert/implementations/pytorch/configs/h200_1x1x448x1.toml
if [[ $MODE == dry ]]; then
    DEVICE=cpu
    BATCH=4 LARGE_BATCH=8 MAX_BATCH=2 SWEEP_BATCH=16 PEER_BATCH=2
    SIZE=(--set model.num_layers=1 --set model.hidden_size=32 --set model.num_heads=2 --set model.intermediate_size=64
        --set model.vocab_size=128 --set model.max_position_embeddings=64 --set data.max_seq_length=64
        --set mlperf.enforce_rules=false)
    PEER_SIZE=(--layers 1 --hidden 32 --heads 2 --vocab 128 --max-length 32 --steps 1)
    SHORT=(--steps 3 --seconds 0.1 --threads 1)
    PAIRS=(--pairs 1 --steps 2 --threads 1)
    TEST_PROCESSES=0
    PEAK=(--peak-seconds 0.02)
    EVAL=(--samples 32 --rounds 1)
    LOADER=(--megabytes 1 --rounds 1 --seconds 0.05 --batches 4)
    COST=(--layers 1 --hidden 64 --vocab 128 --max-length 64 --tokens 2048 --seconds 0.5 --threads 1)
    OPTIMIZER=(--layers 1 --hidden 64 --vocab 128 --steps 1 --threads 1)
    SQUAD=(--layers 1 --hidden 32 --heads 2 --updates 3 --max-length 64 --stride 32)
    BURN_IN=2s
else
    DEVICE=cuda
    BATCH=112 LARGE_BATCH=448 MAX_BATCH=1024 SWEEP_BATCH=112 PEER_BATCH=48
    SIZE=()
    PEER_SIZE=(--layers 24 --hidden 1024 --steps 8 --seconds 10)
    SHORT=(--steps 20 --seconds 2)
    PAIRS=(--pairs 3 --steps 40)
    TEST_PROCESSES=6 # most of the time is compilation
    PEAK=(--peak-seconds 3)
    EVAL=(--samples 10000 --rounds 3)
    LOADER=(--dir "${TMPDIR:-/tmp}/mlperf-bert-loader" --rounds 2)
    COST=(--layers 24 --hidden 1024 --precision bf16 --seconds 20)
    OPTIMIZER=(--layers 24 --hidden 1024 --seconds 10)
    SQUAD=(--layers 12 --hidden 768 --heads 12 --updates 100 --global-batch 64 --precision bf16)
    BURN_IN=40s
fi
OURS=(--config "$CONFIG" "${SIZE[@]}" --device "$DEVICE")
AT_BATCH=(--set "parallel.local_batch_size=$BATCH")

# What is switched in the step of train_bf16, one at a time.
ABLATIONS=(
    "eager run.step_mode=eager"
    "kernels_reference model.kernels=reference"
    "attention_flash model.attention=flash"
    "attention_cudnn model.attention=cudnn"
    "attention_triton model.attention=triton"
    "attention_grouped model.attention=grouped run.step_mode=eager"
    "head_chunked model.head=chunked"
    "bf16_autocast model.precision=bf16_autocast"
    "dropout_0 model.hidden_dropout=0.0 model.attention_dropout=0.0 mlperf.enforce_rules=false"
    "adamw optim.name=adamw mlperf.enforce_rules=false"
    "fp32 model.precision=fp32 run.step_mode=eager"
)
if [[ $MODE == dry ]]; then ABLATIONS=("${ABLATIONS[@]:0:1}"); fi

failed=0

part() { # file, seconds at most, command...: what it prints goes to the file, progress and errors beside it, to *.log
    local file=$1 limit=$2 name=${1%.*} status left start=$SECONDS
    shift 2
    if [[ ! $name =~ $ONLY ]]; then return; fi
    if [[ $MODE == list ]]; then
        printf '%s\t%s\n' "$file" "$*"
        return
    fi
    left=$((LIMIT_S - SECONDS))
    if ((left < 5)); then
        printf '%s\tskipped\t0\t%s\n' "$name" "$*" >>"$OUT/parts.tsv"
        return
    fi
    if ((limit > left)); then limit=$left; fi
    echo "$name: at most $limit s" >&2
    timeout --kill-after=5 "$limit" "$@" >"$OUT/$file" 2>"$OUT/$name.log"
    status=$?
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - start))" "$*" >>"$OUT/parts.tsv"
    case $status in
    0) ;;
    2) echo "$name: cannot run here: $(tail -n 1 "$OUT/$name.log")" >&2 ;; # a setting that this machine refuses
    *)
        failed=1
        echo "$name: failed with status $status; see $OUT/$name.log" >&2
        ;;
    esac
}

bench() { # name, seconds at most, arguments of `mlperf_bert bench`
    part "$1.json" "$2" "$PYTHON" -m mlperf_bert bench "${@:3}" --json
}

ablate() { # lines of ABLATIONS
    local line name settings setting switches
    for line in "$@"; do
        read -r name settings <<<"$line"
        switches=()
        for setting in $settings; do switches+=(--set "$setting"); done
        bench "ablation_$name" 45 train "${OURS[@]}" "${AT_BATCH[@]}" "${switches[@]}" --peak-seconds 0.2 "${SHORT[@]}"
    done
}

if [[ $MODE != list ]]; then
    mkdir -p "$OUT"
    if [[ -z $ONLY ]]; then rm -rf "$OUT"/parts.tsv "$OUT"/*.json "$OUT/squad"; fi
    {
        echo "command: OUT=$OUT tools/gpu_check.sh ${1:-}"
        echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)"
        echo "changed since: $(git status --porcelain --untracked-files=no 2>/dev/null | wc -l) files"
        date -u '+date: %Y-%m-%d %H:%M UTC'
        nvidia-smi 2>&1
    } >"$OUT/machine.txt"
fi

bench train_bf16 120 train "${OURS[@]}" "${AT_BATCH[@]}" "${PEAK[@]}" "${SHORT[@]}"
bench train_fp8 60 train "${OURS[@]}" "${AT_BATCH[@]}" --set model.precision=fp8 "${PEAK[@]}" "${SHORT[@]}"
part tests.txt 200 "$PYTHON" -m pytest -q -p no:cacheprovider -n "$TEST_PROCESSES" tests/gpu
bench against_bf16 170 against "${PEER_SIZE[@]}" --batch "$PEER_BATCH" --precision bf16 --device "$DEVICE"
bench eval_bf16 45 eval "${OURS[@]}" "${AT_BATCH[@]}" "${EVAL[@]}" "${SHORT[@]}"
bench profile_bf16 45 profile "${OURS[@]}" "${AT_BATCH[@]}" --plot "$OUT/profile_bf16.png"
bench checkpoints 90 checkpoints "${OURS[@]}" "${AT_BATCH[@]}" "${PAIRS[@]}"
part doctor.json 40 "$PYTHON" -m mlperf_bert doctor --only gpus,machine,disk,limits,caches,network --json
part burn_in.json 90 "$PYTHON" -m mlperf_bert doctor --burn-in "$BURN_IN" --device "$DEVICE" --json
for mode in captured eager; do
    bench "train_batch_4_$mode" 30 train "${OURS[@]}" --set parallel.local_batch_size=4 --set "run.step_mode=$mode" \
        --peak-seconds 0.2 "${SHORT[@]}"
done
ablate "${ABLATIONS[@]:0:6}"
bench profile_fp8 45 profile "${OURS[@]}" "${AT_BATCH[@]}" --set model.precision=fp8 --plot "$OUT/profile_fp8.png"
bench "train_batch_$LARGE_BATCH" 45 train "${OURS[@]}" --set "parallel.local_batch_size=$LARGE_BATCH" --peak-seconds 0.2 \
    "${SHORT[@]}"
bench scale 120 scale "${OURS[@]}" --max-batch "$MAX_BATCH" --total-seconds 90 --plot "$OUT/scale.png" "${SHORT[@]}"
bench sweep 90 scale "${OURS[@]}" --sweep "$SWEEP_BATCH" --total-seconds 60 --plot "$OUT/sweep.png" "${SHORT[@]}"
ablate "${ABLATIONS[@]:6}"
bench optimizer 60 optimizer "${OPTIMIZER[@]}" --device "$DEVICE"
bench cost 45 cost "${COST[@]}" --device "$DEVICE"
bench loader 60 loader "${LOADER[@]}"
part squad.json 60 "$PYTHON" -m mlperf_bert squad compare --engines single --seeds 1 "${SQUAD[@]}" --device "$DEVICE" \
    --out "$OUT/squad" --json

if [[ $MODE != list ]]; then
    "$PYTHON" tools/summarise_gpu.py "$OUT" >"$OUT/summary.md" || failed=1
    echo "$OUT/summary.md" >&2
fi
exit "$failed"
