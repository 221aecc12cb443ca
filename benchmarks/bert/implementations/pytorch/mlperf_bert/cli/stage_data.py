"""The sub-command `stage-data`: copy a node's part of the data to its local disk.

With a fixed seed the plan says which samples the ranks of a node read. Only their pages are copied,
into sparse files of the same layout, and training reads them like the source. Each shard is written
under a temporary name and renamed; the manifest comes last.
"""

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.atomic import make_directory, remove_temporaries, replaced_file, write_file
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.file_progress import progress_of
from mlperf_bert.common.untrusted import file_digest, open_regular_file
from mlperf_bert.config.files import load_config
from mlperf_bert.config.options import add_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.index import (
    STAGE_FILE,
    DatasetPlace,
    LengthIndex,
    StagedPart,
    StageRecord,
    is_partial,
    manifest_sha256,
    sidecar_path,
)
from mlperf_bert.data.set_checks import (
    NOT_STAGED,
    check_batch_fits,
    open_index,
    plan_settings,
)
from mlperf_bert.data.shards import IntArray, SampleReader, Shard
from mlperf_bert.distributed.launch import read_rank_info

# Loaders, read-ahead and reader processes run past the last step.
STEPS_AHEAD = 8
WINDOWS_AHEAD = 4
PAGE_BYTES = 4096  # unit in which a file system stores a sparse file
CHUNK_BYTES = 2**23
SOURCE_REMEDY = "check the source with `mlperf_bert verify --full`"
COPY_REMEDY = "delete it and stage the data again"

