"""Checks of a prepared set that read no sample: at the start of training, and by `verify`.

Sidecars, vocabulary and index are held against the manifest and each other. Nothing is trusted:
names and counts may be hostile. Each check raises the DataError it finds, or returns all of them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.file_checks import check_digest, check_size
from mlperf_bert.data.index import INDEX_ARRAYS, IndexFile, LengthIndex, Manifest, ShardEntry
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.sidecar import Sidecar, sidecar_path

SHARD_REMEDY = (
    "delete this shard, its sidecar and index/dataset.json, then run the same "
    "`mlperf_bert prepare` command again; other finished shards are kept"
)
VOCABULARY_REMEDY = "put the vocabulary back that the set was made with, or prepare a new set"
MIXED_REMEDY = "keep the shards of one preparation only: prepare the set in a new directory"
PAIR_REMEDY = "prepare both with the same vocabulary, from different texts"


def check_sidecar_digest(set_dir: Path, entry: ShardEntry) -> None:
    """Raise DataError where a shard's sidecar is not the one that the manifest names."""
    path = sidecar_path(set_dir / "shards" / entry.file)
    check_digest(path, entry.sidecar_sha256, SHARD_REMEDY)


def check_vocabulary_digest(set_dir: Path, manifest: Manifest) -> None:
    """Raise DataError where a set's vocabulary file is not the one that it was made with."""
    check_digest(set_dir / manifest.vocabulary_file, manifest.vocabulary_sha256, VOCABULARY_REMEDY)


def check_index_file(set_dir: Path, file: IndexFile) -> None:
    """Raise DataError where an index file has not the size and digest of the manifest."""
    path = set_dir / "index" / file.file
    check_size(path, file.size_bytes, INDEX_REMEDY)
    check_digest(path, file.sha256, INDEX_REMEDY)


def check_index_ranges(set_dir: Path, index: LengthIndex) -> None:
    """Raise DataError where a number of the index is one that no right index holds.

    Planning and evaluation look samples up by these numbers before anything is read.
    """
    manifest = index.manifest
    limits: tuple[tuple[NDArray[Any], int, int], ...] = (
        (index.lengths, 1, manifest.max_seq_length),
        (index.masked_counts, 1, manifest.max_predictions),
        (index.order_by_length, 0, manifest.num_samples - 1),
    )
    for (name, _), (values, low, high) in zip(INDEX_ARRAYS, limits, strict=True):
        if values.min() < low or values.max() > high:
            problem = f"holds numbers outside {low} .. {high}"
            raise DataError(str(set_dir / "index" / name), problem, INDEX_REMEDY)


def wrong_settings(
    set_dir: Path, manifest: Manifest, sidecars: Mapping[str, Sidecar]
) -> list[DataError]:
    """Shards that were not made as the manifest says: of another preparation.

    A setting that the manifest does not hold must be what most shards have. `sidecars` are by the
    shard's file name, at least one.
    """
    names = [field.name for field in fields(next(iter(sidecars.values())).settings)]
    wanted = {}
    for name in names:
        values = Counter(getattr(sidecar.settings, name) for sidecar in sidecars.values())
        wanted[name] = getattr(manifest, name, values.most_common(1)[0][0])
    problems = []
    for file, sidecar in sidecars.items():
        differing = [
            f"{name} = {getattr(sidecar.settings, name)} (not {wanted[name]})"
            for name in names
            if getattr(sidecar.settings, name) != wanted[name]
        ]
        if differing:
            problem = f"was made with {', '.join(differing)}"
            problems.append(DataError(str(set_dir / "shards" / file), problem, MIXED_REMEDY))
    return problems


def repeated_texts(set_dir: Path, sidecars: Mapping[str, Sidecar]) -> list[DataError]:
    """Shards of the same text, or with the same examples, as one before them, copies among them."""
    before: dict[str, str] = {}
    problems = []
    for file, sidecar in sidecars.items():
        problem = _shared(sidecar, before)
        if problem is not None:
            remedy = "prepare the set in a new directory, with each text once"
            problems.append(DataError(str(set_dir / "shards" / file), problem, remedy))
        for digest in _digests(sidecar):
            before.setdefault(digest, file)
    return problems


def shared_texts(
    eval_dir: Path, train: Mapping[str, Sidecar], held_out: Mapping[str, Sidecar]
) -> list[DataError]:
    """Shards of the held-out set of a text, or with just the examples, that is trained on."""
    trained_on = {
        digest: f"train's {file}" for file, sidecar in train.items() for digest in _digests(sidecar)
    }
    found = [(file, _shared(sidecar, trained_on)) for file, sidecar in held_out.items()]
    return [
        DataError(str(eval_dir / "shards" / file), problem, PAIR_REMEDY)
        for file, problem in found
        if problem is not None
    ]


def _digests(sidecar: Sidecar) -> dict[str, str]:
    """What a shard can share with another -> how to say so.

    Files of others hold the same examples in several forms, which have digests of their own.
    """
    said = {sidecar.source_sha256: "was made from the same text as"}
    if sidecar.examples_sha256 is not None:
        said.setdefault(sidecar.examples_sha256, "holds the same examples as")
    return said


def _shared(sidecar: Sidecar, others: Mapping[str, str]) -> str | None:
    for digest, said in _digests(sidecar).items():
        if digest in others:
            return f"{said} {others[digest]}"
    return None
