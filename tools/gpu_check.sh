#!/usr/bin/env bash
# Run the measurements, tests and trainings that need a GPU, and write a summary. The four stages take at most 5, 9, 7
# and 7 minutes.
#
#   tools/gpu_check.sh 1                   runs stage 1, 2, 3 or 4 on a machine with a GPU
#   tools/gpu_check.sh --dry-run [STAGE]   runs each kind of part at tiny size on the CPU, without torch.compile
#   tools/gpu_check.sh --list [STAGE]      prints stage, file, time limit in seconds and command of each part
#
# Stages 1 and 2 together fit into 15 minutes with the start of a machine, and so do stages 3 and 4. On a machine that is
# taken back when it is idle, start the second stage right after the first one with another OUT, and read both summaries
# afterwards. If the machine has to be started again for the second stage, lower STAGE_S. The script updates
# OUT/summary.md and OUT/gpu_check.tar.gz, which has the output of all parts, after every part. If it is killed, only the
# current part is lost. A part that fails, hangs or runs out of memory does not affect the others. At the end of a
# stage's time, the script stops the current part and does not start the later ones.
#
#   OUT      the directory for the output [logs/gpu_check]
#   PYTHON   an interpreter with torch, numpy, h5py and numba. docs/concepts/speed.md says which parts need more. [python3]
#   CACHE    the directory for compiled kernels, which later stages reuse [in the user's cache directory]
#   WHEELS   a directory with wheels of packages that PYTHON does not have. The trainings of stage 2 need mlperf-logging,
#            and `doctor` in stage 4 also looks for google-crc32c. Get them with `pip download --no-deps`.
#   COMMIT   the commit to report if the repository has no git
#   STAGE_S  the most seconds that a stage may take, for a shorter stay on a machine [280, 520, 420 and 380]
#   ONLY     a regular expression for the names of the parts to run
set -uo pipefail # A failing part must not stop the others.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
OUT=${OUT:-logs/gpu_check} ONLY=${ONLY:-} MODE=run
LONGEST_S=(0 280 520 420 380) # by stage. The limits of a stage's parts add up to more, because most parts end early.
CACHE=${CACHE:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/mlperf_bert-gpu-check}
export PYTHON=${PYTHON:-python3}
case ${1:-} in
-h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' tools/gpu_check.sh && exit ;;
--dry-run | --list) MODE=${1#--} && shift ;;
esac
case $MODE:$*: in
*:[1234]:) stages=("$1") ;;
dry-run:: | list::) stages=(1 2 3 4) ;;
*) echo "tools/gpu_check.sh: error: STAGE: missing or unknown; use 1, 2, 3 or 4 (see --help)" >&2 && exit 2 ;;
esac

