"""Fast checks of one prepared set: everything that needs no sample to be read.

Manifest, vocabulary, sidecars, sizes and index are compared with each other, so that a damaged,
missing or foreign file is found in seconds. Nothing is trusted: names and counts may be hostile.
"""

from pathlib import Path

import numpy as np

from mlperf_bert.common.atomic import is_temporary
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import check_size, file_size
from mlperf_bert.data.index import (
    INDEX_ARRAYS,
    REMEDY,
    LengthIndex,
    Manifest,
    Sidecar,
    read_sidecar,
    sidecar_path,
)
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.set_checks import (
    SHARD_REMEDY,
    VOCABULARY_REMEDY,
    check_index_file,
    check_sidecar_digest,
    repeated_texts,
    wrong_settings,
)
from mlperf_bert.prepare.verify.report import Check
from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS

SAMPLES_AT_A_TIME = 2**22


def check_manifest(set_dir: Path) -> tuple[Check, Manifest | None]:
    """The manifest parses, agrees with itself and has its own digest."""
    name = "manifest"
    try:
        manifest = Manifest.load(set_dir)
    except DataError as error:
        return Check(name, "", (error,)), None
    return Check(name, f"{len(manifest.shards):,} shards, {manifest.num_samples:,} examples"), (
        manifest
    )


def check_vocabulary(set_dir: Path, manifest: Manifest) -> Check:
    """The vocabulary file is the one of the manifest: digest, size and the five special ids."""
    path = set_dir / manifest.vocabulary_file
    try:
        vocabulary = load_any_vocabulary(path)
    except DataError as error:
        return Check("vocabulary", "", (error,))
    names = [f"{token[1:-1].lower()}_id" for token in SPECIAL_TOKENS]
    ids = {name: getattr(vocabulary, name) for name in names}
    found = {"vocabulary_sha256": vocabulary.sha256, "vocab_size": len(vocabulary), **ids}
    problems = tuple(
        DataError(
            str(path),
            f"has {key} = {value} where the manifest says {getattr(manifest, key)}",
            VOCABULARY_REMEDY,
        )
        for key, value in found.items()
        if value != getattr(manifest, key)
    )
    return Check("vocabulary", f"{manifest.vocab_size:,} tokens", problems)


def check_sidecars(set_dir: Path, manifest: Manifest) -> tuple[Check, dict[str, Sidecar]]:
    """Each sidecar is there, has its digest, parses, and says of its shard what the manifest says.

    Returns the check and the sidecars that parse, by the shard's file name.
    """
    sidecars: dict[str, Sidecar] = {}
    problems = []
    for entry in manifest.shards:
        shard_path = set_dir / "shards" / entry.file
        path = sidecar_path(shard_path)
        try:
            sidecar = sidecars[entry.file] = read_sidecar(shard_path)
        except DataError as error:
            problems.append(error)
            continue
        try:
            check_sidecar_digest(set_dir, entry)
        except DataError as error:
            problems.append(error)
        pairs = {
            "num_samples": (sidecar.num_samples, entry.num_samples),
            "shard_sha256": (sidecar.shard_sha256, entry.sha256),
        }
        for key, (found, wanted) in pairs.items():
            if found != wanted:
                problem = f"is {found} where the manifest says {wanted}"
                problems.append(DataError(f"{path}: {key}", problem, SHARD_REMEDY))
    summary = f"{len(sidecars)} of {len(manifest.shards)}"
    return Check("sidecars", summary, tuple(problems)), sidecars


def check_sizes(set_dir: Path, manifest: Manifest, sidecars: dict[str, Sidecar]) -> Check:
    """Each shard is there and has the size that its sidecar says."""
    problems = []
    for entry in manifest.shards:
        path = set_dir / "shards" / entry.file
        try:
            if entry.file in sidecars:
                check_size(path, sidecars[entry.file].shard_bytes, SHARD_REMEDY)
            else:
                file_size(path, SHARD_REMEDY)
        except DataError as error:
            problems.append(error)
    total = len(manifest.shards)
    return Check("shard sizes", f"{total - len(problems)} of {total}", tuple(problems))


