#!/usr/bin/env bash
# Fetch the official text, vocabulary and first checkpoint; resumable, checked where size and md5 are known.
#
#   SOURCE=<url or directory> ./download_dataset.sh [--only PATTERN] DIR
#
#   SOURCE    where the files are, all in one place: https://, http://, ftp://, file://, or a directory;
#             MLCommons hands it out to its members, so it is not written here
#   --only    eval, train or checkpoint: the files for that; or a shell pattern of names
#   FILES     table of the files [dataset_files.txt beside this script]
#
# A file lies at DIR/<name> only when it is whole and right, until then at DIR/<name>.part. What is there and
# right is not fetched again; the next call goes on where a cut one stopped.
set -euo pipefail

case ${1:-} in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac

fail() {
    echo "download_dataset.sh: error: $1" >&2
    exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FILES=${FILES:-$here/dataset_files.txt}
pattern='*'
if [ "${1:-}" = --only ]; then
    [ $# -ge 2 ] || fail "--only: a pattern is missing; give eval, train, checkpoint or a file name"
    case $2 in
    eval) pattern='@(eval.*|vocab.txt)' ;;
    train) pattern='@(part-*|vocab.txt)' ;;
    checkpoint) pattern='@(model.ckpt-*|bert_config.json|vocab.txt)' ;;
    *) pattern=$2 ;;
    esac
    shift 2
fi
case ${1:-} in -*) fail "unknown option '$1'; --only is the only one, and stands first" ;; esac
[ $# -eq 1 ] || fail "one directory is expected; call SOURCE=<url or directory> $0 [--only PATTERN] DIR"
target=$1
[ -n "${SOURCE:-}" ] || fail "SOURCE is not set; set it to the url or directory that has the files"
[ -r "$FILES" ] || fail "FILES: '$FILES' cannot be read; leave it out for the official table"
command -v curl >/dev/null || fail "curl was not found; install it"
case $SOURCE in
*://*) ;;
*)
    [ -d "$SOURCE" ] || fail "SOURCE: there is no directory '$SOURCE'; give a url or a directory"
    SOURCE=file://$(cd "$SOURCE" && pwd | sed 's/%/%25/g; s/ /%20/g; s/#/%23/g; s/?/%3F/g')
    ;;
esac

wrong() { # file, bytes, md5: prints what is wrong with the file; nothing where it is right
    local bytes md5
    bytes=$(stat --dereference --format %s "$1")
    if [ "$bytes" -eq 0 ]; then
        echo "is empty"
    elif [ "$2" != - ] && [ "$bytes" -ne "$2" ]; then
        echo "has $bytes bytes, not $2"
    elif [ "$3" != - ]; then
        md5=$(md5sum <"$1")
        [ "${md5%% *}" = "$3" ] || echo "has md5 ${md5%% *}, not $3"
    fi
}

get() { # name
    curl --fail --location --show-error --retry 5 "${shown[@]}" --continue-at - --output "$target/$1.part" \
        "${SOURCE%/}/$1"
}

fetch() { # name, bytes, md5
    local part=$target/$1.part problem status=0
    local cut="$1 could not be fetched from SOURCE, see the line above; call again to go on"
    if [ -f "$part" ] && [ "$2" != - ] && [ "$(stat --format %s "$part")" -ge "$2" ]; then rm "$part"; fi
    if [ -f "$part" ]; then
        get "$1" || status=$?
        case $status in
        0) [ -z "$(wrong "$part" "$2" "$3")" ] || rm "$part" ;; # it began with something else
        33 | 36) rm "$part" ;; # only whole files are to be had there
        *) fail "$cut" ;;
        esac
    fi
    [ -f "$part" ] || get "$1" || fail "$cut"
    problem=$(wrong "$part" "$2" "$3")
    if [ -n "$problem" ]; then
        rm "$part"
        fail "$1 from SOURCE $problem; it is not the official file: look for another SOURCE"
    fi
    mv "$part" "$target/$1"
}

shown=(--silent)
if [ -t 2 ]; then shown=(--progress-bar); fi
shopt -s extglob
names=() sizes=() sums=()
while read -r bytes md5 name; do
    case $bytes in "" | \#*) continue ;; esac
    case $name in "" | . | */* | *..*) fail "FILES: '$name' in $FILES is no plain file name; mend that line" ;; esac
    # shellcheck disable=SC2053 # a pattern
    if [[ $name == $pattern ]]; then names+=("$name") sizes+=("$bytes") sums+=("$md5"); fi
done <"$FILES"
[ ${#names[@]} -gt 0 ] || fail "--only: no file matches '$pattern'; the names are in $FILES"
mkdir -p "$target" 2>/dev/null || fail "'$target' cannot be made; give a directory that you can write to"

for i in "${!names[@]}"; do
    name=${names[i]}
    progress="[$((i + 1))/${#names[@]}] $name"
    if [ -f "$target/$name" ]; then
        problem=$(wrong "$target/$name" "${sizes[i]}" "${sums[i]}")
        [ -z "$problem" ] || fail "$target/$name $problem; remove it and call again"
        echo "$progress: is there"
    else
        fetch "$name" "${sizes[i]}" "${sums[i]}"
        if [ "${sums[i]}" = - ]; then known="not known"; else known=right; fi
        echo "$progress: fetched, md5 $known"
    fi
done
