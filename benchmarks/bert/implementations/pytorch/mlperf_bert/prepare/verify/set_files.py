"""Fast checks of one prepared set: everything that needs no sample to be read.

Manifest, vocabulary, sidecars, sizes and index are compared with each other, so that a damaged,
missing or foreign file is found in seconds. Nothing is trusted: names and counts may be hostile.
"""

import hashlib
import os
from collections import Counter, defaultdict
from dataclasses import fields
from pathlib import Path
from stat import S_ISREG

from mlperf_bert.data.atomic import is_temporary
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.index import Manifest
from mlperf_bert.data.sidecar import Sidecar, read_sidecar, sidecar_path
from mlperf_bert.errors import DataError
from mlperf_bert.prepare.verify.report import Check
from mlperf_bert.prepare.vocabulary import SPECIAL_TOKENS, load_vocabulary

# No JSON file or vocabulary of a set comes near; a larger one is not read into memory.
MAX_TEXT_BYTES = 2**28
SHARD_REMEDY = (
    "delete this shard, its sidecar and index/dataset.json, then run the same "
    "`mlperf_bert prepare` command again; other finished shards are kept"
)
VOCABULARY_REMEDY = "put the vocabulary back that the set was made with, or prepare a new set"
MIXED_REMEDY = "keep the shards of one preparation only: prepare the set in a new directory"


def file_size(path: Path, remedy: str) -> int:
    """Bytes of a regular file. Raises DataError for anything else, a pipe or a device too."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(str(path), error.strerror or "is missing", remedy) from None
    except ValueError:  # a name that no file system takes
        raise DataError(repr(str(path)), "is no file name", remedy) from None
    if not S_ISREG(status.st_mode):
        raise DataError(str(path), "is not a regular file", remedy)
    return status.st_size


def file_sha256(path: Path, remedy: str) -> str:
    """Digest of a regular file, read in pieces. Raises DataError when it cannot be read."""
    file_size(path, remedy)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", remedy) from None


def check_manifest(set_dir: Path) -> tuple[Check, Manifest | None]:
    """The manifest parses, agrees with itself and has its own digest."""
    name = "manifest"
    try:
        _check_text_size(set_dir / "index" / "dataset.json", INDEX_REMEDY)
        manifest = Manifest.load(set_dir)
    except DataError as error:
        return Check(name, "", (error,)), None
    return Check(name, f"{len(manifest.shards):,} shards, {manifest.num_samples:,} examples"), (
        manifest
    )


def check_vocabulary(set_dir: Path, manifest: Manifest) -> Check:
    """`vocab.txt` is the one of the manifest: digest, size and the five special ids."""
    path = set_dir / "vocab.txt"
    try:
        _check_text_size(path, VOCABULARY_REMEDY)
        vocabulary = load_vocabulary(path)
    except DataError as error:
        return Check("vocabulary", "", (error,))
    ids = {f"{token[1:-1].lower()}_id": vocabulary.ids[token] for token in SPECIAL_TOKENS}
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
            _check_text_size(path, SHARD_REMEDY)
            sidecar = sidecars[entry.file] = read_sidecar(shard_path)
            if file_sha256(path, SHARD_REMEDY) != entry.sidecar_sha256:
                problem = "is not the file that the manifest names (its sha256 differs)"
                problems.append(DataError(str(path), problem, SHARD_REMEDY))
        except DataError as error:
            problems.append(error)
            continue
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
            size = file_size(path, SHARD_REMEDY)
        except DataError as error:
            problems.append(error)
            continue
        if entry.file in sidecars and size != sidecars[entry.file].shard_bytes:
            problem = f"is {size} bytes where {sidecars[entry.file].shard_bytes} belong"
            problems.append(DataError(str(path), problem, SHARD_REMEDY))
    total = len(manifest.shards)
    return Check("shard sizes", f"{total - len(problems)} of {total}", tuple(problems))


def check_settings(set_dir: Path, manifest: Manifest, sidecars: dict[str, Sidecar]) -> Check:
    """All shards were made alike, and as the manifest says: no two preparations are mixed.

    A setting that the manifest does not hold must be what most shards have.
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
    total = len(sidecars)
    return Check("settings alike", f"{total - len(problems)} of {total}", tuple(problems))


def check_sources(set_dir: Path, sidecars: dict[str, Sidecar]) -> Check:
    """No two shards were made from the same text."""
    made_from = defaultdict(list)
    for file, sidecar in sidecars.items():
        made_from[sidecar.source_sha256].append(file)
    problems = tuple(
        DataError(
            str(set_dir / "shards" / file),
            f"was made from the same text as {files[0]}",
            "prepare the set in a new directory, with each text once",
        )
        for files in made_from.values()
        for file in files[1:]
    )
    return Check("different texts", f"{len(made_from)} of {len(sidecars)}", problems)


def check_file_names(set_dir: Path, manifest: Manifest) -> Check:
    """`shards/` and `index/` hold what the manifest names and nothing else; no left-overs."""
    shards = {entry.file for entry in manifest.shards}
    known = {
        set_dir: {"vocab.txt"},
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


def _check_text_size(path: Path, remedy: str) -> None:
    if not os.path.lexists(path):
        return  # whoever reads it says best what is missing
    size = file_size(path, remedy)
    if size > MAX_TEXT_BYTES:
        raise DataError(str(path), f"is {size} bytes, far too large", remedy)
