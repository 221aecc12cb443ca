"""Detect a mistyped run directory when `--resume auto` is about to start a new run.

A first start with `--resume auto` and a new directory is normal, because scripts for a job that may
be requeued always pass that option. `train` therefore stops with an error only if a directory next
to the new one has almost the same name and contains a run that can be resumed.
"""

import re
from contextlib import suppress
from pathlib import Path

from mlperf_bert.errors import ConfigError, UserError
from mlperf_bert.files import is_there, names_in
from mlperf_bert.run.lock import is_locked
from mlperf_bert.run.outcome import read_outcome
from mlperf_bert.run.paths import RunPaths

_RUN = re.compile(r"run_(\d{1,9})")
_SINGLE_LETTER = re.compile(r"(?<![^\W_])[^\W\d_](?![^\W_])")  # a word of one letter


def describe_new_run(root: Path, *, is_requeued: bool) -> str | None:
    """Return the message that a new run starts in `root`, or None if `root` has a run.

    Raises ConfigError if `root` seems to be mistyped, because a directory next to it has almost the
    same name and contains an interrupted run. A requeued SLURM job never gets this error, because
    it repeats a command that was checked before.
    """
    if any(_RUN.fullmatch(name) for name in names_in(root)):
        return None
    similar = _similar_with_run(root)
    if similar is not None and not is_requeued:
        remedy = f"did you mean {similar}? To start a new run, use --resume none"
        remedy += " (RESUME=none for run_and_time.sh)"
        raise ConfigError(str(root), "has no run to resume", remedy)
    return f"no earlier run in {root}; starting a new one"


def _similar_with_run(root: Path) -> Path | None:
    """Return a directory next to `root` with a similar name and an interrupted run, or None."""
    for name in names_in(root.absolute().parent):
        other = root.parent / name
        if name != root.name and is_mistyped(root.name, name):
            with suppress(UserError, OSError):  # a directory that cannot be read is no candidate
                if _is_resumable(other):
                    return other
    return None


def is_mistyped(typed: str, existing: str) -> bool:
    """Return True if the name `typed` is probably a misspelling of the name `existing`.

    Names count as misspelled if they differ by two swapped letters, by a letter that is doubled, or
    only in case or separators. Other names with a similar spelling do not count, because `adam` and
    `adamw`, `seed_1` and `seed_2`, or `try-a` and `try-A` are different on purpose.
    """
    single, other_single = (_SINGLE_LETTER.findall(name) for name in (typed, existing))
    ours, theirs = (re.sub(r"[-_. ]+", "-", name.casefold()) for name in (typed, existing))
    if ours == theirs:
        return single == other_single
    words, other_words = (re.findall(r"[^\W\d_]{2,}", name) for name in (ours, theirs))
    return words != other_words and _is_one_edit(ours, theirs)


def _is_one_edit(ours: str, theirs: str) -> bool:
    """Return True if swapping two neighboring letters, or doubling one, makes the names equal."""
    our_rest, their_rest = _without_common_start(ours, theirs)
    before = ours[: len(ours) - len(our_rest)][-1:]
    our_rest, their_rest = _without_common_start(our_rest[::-1], their_rest[::-1])
    is_swap = len(our_rest) == 2 and our_rest == their_rest[::-1]
    return is_swap or (bool(before) and our_rest + their_rest == before)


def _without_common_start(ours: str, theirs: str) -> tuple[str, str]:
    pairs = zip(ours, theirs, strict=False)
    start = next(
        (place for place, (our, their) in enumerate(pairs) if our != their),
        min(len(ours), len(theirs)),
    )
    return ours[start:], theirs[start:]


def _is_resumable(root: Path) -> bool:
    """Return True if `root` has an unfinished run that has a checkpoint and is not running."""
    for name in names_in(root) if root.is_dir() else ():
        found = _RUN.fullmatch(name)
        if found is None:
            continue
        paths = RunPaths(root, int(found[1]))
        has_ended = is_there(paths.outcome) and read_outcome(paths.outcome).stopped_by is None
        if paths.has_checkpoint and not has_ended and not is_locked(root, name):
            return True
    return False
