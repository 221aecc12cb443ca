# shellcheck shell=bash disable=SC2034,SC2154 # names shared with run_and_time.sh
# Sourced by run_and_time.sh where CORPUS is set: before training the data out of the user's own text, and after
# it the accuracy of what was saved, and the model in the form that other programs load.

own_text_options() { # what decides the data; sets `data_options`, and adds to options and overrides
    local name number tokens numbers=(max_seq_length max_predictions)
    local count='import pathlib, sys; from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary
print(len(load_any_vocabulary(pathlib.Path(sys.argv[1]))))'
    data_options=(--corpus "$CORPUS")
    if [ -n "${VOCAB:-}" ]; then
        [ -f "$VOCAB" ] || fail "VOCAB: there is no file '$VOCAB'; give the vocab.txt, or leave it out"
        tokens=$("${here[@]}" -c "$count" "$VOCAB") || fail "VOCAB: '$VOCAB' cannot be read, see above"
        options=(--set "model.vocab_size=$tokens" ${options[@]+"${options[@]}"})
        overrides=(--set "model.vocab_size=$tokens" ${overrides[@]+"${overrides[@]}"})
        data_options+=(--vocab "$VOCAB")
    else
        number=$(setting model.vocab_size)
        data_options+=(--vocab-size "$number")
    fi
    if [ "$(setting model.objective)" = mlm ]; then data_options+=(--segments single); else numbers+=(dupe_factor); fi
    for name in "${numbers[@]}"; do
        number=$(setting "data.$name")
        data_options+=("--${name//_/-}" "$number")
    done
}

prepare_own_text() { # sets DATADIR where it is not given: one for each text and what it is made with
    [ -e "$CORPUS" ] || fail "CORPUS: there is no file or directory '$CORPUS'; give your text"
    CORPUS=$(cd "$(dirname "$CORPUS")" && pwd)/$(basename "$CORPUS")
    own_text_options
    if [ -z "${DATADIR:-}" ]; then
        local text name made_with digest='import pathlib, sys; from mlperf_bert.prepare.own_text import text_digest
print(text_digest(*(pathlib.Path(each) if each else None for each in sys.argv[1:])))'
        # Text that cannot be read has none; `prepare` says why.
        text=$("${here[@]}" -c "$digest" "$CORPUS" "${VOCAB:-}" 2>/dev/null) || text=
        name=$(basename "$CORPUS")
        made_with=$(printf '%s\n' "${data_options[@]}" "$text" | cksum)
        DATADIR=$root/.cache/own-${name//[^A-Za-z0-9._-]/_}-${made_with%% *}
    fi
    [ "$leads" = 1 ] || return 0
    "${here[@]}" -m mlperf_bert prepare "${data_options[@]}" --out "$DATADIR"
}

hand_over() { # index; the accuracy and the exported form of a run's last checkpoint
    local run=$LOGDIR/run_$1 evaluated accuracy guess
    local baseline='import pathlib, sys; from mlperf_bert.data.index import Manifest
print(f"{Manifest.load(pathlib.Path(sys.argv[1])).baseline.context_free_accuracy:.4f}")'
    [ "$leads" = 1 ] || return 0
    evaluated=$("${here[@]}" -m mlperf_bert evaluate --checkpoint "$run/checkpoints" --data "$DATADIR")
    echo "$evaluated"
    "${here[@]}" -m mlperf_bert export --to huggingface "$run/checkpoints" "$run/huggingface"
    echo "to fill in words: ${here[*]} -m mlperf_bert fill --checkpoint $run/checkpoints \"The [MASK] was trained on text.\""
    accuracy=$(sed -n 's/^accuracy \([0-9.]*\) .*/\1/p' <<<"$evaluated")
    guess=$("${here[@]}" -c "$baseline" "$DATADIR/eval")
    echo "own text has no target: accuracy $accuracy, best guess without context $guess"
}