# All devices and sizes are set here. Everything should fit into 80 GB of GPU memory.
CONFIG=benchmarks/bert/implementations/pytorch/mlperf_bert/configs/h200_1x1x448x1.toml
MODERN=${CONFIG%/*}/modern_base_h100_1x1x96x48.toml
if [[ $MODE == dry-run ]]; then
    DEVICE=cpu BATCH=4 LARGE_BATCH=6 MODERN_BATCH=4 BASELINE_BATCH=2 PATIENCE=4
    SIZE=(--set model.num_layers=1 --set model.hidden_size=32 --set model.num_heads=2 --set model.intermediate_size=64
        --set model.vocab_size=128 --set model.max_position_embeddings=64 --set data.max_seq_length=64
        --set mlperf.enforce_rules=false)
    BASELINE=("${SIZE[@]}" --steps 1 --no-compile)
    SHORT=(--steps 3 --seconds 0.1 --threads 1) PEAK_S=0.02 LONG_PEAK_S=0.02
    OPTIMIZER=("${SIZE[@]}" --steps 1 --threads 1)
    SQUAD=(--layers 1 --hidden 32 --heads 2 --updates 3 --max-length 64 --stride 32)
    TEXT=(run.max_steps=4 run.log_interval_steps=2 parallel.local_batch_size=8)
    WHOLE=(run.max_steps=40 run.log_interval_steps=5 eval.target_accuracy=none checkpoint.interval_steps=5)
    ATTENTIONS=(grouped) # because triton and flash need a GPU
else
    memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
    LARGE_BATCH=256 # as in the shipped config for one H100, which has less memory than an H200
    if ((${memory:-0} > 130000)); then LARGE_BATCH=448; fi
    DEVICE=cuda BATCH=112 MODERN_BATCH=96 BASELINE_BATCH=24 PATIENCE=1
    SIZE=()
    BASELINE=(--steps 8 --seconds 10 --by-layer) # Two full compilations may take minutes.
    SHORT=(--steps 20 --seconds 2) PEAK_S=0.2 LONG_PEAK_S=3 # long enough for the GPU's clocks to fall
    OPTIMIZER=(--seconds 3)
    SQUAD=(--layers 12 --hidden 768 --heads 12 --updates 100 --global-batch 64 --precision bf16)
    TEXT=(run.max_steps=300 run.log_interval_steps=10 parallel.local_batch_size=128
        model.{num_layers=24,hidden_size=1024,num_heads=16,intermediate_size=4096,initializer_range=0.02}
        optim.learning_rate=1e-4 schedule.warmup_steps=50 schedule.decay_steps=300 schedule.end_learning_rate=0)
    WHOLE=(parallel.local_batch_size=32 checkpoint.interval_steps=100)
    ATTENTIONS=(triton flash)
fi
TINY_RUN=(parallel.ranks_per_node=1 run.step_mode=captured "run.device=$DEVICE") # for the shipped configs of tiny models
OURS=(--config "$CONFIG" "${SIZE[@]}" --set "run.device=$DEVICE" --set "parallel.local_batch_size=$BATCH")
FIRST_TESTS=(tests/gpu/test_gpu_{attention,graphs,fp8}.py)
KERNEL="tests/gpu/test_gpu_attention.py::test_kernels_are_reference[triton-64]"
GRAPHS=tests/gpu/test_gpu_graphs.py::test_captured_is_eager_over_100_steps
WINDOWS=tests/gpu/test_gpu_attention.py::test_triton_rotates_and_hides
LAST_TEST=tests/gpu/test_gpu_bench.py::test_other_side_runs_in_every_form # It is slow, because it compiles two forms.
export APART="$KERNEL $GRAPHS $WINDOWS $LAST_TEST" # They run in other processes than the rest of their files.

# Run one part. Its stdout goes to the file, and its stderr to a .log file next to it.
part() { # file, time limit in seconds, command...
    local file=$1 limit=$2 name=${1%.*} start=$SECONDS left=$((end_s - SECONDS)) status=0
    shift 2
    if [[ ! $name =~ $ONLY ]]; then return; fi
    if [[ $MODE == list ]]; then
        printf '%s\t%s\t%s\t%s\n' "$stage" "$file" "$limit" "$*"
        return
    fi
    limit=$((PATIENCE * limit < left ? PATIENCE * limit : left))
    if ((limit < 5)); then
        echo "not started" >"$RESULTS/$name.log" && status=124 # as of `timeout`
    else
        echo "running $name, limit $limit s" >&2
        timeout --kill-after=2 "$((limit - 2))" "$@" >"$RESULTS/$file" 2>"$RESULTS/$name.log" &
        child=$!
        wait "$child" || status=$? # In the foreground, it would delay signals to this script.
        kill -KILL -- "-$child" 2>/dev/null # Some processes may be left if the part timed out.
    fi
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - start))" "$left" >>"$RESULTS/parts.tsv"
    summarise
}

bench() { # name, time limit in seconds, arguments of `mlperf_bert bench`
    part "$1.json" "$2" "$PYTHON" -m mlperf_bert bench "${@:3}" --json
}

train() { # name, time limit in seconds, settings...
    local setting switches=()
    for setting in "${@:3}"; do switches+=(--set "$setting"); done
    bench "$1" "$2" train "${OURS[@]}" "${switches[@]}" --peak-seconds "$PEAK_S" "${SHORT[@]}"
}

# shellcheck disable=SC2329 # for bash -c
# Run each target in its own process, all at once, because compiling takes most of the time.
tests() { # targets of pytest...
    local target name each processes=() status=0
    for target in "$@"; do
        name=${target##*/} name=${name/.py/}
        set -- -v -rfE --tb=short -o addopts= -p no:cacheprovider "$target" # The options in pyproject.toml need plug-ins.
        for each in $APART; do [[ $target == "$each"* ]] || set -- "$@" --deselect "$each"; done
        OMP_NUM_THREADS=2 "$PYTHON" -m pytest "$@" >"$RESULTS/${name/::/.}.txt" 2>&1 &
        processes+=("$!")
    done
    for process in "${processes[@]}"; do wait "$process" || status=1; done
    return "$status"
}
export -f tests

