"""Checks of prepared sets: against the config and each other, and of the shards' bytes.

Before the clock starts, only vocabularies, manifests, sidecars and index are read, no sample. Each
check raises the DataError it finds, or returns all of them. Every rank checks the files it will
use; the first rank of each node checks everything else.

Sizes and sidecars do not show a flipped bit, and MLPerf forbids touching samples before the clock
starts. So the check of the bytes begins right after `run_start`, in a thread beside training, and a
run's first result waits for it. The shards of a small pair of sets are hashed and compared with the
manifests. Of a large pair only blocks are read. No manifest knows their digest, so checkpoints keep
it, and a resumed run compares.
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

from mlperf_bert.config.run_config import RunConfig
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
    "`mlperf_bert prepare` command again; other finished shards are kept"
)
VOCABULARY_REMEDY = "put the vocabulary back that the set was made with, or prepare a new set"
MIXED_REMEDY = "keep the shards of one preparation only: prepare the set in a new directory"
PAIR_REMEDY = "prepare both with the same vocabulary, from different texts"
LOWEST_TARGET_OVER_BASELINE = 1.5

SMALL_BYTES = 2 * 2**30  # of all shards together, which are hashed in seconds
NUM_BLOCKS = 512
BLOCK_BYTES = 64 * 2**10
_BYTES_AT_A_TIME = 2**20
_LEAVE_S = 5.0  # a disk that does not answer must not hold up the end


def check_sidecar_digest(set_dir: Path, entry: ShardEntry) -> None:
    """Raise DataError if a shard's sidecar is not the one that the manifest names."""
    path = sidecar_path(set_dir / "shards" / entry.file)
    check_digest(path, entry.sidecar_sha256, SHARD_REMEDY)


def check_index_file(set_dir: Path, file: IndexFile) -> None:
    """Raise DataError if an index file's size or digest differs from the manifest's."""
    path = set_dir / "index" / file.file
    check_size(path, file.size_bytes, INDEX_REMEDY)
    check_digest(path, file.sha256, INDEX_REMEDY)


def check_index_ranges(set_dir: Path, index: LengthIndex) -> None:
    """Raise DataError if a number in the index is out of its valid range.

    Planning and evaluation look up samples by these numbers before anything is read.
    """
    manifest = index.manifest
    limits: tuple[tuple[NDArray[Any], int, int], ...] = (
        (index.lengths, 1, manifest.max_seq_length),
        (index.masked_counts, 1, manifest.max_predictions),
        (index.order_by_length, 0, manifest.num_samples - 1),
    )
    for (name, _), (values, low, high) in zip(manifest.index_arrays, limits, strict=True):
        if values.min() < low or values.max() > high:
            problem = f"holds numbers outside {low} .. {high}"
            raise DataError(str(set_dir / "index" / name), problem, INDEX_REMEDY)


def wrong_settings(
    set_dir: Path, manifest: Manifest, sidecars: Mapping[str, Sidecar]
) -> list[DataError]:
    """Errors for shards whose settings differ from the manifest's: of another preparation.

    A setting missing in the manifest must equal that of most shards. `sidecars` are by the shard's
    file name, at least one.
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
    """Errors for shards with the same text or examples as an earlier one, such as copies."""
    before: dict[str, str] = {}
    problems = []
    remedy = "prepare the set in a new directory, with each text once"
    for file, sidecar in sidecars.items():
        problems += _shared(set_dir, {file: sidecar}, before, remedy)
        for digest in _digests(sidecar):
            before.setdefault(digest, file)
    return problems


def shared_texts(
    eval_dir: Path, train: Mapping[str, Sidecar], held_out: Mapping[str, Sidecar]
) -> list[DataError]:
    """Errors for held-out shards whose text or examples are also trained on."""
    trained_on = {
        digest: f"train's {file}" for file, sidecar in train.items() for digest in _digests(sidecar)
    }
    return _shared(eval_dir, held_out, trained_on, PAIR_REMEDY)


def _digests(sidecar: Sidecar) -> dict[str, str]:
    """The digests that a shard can share with another -> the words for it.

    Foreign files hold the same examples in several forms, which have digests of their own.
    """
    said = {sidecar.source_sha256: "was made from the same text as"}
    if sidecar.examples_sha256 is not None:
        said.setdefault(sidecar.examples_sha256, "holds the same examples as")
    return said


def _shared(
    set_dir: Path, sidecars: Mapping[str, Sidecar], others: Mapping[str, str], remedy: str
) -> list[DataError]:
    """Errors for shards that share a digest with `others`, one each, naming the first."""
    problems = []
    for file, sidecar in sidecars.items():
        words = [
            f"{said} {others[each]}" for each, said in _digests(sidecar).items() if each in others
        ]
        problems += [DataError(str(set_dir / "shards" / file), word, remedy) for word in words[:1]]
    return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Both prepared sets, checked against the config and each other; no sample read."""

    train: LengthIndex
    train_reader: SampleReader
    held_out: LengthIndex
    held_out_reader: SampleReader
    target_in_words: str


def open_data(config: RunConfig, data_dir: Path, rank: int) -> RunData:
    """Open `data_dir`/train and /eval. Raises ConfigError or DataError for contradictions."""
    train, held_out = (open_index(data_dir / name, config) for name in ("train", "eval"))
    if train.manifest.vocabulary_sha256 != held_out.manifest.vocabulary_sha256:
        raise ConfigError(
            "--data",
            f"{data_dir}: train and eval were made with different vocabularies",
            "prepare both with the same one",
        )
    check_batch_fits(config, train, data_dir)
    data = RunData(
        train=train,
        train_reader=SampleReader(data_dir / "train", train.manifest),
        held_out=held_out,
        held_out_reader=SampleReader(data_dir / "eval", held_out.manifest),
        target_in_words=_check_target(config, held_out),
    )
    if rank % config.parallel.ranks_per_node == 0:
        _check_for_node(data)
    return data


