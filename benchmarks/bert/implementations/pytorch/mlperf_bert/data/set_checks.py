"""Check prepared sets against the config and against each other, and check their shards' bytes.

Before MLPerf's clock starts, these checks read only vocabularies, manifests, sidecars and indexes,
because MLPerf forbids reading samples. Each check either raises the first DataError that it finds
or returns all of them. Every rank checks the files that it will use. The first rank of each node
checks all other files.

Sizes and sidecars do not reveal a flipped bit in a shard. A thread therefore checks the bytes of
the shards. It starts right after `run_start` and runs during training, and the run waits for it
before it reports its first result. If the pair of sets is small, the thread compares the digests of
its shards with the manifests. If the pair is larger than SMALL_BYTES, the thread reads only evenly
spaced blocks of the shards. No manifest contains a digest of these blocks. Checkpoints therefore
store this digest, and a resumed run compares it.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from mlperf_bert.config.run_config import CLOSED_EVAL_SAMPLES, RunConfig
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.index import (
    IndexFile,
    LengthIndex,
    Manifest,
    ShardEntry,
    Sidecar,
    sidecar_path,
)
from mlperf_bert.data.shards import SampleReader, Shard
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import (
    check_digest,
    check_size,
    digest_error,
    open_regular_file,
    reading_error,
)

if TYPE_CHECKING:
    from hashlib import _Hash


SHARD_REMEDY = (
    "delete this shard, its sidecar and index/dataset.json, then run the same "
    "`mlperf_bert prepare` command again (other finished shards are kept)"
)
VOCABULARY_REMEDY = "restore the vocabulary that the set was prepared with, or prepare a new set"
MIXED_REMEDY = "prepare the set in a new directory, so that all shards have the same settings"
PAIR_REMEDY = "prepare train and eval from different texts, with the same vocabulary"
LOWEST_TARGET_OVER_BASELINE = 1.5

SMALL_BYTES = 2 * 2**30  # total size of shards that can be hashed in seconds
NUM_BLOCKS = 512
BLOCK_BYTES = 64 * 2**10
_BYTES_AT_A_TIME = 2**20
_LEAVE_S = 5.0  # so that a disk that does not respond cannot delay the end of a run


def check_sidecar_digest(set_dir: Path, entry: ShardEntry) -> None:
    """Raise DataError if the digest of a shard's sidecar differs from the manifest's."""
    path = sidecar_path(set_dir / "shards" / entry.file)
    check_digest(path, entry.sidecar_sha256, SHARD_REMEDY)


def check_index_file(set_dir: Path, file: IndexFile) -> None:
    """Raise DataError if an index file's size or digest differs from the manifest's."""
    path = set_dir / "index" / file.file
    check_size(path, file.size_bytes, INDEX_REMEDY)
    check_digest(path, file.sha256, INDEX_REMEDY)


def check_index_ranges(set_dir: Path, index: LengthIndex) -> None:
    """Raise DataError if a number in the index is outside its valid range.

    A wrong number would mislead planning and evaluation, which use the index before any sample is
    read.
    """
    manifest = index.manifest
    limits: tuple[tuple[NDArray[Any], int, int], ...] = (
        (index.lengths, 1, manifest.max_seq_length),
        (index.masked_counts, 1, manifest.max_predictions),
        (index.order_by_length, 0, manifest.num_samples - 1),
    )
    for (name, _), (values, low, high) in zip(manifest.index_arrays, limits, strict=True):
        if values.min() < low or values.max() > high:
            problem = f"contains numbers outside {low} .. {high}"
            raise DataError(str(set_dir / "index" / name), problem, INDEX_REMEDY)


def wrong_settings(
    set_dir: Path, manifest: Manifest, sidecars: Mapping[str, Sidecar]
) -> list[DataError]:
    """Return an error for each shard whose settings differ from those of the manifest.

    If the manifest lacks a setting, the value that most shards have is the correct one. `sidecars`
    maps the file name of each shard to its sidecar and must not be empty.
    """
    names = [field.name for field in fields(next(iter(sidecars.values())).settings)]
    wanted = {}
    for name in names:
        values = Counter(getattr(sidecar.settings, name) for sidecar in sidecars.values())
        wanted[name] = getattr(manifest, name, values.most_common(1)[0][0])
    problems = []
    for file, sidecar in sidecars.items():
        differing = [
            f"{name} = {getattr(sidecar.settings, name)} instead of {wanted[name]}"
            for name in names
            if getattr(sidecar.settings, name) != wanted[name]
        ]
        if differing:
            problem = f"was prepared with {', '.join(differing)}"
            problems.append(DataError(str(set_dir / "shards" / file), problem, MIXED_REMEDY))
    return problems


def repeated_texts(set_dir: Path, sidecars: Mapping[str, Sidecar]) -> list[DataError]:
    """Return an error for each shard with the same text or examples as an earlier shard."""
    before: dict[str, str] = {}
    problems = []
    remedy = "prepare the set in a new directory, and pass each text only once"
    for file, sidecar in sidecars.items():
        problems += _shared(set_dir, {file: sidecar}, before, remedy)
        for digest in _digests(sidecar):
            before.setdefault(digest, file)
    return problems


def shared_texts(
    eval_dir: Path, train: Mapping[str, Sidecar], held_out: Mapping[str, Sidecar]
) -> list[DataError]:
    """Return an error for each held-out shard whose text or examples are in the training set.

    `train` and `held_out` map the file names of shards to their sidecars.
    """
    trained_on = {
        digest: f"train's {file}" for file, sidecar in train.items() for digest in _digests(sidecar)
    }
    return _shared(eval_dir, held_out, trained_on, PAIR_REMEDY)


def _digests(sidecar: Sidecar) -> dict[str, str]:
    """Return the digests that a shard may have in common with another shard.

    The result maps each digest to a description of what shards with this digest have in common. The
    digest of the examples is included, because imported files can contain the same examples in
    several formats, which have different source digests.
    """
    descriptions = {sidecar.source_sha256: "was prepared from the same text as"}
    descriptions.setdefault(sidecar.examples_sha256, "has the same examples as")
    return descriptions


def _shared(
    set_dir: Path, sidecars: Mapping[str, Sidecar], others: Mapping[str, str], remedy: str
) -> list[DataError]:
    """Return an error for each shard that has a digest in common with `others`.

    `others` maps digests to file names.
    """
    problems = []
    for file, sidecar in sidecars.items():
        for digest, description in _digests(sidecar).items():
            if digest in others:
                where, problem = str(set_dir / "shards" / file), f"{description} {others[digest]}"
                problems.append(DataError(where, problem, remedy))
                break
    return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Both prepared sets, checked against the config and each other without reading a sample."""

    train: LengthIndex
    train_reader: SampleReader
    held_out: LengthIndex
    held_out_reader: SampleReader
    target_in_words: str