# shellcheck disable=SC2329 # for bash -c
text() { # Prepare the embedded corpus, unless that is already done.
    export DATADIR=$WORK/text
    flock "$WORK" "$PYTHON" -m mlperf_bert prepare --embedded --config cpu_tiny --out "$DATADIR" >&2
}

# shellcheck disable=SC2329 # for bash -c
# Train encoder_cpu_tiny, a BERT, on the text for some steps.
learn() { # name, settings...
    local out=$RESULTS/$1
    shift
    text && "$PYTHON" -m mlperf_bert train --config encoder_cpu_tiny --data "$DATADIR" --run-dir "$out" "${@/#/--set=}"
}

# shellcheck disable=SC2329 # for bash -c
# Make a complete run, and keep its small files.
whole_run() { # name, arguments of run_and_time.sh...
    local status=0
    LOGDIR=$WORK/$1 ./run_and_time.sh "${@:2}" >&2 || status=$?
    mkdir -p "$RESULTS/$1"
    cp "$WORK/$1"/{result_0.txt,run_0/{metrics.jsonl,stdout.log,outcome.json,environment.json,config.toml}} "$RESULTS/$1"
    return "$status"
}

# shellcheck disable=SC2329 # for bash -c
# Make a complete run, then stop and resume the same run, and print both outcomes.
whole_runs() { # settings of cpu_tiny...
    set -- -- "${@/#/--set=}"
    export CLEAR_CACHES=0 SEED=1
    text && whole_run whole "$@" || return
    LOGDIR=$WORK/resumed ./run_and_time.sh "$@" >&2 &
    until compgen -G "$WORK/resumed/run_0/checkpoints/step_*" >/dev/null || ! kill -0 $!; do sleep 0.05; done
    kill -TERM $!
    wait $!
    [[ $? == 75 ]] || return 1 # It ended before the signal stopped it.
    RESUME=auto whole_run resumed "$@" || return
    "$PYTHON" -m mlperf_bert report page "$WORK/whole" "$WORK/resumed" --out "$RESULTS/whole_runs.html" >&2
    printf '{"whole": %s, "resumed": %s}\n' "$(<"$RESULTS/whole/outcome.json")" "$(<"$RESULTS/resumed/outcome.json")"
}
export -f text learn whole_run whole_runs