def check_settings(set_dir: Path, manifest: Manifest, sidecars: dict[str, Sidecar]) -> Check:
    """All shards were made alike, and as the manifest says: no two preparations are mixed."""
    problems = wrong_settings(set_dir, manifest, sidecars)
    total = len(sidecars)
    return Check("settings alike", f"{total - len(problems)} of {total}", tuple(problems))


def check_sources(set_dir: Path, sidecars: dict[str, Sidecar]) -> Check:
    """No two shards were made from the same text."""
    problems = repeated_texts(set_dir, sidecars)
    total = len(sidecars)
    return Check("different texts", f"{total - len(problems)} of {total}", tuple(problems))


def check_file_names(set_dir: Path, manifest: Manifest) -> Check:
    """`shards/` and `index/` hold what the manifest names and nothing else; no left-overs."""
    shards = {entry.file for entry in manifest.shards}
    known: dict[Path, set[str]] = {
        set_dir: {manifest.vocabulary_file},
        set_dir / "shards": shards | {f"{name}.json" for name in shards},
        set_dir / "index": {"dataset.json", *(file.file for file in manifest.index_files)},
    }
    problems = []
    for directory, names in known.items():
        try:
            found = sorted(path.name for path in directory.iterdir())
        except OSError as error:
            reason = error.strerror or "cannot be listed"
            problems.append(DataError(str(directory), reason, INDEX_REMEDY))
            continue
        for name in found:
            path = str(directory / name)
            if is_temporary(name, names):
                remedy = "delete it once no `mlperf_bert prepare` is at work here"
                problems.append(DataError(path, "was left by an interrupted writer", remedy))
            elif directory != set_dir and name not in names:  # its user's notes may lie there
                remedy = "move it away, or prepare the set again with its text"
                problems.append(DataError(path, "is not in the manifest", remedy))
    return Check("no other files", "", tuple(problems))


def check_index(set_dir: Path, manifest: Manifest) -> Check:
    """Each index file has the size and digest of the manifest, and the histogram is right."""
    problems = []
    for file in manifest.index_files:
        try:
            check_index_file(set_dir, file)
        except DataError as error:
            problems.append(error)
    if not problems and _histogram(set_dir, manifest) != manifest.length_histogram:
        path = set_dir / "index" / "dataset.json"
        problem = "does not count the lengths of lengths.u16"
        problems.append(DataError(f"{path}: length_histogram", problem, REMEDY))
    return Check("index files", f"{len(manifest.index_files)}", tuple(problems))


def check_order(set_dir: Path) -> Check:
    """`order_by_length` numbers every sample once, by length, ties by number.

    Neighbours that ascend in (length, number) are all different, so N of them below N are all.
    Call only where `check_index` found nothing.
    """
    index = LengthIndex.open(set_dir)
    lengths, order = index.lengths, index.order_by_length
    path = set_dir / "index" / INDEX_ARRAYS[2][0]
    for first in range(0, len(order), SAMPLES_AT_A_TIME):
        ids = np.asarray(order[first : first + SAMPLES_AT_A_TIME + 1], dtype=np.int64)
        is_wrong = ids >= len(order)
        if not is_wrong.any():
            keys = lengths[ids].astype(np.int64) << 32 | ids
            is_wrong = np.append(False, keys[1:] <= keys[:-1])
        if is_wrong.any():
            problem = f"is not the order by length at element {first + int(is_wrong.argmax())}"
            return Check("order by length", "", (DataError(str(path), problem, REMEDY),))
    return Check("order by length", f"{len(order):,} samples")


def _histogram(set_dir: Path, manifest: Manifest) -> tuple[int, ...]:
    name, dtype = INDEX_ARRAYS[0]
    lengths = np.memmap(set_dir / "index" / name, dtype=dtype, mode="r")
    counts = np.zeros(2**16, dtype=np.int64)
    for first in range(0, len(lengths), SAMPLES_AT_A_TIME):
        counts += np.bincount(lengths[first : first + SAMPLES_AT_A_TIME], minlength=2**16)
    used = max(manifest.max_seq_length + 1, int(np.flatnonzero(counts)[-1]) + 1)
    return tuple(counts[:used].tolist())