def open_data(config: RunConfig, data_dir: Path, *, checks_files: bool) -> RunData:
    """Open the prepared sets train and eval in `data_dir`, and check them without reading samples.

    With `checks_files`, all files except the shards' bytes are checked too. One rank of each node
    should do that.

    Raises ConfigError or DataError if the sets do not match the config or each other.
    """
    train, held_out = (open_index(data_dir / name, config) for name in ("train", "eval"))
    if train.manifest.vocabulary_sha256 != held_out.manifest.vocabulary_sha256:
        problem = f"train and eval in {data_dir} were prepared with different vocabularies"
        raise ConfigError("--data", problem, "prepare both sets with the same vocabulary")
    check_batch_fits(config, train, data_dir)
    if config.mlperf.division == "closed" and config.mlperf.enforce_rules:
        _check_closed_sets(config, train.manifest, held_out.manifest, data_dir)
    data = RunData(
        train=train,
        train_reader=SampleReader(data_dir / "train", train.manifest),
        held_out=held_out,
        held_out_reader=SampleReader(data_dir / "eval", held_out.manifest),
        target_in_words=_check_target(config, held_out),
    )
    if checks_files:
        _check_for_node(data)
    return data


def _check_for_node(data: RunData) -> None:
    """Check all files of both sets except the shards' bytes, on behalf of all ranks of a node.

    Raises DataError if a file was changed after its preparation, or if both sets or two shards of a
    set contain the same text.
    """
    for index, reader in ((data.train, data.train_reader), (data.held_out, data.held_out_reader)):
        set_dir, manifest = reader.set_dir, index.manifest
        vocabulary = set_dir / manifest.vocabulary_file
        check_digest(vocabulary, manifest.vocabulary_sha256, VOCABULARY_REMEDY)
        for entry in manifest.shards:
            check_sidecar_digest(set_dir, entry)
        sidecars = reader.sidecars()
        _raise_first(wrong_settings(set_dir, manifest, sidecars))
        _raise_first(repeated_texts(set_dir, sidecars))
        for file in manifest.index_files:
            check_index_file(set_dir, file)
        check_index_ranges(set_dir, index)
    held_out = data.held_out_reader
    trained_on = data.train_reader.sidecars()
    _raise_first(shared_texts(held_out.set_dir, trained_on, held_out.sidecars()))