# Flat arrays, nearly all of a shard -> the array of each sample's start in them.
FLAT_ARRAYS = {
    "input_ids": "offsets",
    "masked_lm_positions": "masked_lm_offsets",
    "masked_lm_ids": "masked_lm_offsets",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stage-data`."""
    add_config(parser)
    parser.add_argument("--data", type=Path, required=True, help="directory with train/ and eval/")
    parser.add_argument("--out", type=Path, required=True, help="directory of the copy")
    parser.add_argument("--node", type=int, help="the node, from 0 (default: the launcher's)")
    parser.add_argument("--whole", action="store_true", help="all samples, for any seed and node")
    parser.add_argument(
        "--replace", action="store_true", help="replace a part that was staged there before"
    )


def run(args: argparse.Namespace) -> int:
    """Copy train/ and eval/, keeping finished files of the copy. Raises ConfigError, DataError.

    With a fixed seed, only the samples that the config makes one node read, unless `--whole`.
    """
    config, data_dir, out = load_config(args.config, args.set), args.data, args.out
    source = os.path.realpath(data_dir)
    if os.path.commonpath((source, os.path.realpath(out))) == source:
        raise ConfigError("--out", f"{out} is the source or lies in it", "name another directory")
    part = None
    if config.run.seed != "random" and not args.whole:
        part = StagedPart(_node(args.node, config), config.max_steps, plan_settings(config))
    train = open_index(data_dir / "train", config)
    held_out = open_index(data_dir / "eval", config)
    check_batch_fits(config, train, data_dir)
    for set_dir in (data_dir / "train", data_dir / "eval"):
        if is_partial(set_dir):
            raise DataError(str(set_dir), "is a partial stage itself", "stage from the whole set")
    planned = planned_samples(config, train, part.node) if part else None
    for name, index, which in (("train", train, part), ("eval", held_out, None)):
        record = StageRecord(manifest_sha256(data_dir / name), which)
        samples = planned if _claim(out / name, record, replace=args.replace) else None
        _stage(SampleReader(data_dir / name, index.manifest), out / name, samples)
    return 0


def planned_samples(config: RunConfig, index: LengthIndex, node: int) -> NDArray[np.bool_]:
    """Mask, bool [N], of samples that a node's ranks read until shortly after `run.max_steps`."""
    parallel = config.parallel
    assert config.run.seed != "random"
    planner = make_planner(config, index, config.run.seed)
    first, stop = node * parallel.ranks_per_node, (node + 1) * parallel.ranks_per_node
    steps_ahead = STEPS_AHEAD + WINDOWS_AHEAD * config.data.exchange_window_steps
    is_planned = np.zeros(index.manifest.num_samples, dtype=np.bool_)
    for step in range(1, config.max_steps + steps_ahead + 1):
        plan = planner.plan(step)
        if config.data.balance.startswith("exchange"):  # ranks read, then exchange
            is_planned[plan.drawn_ids[first:stop]] = True
        else:
            before, after = plan.counts[:first].sum(), plan.counts[:stop].sum()
            is_planned[plan.sample_ids[before:after]] = True
    return is_planned


def _node(asked: int | None, config: RunConfig) -> int:
    info, nodes = read_rank_info(), config.parallel.nodes
    remedy = f"give a node of 0 .. {nodes - 1}, or --whole"
    if asked is None:
        if info.launcher == "single" and nodes > 1:
            raise ConfigError("--node", f"is missing, the config has {nodes} nodes", remedy)
        asked = info.node_rank
    if not 0 <= asked < nodes:
        raise ConfigError("--node", f"is {asked}, the config has {nodes} nodes", remedy)
    return asked


def _stage(reader: SampleReader, target: Path, planned: NDArray[np.bool_] | None) -> None:
    """Copy a set, or its planned samples."""
    source, count = reader.set_dir, reader.manifest.num_samples
    is_wanted = np.ones(count, dtype=np.bool_) if planned is None else planned
    for name in ("shards", "index"):
        make_directory(target / name)
    remove_temporaries(target / "shards", [shard.path.name for shard in reader.shards])
    ends = np.cumsum([entry.num_samples for entry in reader.manifest.shards])
    shares = np.split(is_wanted, ends[:-1])
    sizes = [
        int(shard.sidecar.shard_bytes * share.mean())
        for shard, share in zip(reader.shards, shares, strict=True)
    ]
    with progress_of(
        len(sizes), sum(sizes), quiet=False, words=("staged", "shards"), stream=sys.stderr
    ) as advance:
        for shard, share, size in zip(reader.shards, shares, sizes, strict=True):
            copy = target / "shards" / shard.path.name
            if planned is None:
                copy_whole(shard.path, copy, shard.sidecar.shard_bytes, shard.sidecar.shard_sha256)
            else:
                copy_samples(shard, share, copy)
            copy_file(sidecar_path(shard.path), sidecar_path(copy))
            advance(target.name, size)
    vocabulary = reader.manifest.vocabulary_file
    copy_file(source / vocabulary, target / vocabulary)
    for file in reader.manifest.index_files:
        names = source / "index" / file.file, target / "index" / file.file
        copy_whole(*names, file.size_bytes, file.sha256)
    copy_file(source / "index" / "dataset.json", target / "index" / "dataset.json")
    print(f"{target}: {is_wanted.sum():,} of {len(is_wanted):,} samples")


def _claim(target: Path, record: StageRecord, *, replace: bool) -> StagedPart | None:
    """Mark a directory as this stage, or check its mark; return the part that it holds.

    A whole copy of the same set serves for any part, and stays whole. `replace` first deletes the
    shards of another part, because the mark guarantees the contents. Raises DataError for other
    contents.
    """
    make_directory(target)
    remove_temporaries(target, [STAGE_FILE])
    if (target / STAGE_FILE).exists():
        found = StageRecord.load(target)
        if found in (record, StageRecord(record.manifest_sha256, None)):
            return found.part
        if found.part is None and record.part is not None:
            remedy = "remove it, or give a new directory"
            raise DataError(str(target), "holds a whole copy of another set", remedy)
        if not replace:
            remedy = "give a new directory, or --replace"
            raise DataError(str(target), "holds another stage", remedy)
        try:
            (target / "index" / "dataset.json").unlink(missing_ok=True)
            if (target / "shards").exists():
                shutil.rmtree(target / "shards")
        except OSError as error:
            problem = f"holds another stage that stays ({error.strerror})"
            raise DataError(str(target), problem, "remove it, or give a new directory") from None
    elif any(target.iterdir()):
        raise DataError(str(target), "holds files but no stage", "give a new directory")
    write_file(target / STAGE_FILE, record.to_json())
    return record.part


def copy_file(source_path: Path, target: Path, size: int | None = None, sha256: str = "") -> None:
    """Copy a file of `size` bytes, and check its digest if that is known.

    Raises DataError if the source is damaged or unreadable, or the target cannot be written.
    """
    digest = hashlib.sha256()
    with _opened(source_path) as source, replaced_file(target) as temporary:
        with temporary.open("wb") as copy:
            for chunk in _chunks(source, source_path, 0, size or source_path.stat().st_size):
                digest.update(chunk)
                copy.write(chunk)
        if sha256 and digest.hexdigest() != sha256:
            problem = "is not the file that was prepared (its sha256 differs)"
            raise DataError(str(source_path), problem, SOURCE_REMEDY)


def copy_whole(source_path: Path, target: Path, size: int, sha256: str) -> None:
    """Copy a file, unless `target` is a copy already. Raises DataError like `copy_file`."""
    if not target.exists() or file_digest(target, COPY_REMEDY) != sha256:
        copy_file(source_path, target, size, sha256)


def copy_samples(shard: Shard, is_wanted: NDArray[np.bool_], target: Path) -> None:
    """Copy some samples of a shard to a sparse file of its layout, unless `target` exists.

    Flat arrays are copied only where the wanted samples lie, everything else in full. Unwanted
    samples get a next sentence label out of range, so reading one is an error.

    `is_wanted` is bool [n]. Raises DataError like `copy_file`. The copied bytes are not checked.
    """
    if target.exists():
        return  # only a complete file gets this name
    size = shard.sidecar.shard_bytes
    with _opened(shard.path) as source, replaced_file(target) as temporary:
        ranges = _byte_ranges(shard, source, np.flatnonzero(is_wanted))
        with temporary.open("wb") as copy:
            copy.truncate(size)
            for start, stop in ranges:
                copy.seek(start)
                for chunk in _chunks(source, shard.path, start, stop):
                    copy.write(chunk)
            place = shard.sidecar.datasets["next_sentence_label"]
            labels = _array(source, shard.path, place).copy()
            labels[~is_wanted] = NOT_STAGED
            copy.seek(place.offset)
            copy.write(labels.tobytes())


def _byte_ranges(shard: Shard, source: FileIO, rows: IntArray) -> list[tuple[int, int]]:
    """Start and stop of the bytes to copy, ascending, rounded to whole pages inside data."""
    places = shard.sidecar.datasets
    num_pages = -(-shard.sidecar.shard_bytes // PAGE_BYTES)
    is_copied = np.zeros(num_pages + 2, dtype=np.bool_)  # no page before or after
    is_copied[1:-1] = True
    for name in FLAT_ARRAYS:
        first, stop = -(-places[name].offset // PAGE_BYTES), places[name].end // PAGE_BYTES
        is_copied[first + 1 : max(first, stop) + 1] = False  # pages of this array alone
    for name, table in FLAT_ARRAYS.items():
        offsets = _array(source, shard.path, places[table])
        starts, stops = offsets[rows], offsets[rows + 1]
        if ((starts < 0) | (stops <= starts) | (stops > places[name].count)).any():
            raise DataError(f"{shard.path}: {table}", "does not ascend", SOURCE_REMEDY)
        itemsize = np.dtype(places[name].dtype).itemsize
        first_pages = (places[name].offset + starts * itemsize) // PAGE_BYTES
        last_pages = (places[name].offset + stops * itemsize - 1) // PAGE_BYTES
        for page in range(int((last_pages - first_pages).max(initial=0)) + 1):
            is_copied[np.minimum(first_pages + page, last_pages) + 1] = True
    edges = np.flatnonzero(is_copied[1:] != is_copied[:-1]) * PAGE_BYTES
    ends = np.minimum(edges, shard.sidecar.shard_bytes).tolist()
    return list(zip(ends[::2], ends[1::2], strict=True))


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(str(path), error.strerror or "cannot be read", SOURCE_REMEDY)


def _opened(path: Path) -> FileIO:
    try:
        return open_regular_file(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _array(source: FileIO, path: Path, place: DatasetPlace) -> NDArray[Any]:
    contents = b"".join(_chunks(source, path, place.offset, place.end))
    return np.frombuffer(contents, dtype=place.dtype)


def _chunks(source: FileIO, path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes start .. stop - 1 in pieces. Raises DataError if they cannot be read."""
    while start < stop:
        try:
            source.seek(start)
            chunk = source.read(min(CHUNK_BYTES, stop - start))
        except OSError as error:
            raise _unreadable(path, error) from None
        if not chunk:
            raise DataError(str(path), f"ends at byte {start}", SOURCE_REMEDY)
        start += len(chunk)
        yield chunk
