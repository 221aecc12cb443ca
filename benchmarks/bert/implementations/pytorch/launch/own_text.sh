# shellcheck shell=bash disable=SC2016,SC2034,SC2154 # names shared with run_and_time.sh
# Sourced by run_and_time.sh where CORPUS is set: the steps of `mlperf_bert own-text` around training.

own_text() { # step, its --out
    "${here[@]}" -m mlperf_bert own-text "$CORPUS" --only "$1" --out "$2" ${asked:+--config "$asked"} \
        ${VOCAB:+--vocab "$VOCAB"} ${ARCHITECTURE:+--architecture "$ARCHITECTURE"} ${own_data:+--data "$own_data"} \
        ${init_checkpoint[@]+"${init_checkpoint[@]}"} ${overrides[@]+"${overrides[@]}"}
}

prepare_own_text() { # sets CONFIG, adds to options and overrides; sets DATADIR where it is not given
    local chosen name setting settings=() words="echo choosing a model for the text"
    [ "$leads" = 1 ] || words=
    own_data=${DATADIR:-}
    [ -e "$CORPUS" ] || fail "CORPUS: there is no file or directory '$CORPUS'; give your text"
    [ -f "${VOCAB:-/dev/null}" ] || [ -z "${VOCAB:-}" ] || fail "VOCAB: there is no file '$VOCAB'; give the vocab.txt, or leave it out"
    CORPUS=$(cd "$(dirname "$CORPUS")" && pwd)/$(basename "$CORPUS")
    ticking "$words" eval 'chosen=$(own_text choose "$LOGDIR")' || exit
    { read -r CONFIG && read -r name; } <<<"$chosen"
    while read -r setting; do settings+=(--set "$setting"); done < <(tail -n +3 <<<"$chosen")
    options=(${settings[@]+"${settings[@]}"} ${options[@]+"${options[@]}"})
    overrides=(${settings[@]+"${settings[@]}"} ${overrides[@]+"${overrides[@]}"})
    DATADIR=${DATADIR:-$root/.cache/$name}
    own_data=$DATADIR # which STAGEDIR may replace
    [ "$leads" = 0 ] || ticking "echo preparing the text" own_text prepare "$LOGDIR"
}

hand_over() { # index; what the run has become, and its exported form
    [ "$leads" = 0 ] || ticking "echo measuring and exporting" own_text finish "$LOGDIR/run_$1"
}