def _raise_first(problems: list[DataError]) -> None:
    for problem in problems:
        raise problem


def open_index(set_dir: Path, config: RunConfig) -> LengthIndex:
    """Open the index of a prepared set.

    Raises ConfigError if the set does not match the config.
    """
    index = LengthIndex.open(set_dir)
    manifest = index.manifest
    if manifest.vocab_size != config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"{config.model.vocab_size} does not match the data in {set_dir}, whose vocabulary has "
            f"{manifest.vocab_size} entries",
            f"use {manifest.vocab_size}, or pass other data",
        )
    if manifest.segments == "single" and config.model.objective == "mlm_nsp":
        problem = f"'mlm_nsp' needs sentence pairs, but the data in {set_dir} has single segments"
        remedy = "use 'mlm', or prepare data with sentence pairs"
        raise ConfigError("model.objective", problem, remedy)
    limits = config.data.max_seq_length, config.data.max_predictions
    used_masks = manifest.max_predictions
    if used_masks > limits[1]:  # for example short sequences prepared with the default
        used_masks = int(index.masked_counts.max())
    for field, limit, used in (
        ("data.max_seq_length", limits[0], manifest.max_seq_length),
        ("data.max_predictions", limits[1], used_masks),
    ):
        if used > limit:
            problem = f"{limit} is too small for the data in {set_dir}, which needs {used}"
            raise ConfigError(field, problem, f"set it to at least {used}")
    return index


def _check_closed_sets(
    config: RunConfig, train: Manifest, held_out: Manifest, data_dir: Path
) -> None:
    """Raise ConfigError if the sets differ from those that the closed division requires.

    The config was already checked, so its lengths are those of the rules.
    """
    lengths = {name: getattr(config.data, name) for name in ("max_seq_length", "max_predictions")}
    of_eval = {**lengths, "num_samples": CLOSED_EVAL_SAMPLES}
    for name, manifest, required in (("train", train, lengths), ("eval", held_out, of_eval)):
        for key, value in required.items():
            if getattr(manifest, key) != value:
                problem = (
                    f"{data_dir / name} has {key} = {getattr(manifest, key)}, but the closed "
                    f"division requires {value}"
                )
                raise ConfigError("--data", problem, "prepare it as init_datasets.sh does")


def check_batch_fits(config: RunConfig, train: LengthIndex, data_dir: Path) -> None:
    """Raise ConfigError if a global batch has more samples than the training set."""
    global_batch_size, num_samples = config.parallel.global_batch_size, train.manifest.num_samples
    if global_batch_size > num_samples:
        problem = (
            f"{data_dir} has only {num_samples:,} training examples, but a global batch needs "
            f"{global_batch_size:,}"
        )
        remedy = "prepare more text, or lower parallel.local_batch_size"
        raise ConfigError("--data", problem, remedy)


def _check_target(config: RunConfig, held_out: LengthIndex) -> str:
    """Compare the target accuracy with the context-free baseline.

    Returns a line for the console that reports both accuracies. Raises ConfigError if the rules are
    enforced and the target is too close to the baseline.
    """
    baseline, target = held_out.manifest.baseline, config.eval.target
    words = "no target accuracy" if target is None else f"target accuracy {target:.4f}"
    if baseline is None:
        return words
    accuracy = baseline.context_free_accuracy
    lowest = LOWEST_TARGET_OVER_BASELINE * accuracy
    if config.mlperf.enforce_rules and target is not None and target < lowest:
        problem = f"{target} is too close to the context-free baseline, which is {accuracy:.4f}"
        remedy = f"use at least {lowest:.4f} ({LOWEST_TARGET_OVER_BASELINE} x the baseline)"
        raise ConfigError("eval.target_accuracy", problem, remedy)
    if target is not None:
        words += f", which is {target / accuracy:.2f} x the context-free baseline"
    return (
        f"{words}. The context-free baseline reaches {accuracy:.4f} on {baseline.masked_tokens:,} "
        f"held-out masked tokens, and {baseline.mask_only_accuracy:.4f} on [MASK] inputs"
    )