run_stage() { # The most important parts come first.
    local each others=() end_s=$((PATIENCE * ${STAGE_S:-${LONGEST_S[stage]}}))
    case $stage in
    1)
        PEAK_S=$LONG_PEAK_S train train_bf16 90 # It waits for a cold disk and compiles most kernels.
        part tests_probe.txt 40 bash -c 'tests "$@"' tests "$KERNEL" "${GRAPHS}[bf16]" # Are the numbers right at all?
        PEAK_S=$LONG_PEAK_S train train_fp8 60 model.precision=fp8
        train train_batch_4_captured 30 parallel.local_batch_size=4
        train train_batch_4_eager 30 parallel.local_batch_size=4 run.step_mode=eager
        part tests_first.txt 100 bash -c 'tests "$@"' tests "${FIRST_TESTS[@]}" \
            "${GRAPHS}["optim.name={lamb,muon}"]" \
            "${GRAPHS}["model.{precision=fp8,attention=flash,kernels=reference,objective=mlm,architecture=modern{0,1}}"]"
        for each in bf16 fp8; do
            bench "profile_$each" 40 train "${OURS[@]}" --set "model.precision=$each" --peak-seconds "$PEAK_S" \
                "${SHORT[@]}" --profile --out "$RESULTS/profile_$each.json.gz"
        done
        ;;
    2)
        # Preparing the text needs no GPU, so that happens while the first parts run.
        if [[ $MODE != list ]]; then timeout 120 bash -c text &>"$RESULTS/prepare.log" & fi
        for each in bf16 fp8; do
            train "train_large_$each" 45 "parallel.local_batch_size=$LARGE_BATCH" "model.precision=$each"
        done
        bench modern_bf16 45 train --config "$MODERN" "${SIZE[@]}" --set "run.device=$DEVICE" \
            --set "parallel.local_batch_size=$MODERN_BATCH" --set parallel.grad_accum_steps=1 \
            --peak-seconds "$PEAK_S" "${SHORT[@]}"
        part whole_runs.json 110 bash -c 'whole_runs "$@"' whole_runs "${TINY_RUN[@]}" model.precision=bf16 "${WHOLE[@]}"
        for each in tests/gpu/test_*.py; do [[ " ${FIRST_TESTS[*]} " == *" $each "* ]] || others+=("$each"); done
        TEST_LIMIT_S=110 part tests_others.txt 130 bash -c 'tests "$@"' tests "${others[@]}" "${WINDOWS}["{0.0,0.3}-{16,64,128}"]"
        for each in bf16 fp8; do
            part "text_$each.txt" 75 bash -c 'learn "$@"' learn "text_$each" "${TINY_RUN[@]}" run.seed=1 "${TEXT[@]}" \
                "model.precision=$each" eval.target_accuracy=none checkpoint.interval_steps=never
        done
        # Last, because it can use all the time that is left.
        bench transformers_bf16 170 transformers --config "$CONFIG" "${BASELINE[@]}" --set "run.device=$DEVICE" \
            --set "parallel.local_batch_size=$BASELINE_BATCH"
        ;;
    3)
        for each in "${ATTENTIONS[@]}"; do train "train_attention_$each" 40 "model.attention=$each"; done
        train ablation_none 40 # train_bf16 again, as the baseline for the changes of one setting each
        train ablation_eager 40 run.step_mode=eager
        train ablation_kernels_reference 40 model.kernels=reference
        train ablation_dropout_0 40 model.{hidden,attention}_dropout=0.0 mlperf.enforce_rules=false
        train ablation_bf16_autocast 40 model.precision=bf16_autocast
        # fp32 only has "grouped" attention, which reads lengths on the host and so cannot be captured. A batch of 112
        # sequences needs more than 80 GB.
        train ablation_fp32 40 model.precision=fp32 run.step_mode=eager "parallel.local_batch_size=$((BATCH * 3 / 7))"
        bench optimizer 45 optimizer --config "$CONFIG" "${OPTIMIZER[@]}" --set "run.device=$DEVICE"
        TEST_LIMIT_S=140 part tests_compiled.txt 150 bash -c 'tests "$@"' tests "$LAST_TEST"
        ;;
    4)
        each=(squad compare --engines single --seeds 1 "${SQUAD[@]}" --device "$DEVICE" --out "$WORK/squad")
        part squad.json 120 "$PYTHON" -m mlperf_bert "${each[@]}" --json
        part doctor.txt 25 "$PYTHON" -m mlperf_bert doctor
        ;;
    esac
}