def _check_for_node(data: RunData) -> None:
    """Raise DataError unless all files but the shards are as prepared and no text repeats."""
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
    """Open a prepared set and check it against the config."""
    index = LengthIndex.open(set_dir)
    manifest = index.manifest
    if manifest.vocab_size != config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"is {config.model.vocab_size}, the data in {set_dir} has {manifest.vocab_size}",
            "set it to the data's, or give other data",
        )
    if manifest.segments == "single" and config.model.objective == "mlm_nsp":
        raise ConfigError(
            "model.objective",
            f"is 'mlm_nsp', the examples in {set_dir} are no sentence pairs",
            "set it to 'mlm', or prepare pairs",
        )
    limits = config.data.max_seq_length, config.data.max_predictions
    used_masks = manifest.max_predictions
    if used_masks > limits[1]:  # for example short sequences prepared with the default
        used_masks = int(index.masked_counts.max())
    for field, limit, used in (
        ("data.max_seq_length", limits[0], manifest.max_seq_length),
        ("data.max_predictions", limits[1], used_masks),
    ):
        if used > limit:
            raise ConfigError(
                field, f"is {limit}, the data in {set_dir} needs {used}", "raise it to that"
            )
    return index


def check_batch_fits(config: RunConfig, train: LengthIndex, data_dir: Path) -> None:
    """Raise ConfigError for a global batch of more samples than the set has."""
    global_batch_size, num_samples = config.parallel.global_batch_size, train.manifest.num_samples
    if global_batch_size > num_samples:
        problem = f"{data_dir} has too few examples: {num_samples:,}, "
        problem += f"a global batch needs {global_batch_size:,}"
        remedy = "give more text, or a smaller parallel.local_batch_size"
        raise ConfigError("--data", problem, remedy)


def _check_target(config: RunConfig, held_out: LengthIndex) -> str:
    """Compare the target with the context-free baseline; return both in words."""
    baseline, target = held_out.manifest.baseline, config.eval.target
    words = "no target" if target is None else f"target accuracy {target:.4f}"
    if baseline is None:
        return words
    accuracy = baseline.context_free_accuracy
    lowest = LOWEST_TARGET_OVER_BASELINE * accuracy
    if config.mlperf.enforce_rules and target is not None and target < lowest:
        raise ConfigError(
            "eval.target_accuracy",
            f"{target} is {target / accuracy:.2f} x the context-free baseline {accuracy:.4f}",
            f"set it to at least {lowest:.4f}, {LOWEST_TARGET_OVER_BASELINE} x the baseline",
        )
    words += ";" if target is None else f" is {target / accuracy:.2f} x"
    return (
        f"{words} the context-free baseline {accuracy:.4f} ({baseline.masked_tokens:,} held-out "
        f"masked tokens); most frequent token on [MASK] inputs {baseline.mask_only_accuracy:.4f}"
    )


class ContentsCheck:
    """A context that checks the shards in a thread; see above.

    Args:
        readers: of both sets; none on a rank whose node has another rank that checks.
        known: the digest of a large pair in the checkpoint that the run resumes from, if any.
        host: named in errors; empty if all ranks are on one.
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
        """The clock has started: samples may be read."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading."""
        self._is_left.set()
        self._thread.join(_LEAVE_S)

    def result(self) -> str | None:
        """Wait for the end of the check; the digest of a large pair's blocks, else None.

        Raises DataError if a shard differs from its digest, or the blocks from those `known`.
        """
        self.was_asked = True
        return self._found.result()

    def _check(self) -> None:
        try:
            self._found.set_result(self._digest())
        except BaseException as error:  # raised where the result is asked for
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
            where = self._place(self._readers[0].set_dir.parent)
            problem = "has changed since the run began (blocks of its shards differ)"
            remedy = "put the shards back that `mlperf_bert verify --full` names, or begin anew"
            raise DataError(where, problem, remedy)
        return found

    def _compare(self, shard: Shard, entry: ShardEntry) -> None:
        digest = hashlib.sha256()
        places = range(0, shard.sidecar.shard_bytes, _BYTES_AT_A_TIME)
        self._add(digest, shard.path, places, _BYTES_AT_A_TIME)
        if digest.hexdigest() != entry.sha256:
            raise digest_error(self._place(shard.path), SHARD_REMEDY)

    def _digest_of_blocks(self, shards: Sequence[Shard]) -> str:
        """The digest of blocks at even distances over all shards, by their sizes alone."""
        digest = hashlib.sha256()
        total = sum(shard.sidecar.shard_bytes for shard in shards)
        starts = [number * total // NUM_BLOCKS for number in range(NUM_BLOCKS)]
        first = 0
        for shard in shards:
            end = first + shard.sidecar.shard_bytes
            places = [start - first for start in starts if first <= start < end]
            self._add(digest, shard.path, places, BLOCK_BYTES)
            first = end
        return digest.hexdigest()

    def _add(self, digest: "_Hash", path: Path, places: Iterable[int], num_bytes: int) -> None:
        """Add `num_bytes` from each of these places of a file on, fewer at its end."""
        try:
            with BufferedReader(open_regular_file(path)) as file:
                for place in places:
                    if self._is_left.is_set():
                        return  # nobody asks for the result
                    file.seek(place)
                    digest.update(file.read(num_bytes))
        except OSError as error:
            missing, where = "was removed while it was used", Path(self._place(path))
            raise reading_error(where, error, missing=missing, remedy=SHARD_REMEDY) from None

    def _place(self, path: Path) -> str:
        return f"{path} on {self._host}" if self._host else str(path)