class ContentsCheck:
    """A context manager that checks the bytes of the shards in a thread.

    Args:
        readers: the readers of both sets. This is empty if another rank of the node runs the check.
        known: digest of the blocks of a large pair of sets, from the checkpoint from which the run
            resumes, or None if there is no such digest.
        host: host name to add to errors, or "" if all ranks are on one host.
    """

    def __init__(
        self, readers: Sequence[SampleReader], known: str | None = None, host: str = ""
    ) -> None:
        self._readers = readers
        self._known = known
        self._host = host
        self._is_left = threading.Event()
        self._found: Future[str | None] = Future()
        self._thread = threading.Thread(target=self._check, name="contents", daemon=True)
        self.was_asked = False

    def __enter__(self) -> Self:
        """Start the check. MLPerf's clock must already run, because the check reads samples."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the check, even if it has not finished."""
        self._is_left.set()
        self._thread.join(_LEAVE_S)

    def result(self) -> str | None:
        """Wait until the check has finished, and return the digest of a large pair's blocks.

        Returns None if the pair is small or another rank runs the check. Raises DataError if a
        shard does not match its digest, or if the blocks do not match `known`.
        """
        self.was_asked = True
        return self._found.result()

    def _check(self) -> None:
        try:
            self._found.set_result(self._digest())
        except BaseException as error:  # raised by `result`
            self._found.set_exception(error)

    def _digest(self) -> str | None:
        shards = [shard for reader in self._readers for shard in reader.shards]
        if sum(shard.sidecar.shard_bytes for shard in shards) <= SMALL_BYTES:
            for reader in self._readers:
                for shard, entry in zip(reader.shards, reader.manifest.shards, strict=True):
                    self._compare(shard, entry)
            return None
        found = self._digest_of_blocks(shards)
        if self._known not in (None, found):
            where = self._with_host(self._readers[0].set_dir.parent)
            problem = "the data has changed since the run started (blocks of its shards differ)"
            remedy = "restore the shards that `mlperf_bert verify --full` lists, or start a new run"
            raise DataError(where, problem, remedy)
        return found

    def _compare(self, shard: Shard, entry: ShardEntry) -> None:
        digest = hashlib.sha256()
        offsets = range(0, shard.sidecar.shard_bytes, _BYTES_AT_A_TIME)
        self._add(digest, shard.path, offsets, _BYTES_AT_A_TIME)
        if digest.hexdigest() != entry.sha256:
            raise digest_error(self._with_host(shard.path), SHARD_REMEDY)

    def _digest_of_blocks(self, shards: Sequence[Shard]) -> str:
        """Compute a digest of evenly spaced blocks of all shards.

        The positions of the blocks depend only on the sizes of the shards.
        """
        digest = hashlib.sha256()
        total = sum(shard.sidecar.shard_bytes for shard in shards)
        starts = [number * total // NUM_BLOCKS for number in range(NUM_BLOCKS)]
        first = 0
        for shard in shards:
            end = first + shard.sidecar.shard_bytes
            offsets = [start - first for start in starts if first <= start < end]
            self._add(digest, shard.path, offsets, BLOCK_BYTES)
            first = end
        return digest.hexdigest()

    def _add(self, digest: "_Hash", path: Path, offsets: Iterable[int], num_bytes: int) -> None:
        """Add `num_bytes` bytes of a file, starting at each of the offsets, to the digest.

        At the end of the file, fewer bytes are added.
        """
        try:
            with BufferedReader(open_regular_file(path)) as file:
                for offset in offsets:
                    if self._is_left.is_set():
                        return  # the result is not needed any more
                    file.seek(offset)
                    digest.update(file.read(num_bytes))
        except OSError as error:
            missing, where = "was deleted while the run was using it", Path(self._with_host(path))
            raise reading_error(where, error, missing=missing, remedy=SHARD_REMEDY) from None

    def _with_host(self, path: Path) -> str:
        return f"{path} on {self._host}" if self._host else str(path)