summarise() { # Replace summary and archive atomically. The status says whether a part failed.
    local status
    find "$RESULTS" -size +1M ! -name "*.gz" -exec sh -c 'tail -c 500000 "$1" >"$1.end" && mv "$1.end" "$1"' sh {} \;
    "$PYTHON" tools/summarise_gpu.py "$RESULTS" >"$RESULTS/summary.md"
    status=$?
    [[ -s $RESULTS/summary.md ]] && cp "$RESULTS/summary.md" "$OUT/.gpu_check" && mv "$OUT/.gpu_check" "$OUT/summary.md"
    tar -czf "$OUT/.gpu_check" -C "$WORK" results && mv "$OUT/.gpu_check" "$OUT/gpu_check.tar.gz"
    return "$status"
}

if [[ $MODE == list ]]; then
    RESULTS=RESULTS WORK=WORK
    for stage in "${stages[@]}"; do run_stage; done
    exit
fi
WORK=$(mktemp -d) && mkdir -p "$OUT" "$WORK/tmp" "$WORK/results" || exit
(umask 077 && mkdir -p "$CACHE") 2>/dev/null || { CACHE=$WORK/cache && mkdir -m 700 "$CACHE"; } || exit # for users without a home directory
OUT=$(cd "$OUT" && pwd) CACHE=$(cd "$CACHE" && pwd)
[[ -O $CACHE && -z $(find "$CACHE" -maxdepth 0 -perm /022) ]] || { # The code in it will be run.
    echo "tools/gpu_check.sh: error: CACHE: other users can write to $CACHE; set it to another directory" >&2 && exit 2
}
trap 'rm -rf "$WORK"' EXIT
trap 'kill $(jobs -rp) 2>/dev/null; exit 143' INT TERM
export WORK RESULTS=$WORK/results TMPDIR=$WORK/tmp OMP_WAIT_POLICY=PASSIVE
export TEST_LIMIT_S=60 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export PYTHONPATH=$PWD/benchmarks/bert/implementations/pytorch:$PWD/tools:$PWD/tests:$WORK/wheels${PYTHONPATH:+:$PYTHONPATH}
export TRITON_CACHE_DIR=$CACHE/triton TORCHINDUCTOR_CACHE_DIR=$CACHE/inductor NUMBA_CACHE_DIR=$CACHE/numba
export CUDA_CACHE_PATH=$CACHE/cuda MPLCONFIGDIR=$CACHE/matplotlib XDG_CACHE_HOME=$CACHE
if [[ -n ${WHEELS:-} ]]; then
    for wheel in "$WHEELS"/*.whl; do
        name=${wheel##*/}
        "$PYTHON" -c "import ${name%%-*}" 2>/dev/null || "$PYTHON" -m zipfile -e "$wheel" "$WORK/wheels"
    done
fi
{
    echo "stage: ${stages[*]}${ONLY:+ ($ONLY)}, $MODE, $(date -u '+%Y-%m-%d %H:%M UTC')"
    echo "commit: ${COMMIT:-$(git describe --always --dirty --abbrev=40 --exclude '*' 2>/dev/null || echo unknown)}"
    timeout 10 nvidia-smi --query-gpu=name,memory.total,driver_version,power.limit --format=csv,noheader 2>&1
    "$PYTHON" -VV
    timeout 30 "$PYTHON" -c 'import torch; print("torch", torch.__version__)' 2>&1 # This also loads torch into the page cache.
} >"$RESULTS/machine.txt"
for stage in "${stages[@]}"; do MODE=list run_stage; done >"$RESULTS/plan.tsv"
summarise # It lists all parts as not finished.
for stage in "${stages[@]}"; do run_stage; SECONDS=0; done
jobs -rp | xargs -r kill 2>/dev/null # `text`, if the stage has ended before it
wait
summarise
failed=$?
cat "$OUT/summary.md"
exit "$failed"
