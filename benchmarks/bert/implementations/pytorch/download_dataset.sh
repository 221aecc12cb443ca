#!/usr/bin/env bash
# Download the official text, vocabulary and first checkpoint. Sizes and md5 digests are checked if they are known.
#
#   SOURCE=<url or directory> ./download_dataset.sh [--only PATTERN] DIR
#
#   SOURCE    the URL (https://, http://, ftp:// or file://) or the directory that contains all files. MLCommons
#             gives the address to its members, so it is not written here.
#   --only    download only the files for eval, train or checkpoint, or those whose names match a shell pattern
#   FILES     the table of the files [dataset_files.txt next to this script]
#
# A file is at DIR/<name> once it is complete and correct, and at DIR/<name>.part until then. Correct files are not
# downloaded again, and an interrupted download resumes at the next call.
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
    [ $# -ge 2 ] || fail "--only: the pattern is missing; use eval, train, checkpoint or a file name"
    case $2 in
    eval) pattern='@(eval.*|vocab.txt)' ;;
    train) pattern='@(part-*|vocab.txt)' ;;
    checkpoint) pattern='@(model.ckpt-*|bert_config.json|vocab.txt)' ;;
    *) pattern=$2 ;;
    esac
    shift 2
fi
case ${1:-} in -*) fail "unknown option '$1'; the only option is --only, and it comes first" ;; esac
[ $# -eq 1 ] || fail "DIR: $# arguments instead of one directory; use SOURCE=<url or directory> $0 [--only PATTERN] DIR"
target=$1
[ -n "${SOURCE:-}" ] || fail "SOURCE: not set; set it to the URL or directory that has the files"
[ -r "$FILES" ] || fail "FILES: '$FILES' cannot be read; unset it to use the official table"
command -v curl >/dev/null || fail "curl: not found; install it"
case $SOURCE in
*://*) ;;
*)
    [ -d "$SOURCE" ] || fail "SOURCE: no such directory '$SOURCE'; set it to a URL or a directory"
    SOURCE=file://$(cd "$SOURCE" && pwd | sed 's/%/%25/g; s/ /%20/g; s/#/%23/g; s/?/%3F/g')
    ;;
esac

wrong() { # file, bytes, md5; prints what is wrong with the file, and nothing if it is correct
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
    local interrupted="$1: download from SOURCE failed, as shown above; run the same command again to resume it"
    if [ -f "$part" ] && [ "$2" != - ] && [ "$(stat --format %s "$part")" -ge "$2" ]; then rm "$part"; fi
    if [ -f "$part" ]; then
        get "$1" || status=$?
        case $status in
        0) [ -z "$(wrong "$part" "$2" "$3")" ] || rm "$part" ;; # The old part was of another file.
        33 | 36) rm "$part" ;; # The server only sends complete files.
        *) fail "$interrupted" ;;
        esac
    fi
    [ -f "$part" ] || get "$1" || fail "$interrupted"
    problem=$(wrong "$part" "$2" "$3")
    if [ -n "$problem" ]; then
        rm "$part"
        fail "$1: the file from SOURCE $problem, so it is not the official one; use another SOURCE"
    fi
    mv "$part" "$target/$1"
}

shown=(--silent)
if [ -t 2 ]; then shown=(--progress-bar); fi
shopt -s extglob
names=() sizes=() sums=()
while read -r bytes md5 name; do
    case $bytes in "" | \#*) continue ;; esac
    case $name in "" | . | */* | *..*) fail "FILES: '$name' in $FILES is not a plain file name; correct that line" ;; esac
    # shellcheck disable=SC2053 # The right side is a pattern.
    if [[ $name == $pattern ]]; then names+=("$name") sizes+=("$bytes") sums+=("$md5"); fi
done <"$FILES"
[ ${#names[@]} -gt 0 ] || fail "--only: no file matches '$pattern'; use one of the names in $FILES"
mkdir -p "$target" 2>/dev/null || fail "$target: cannot be created; use a directory that you can write to"

for i in "${!names[@]}"; do
    name=${names[i]}
    progress="[$((i + 1))/${#names[@]}] $name"
    if [ -f "$target/$name" ]; then
        problem=$(wrong "$target/$name" "${sizes[i]}" "${sums[i]}")
        [ -z "$problem" ] || fail "$target/$name: $problem; remove this file, and run the same command again"
        echo "$progress: already downloaded"
    else
        fetch "$name" "${sizes[i]}" "${sums[i]}"
        if [ "${sums[i]}" = - ]; then known="unknown"; else known=correct; fi
        echo "$progress: downloaded, md5 $known"
    fi
done
