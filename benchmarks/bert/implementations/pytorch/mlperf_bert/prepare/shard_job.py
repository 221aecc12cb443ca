"""One text file to one finished shard: the unit of work of a preparation, safe to repeat.

A shard is an HDF5 file of contiguous arrays, then the sidecar that completes it.
"""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.atomic import replaced_file, write_file
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import file_sha256
from mlperf_bert.data.index import (
    DatasetPlace,
    Segments,
    ShardSettings,
    Sidecar,
    read_sidecar,
    sidecar_path,
)
from mlperf_bert.prepare.documents import Documents, read_text, tokenize_documents
from mlperf_bert.prepare.examples import (
    ExampleArrays,
    ExampleMaker,
    compile_examples,
    pick_evenly,
)
from mlperf_bert.prepare.whole_sequences import SequenceMaker, compile_sequences
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, load_any_vocabulary, make_encoder

# Every array starts at a cache line, so that the mapped int64 tables are aligned.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class ShardJob:
    """The text, the shard to make of it, and how."""

    text_path: Path
    shard_path: Path
    vocab_path: Path
    settings: ShardSettings


def compile_maker(segments: Segments, vocabulary: AnyVocabulary) -> None:
    """Compile what `make_shard` runs, once: else all workers would, and write the same cache.

    Raises ConfigError where numba's cache cannot be used.
    """
    if segments == "single":
        compile_sequences(vocabulary)
    else:
        compile_examples(vocabulary)


def make_shard(job: ShardJob) -> None:
    """Make one shard unless it is there.

    Raises DataError for the text's or vocabulary's faults, and where memory does not suffice.
    """
    try:
        _make_shard(job)
    except MemoryError:
        remedy = "split the text, lower the dupe factor or use fewer workers"
        problem = "needs more memory than there is"
        raise DataError(str(job.text_path), problem, remedy) from None


def _make_shard(job: ShardJob) -> None:
    # The text is held no longer than it takes to split it: the examples need the memory.
    source = read_text(job.text_path)
    source_sha256 = source.sha256
    if is_finished(job, source_sha256):
        return
    settings = job.settings
    vocabulary = load_any_vocabulary(job.vocab_path)
    documents = tokenize_documents(
        source.text, make_encoder(vocabulary), split=settings.split_sentences
    )
    del source
    examples = _make_examples(job, documents, vocabulary, source_sha256)
    if settings.pick_eval is not None:
        if len(examples) < settings.pick_eval:
            problem = f"gives {len(examples)} examples where {settings.pick_eval} are to be picked"
            remedy = "pick fewer, or raise the dupe factor"
            raise DataError(str(job.text_path), problem, remedy)
        examples = pick_evenly(examples, settings.pick_eval)
    write_shard(
        job.shard_path,
        examples,
        source_name=job.text_path.name,
        source_sha256=source_sha256,
        settings=settings,
    )


def _make_examples(
    job: ShardJob, documents: Documents, vocabulary: AnyVocabulary, source_sha256: str
) -> ExampleArrays:
    settings = job.settings
    _check_documents(job.text_path, documents, 1 if settings.segments == "single" else 2)
    if settings.segments == "single":
        return SequenceMaker(
            vocabulary,
            max_seq_length=settings.max_seq_length,
            max_predictions=settings.max_predictions,
            seed=settings.seed,
            source_sha256=source_sha256,
        ).make(documents, settings.dupe_factor)
    maker = ExampleMaker(
        vocabulary,
        max_seq_length=settings.max_seq_length,
        max_predictions=settings.max_predictions,
        seed=settings.seed,
    )
    return maker.make(documents, settings.dupe_factor)


def _check_documents(path: Path, documents: Documents, least: int) -> None:
    # With a single document the reference would silently pair it with itself and call the second
    # segment a random other one, which teaches a wrong next-sentence label.
    if len(documents) < least:
        problem = f"has {len(documents)} documents with words, {least} are needed"
        raise DataError(str(path), problem, "separate documents by an empty line")


def is_finished(job: ShardJob, source_sha256: str | None) -> bool:
    """Whether the shard is there, whole and made this way; `None` leaves the text unchecked."""
    if not sidecar_path(job.shard_path).exists():
        return False
    try:
        sidecar = read_sidecar(job.shard_path)
    except DataError:
        return False  # a damaged sidecar vouches for nothing: make the shard again
    pairs = {
        f"setting {field.name}": (
            getattr(sidecar.settings, field.name),
            getattr(job.settings, field.name),
        )
        for field in fields(job.settings)
    }
    pairs["text sha256"] = (sidecar.source_sha256, source_sha256 or sidecar.source_sha256)
    for name, (before, now) in pairs.items():
        if before != now:
            problem = f"was finished with {name} = {before}, now it is {now}"
            remedy = "name a new directory or delete this one"
            raise DataError(str(job.shard_path), problem, remedy)
    return job.shard_path.is_file() and job.shard_path.stat().st_size == sidecar.shard_bytes


if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def write_shard(
    path: Path,
    examples: ExampleArrays,
    *,
    source_name: str,
    source_sha256: str,
    settings: ShardSettings,
) -> Sidecar:
    """Write `path` and `<path>.json`, each beside and then renamed, the sidecar last.

    Equal examples give equal bytes. Raises DataError when a file cannot be written.
    """
    # A sidecar of an earlier shard must not stand beside the new file, not even for a moment.
    sidecar_path(path).unlink(missing_ok=True)
    with replaced_file(path) as temporary:
        datasets = _write_arrays(temporary, examples)
        digest = file_sha256(temporary)
        size = temporary.stat().st_size
    sidecar = Sidecar(
        shard_bytes=size,
        shard_sha256=digest,
        num_samples=len(examples),
        source_name=source_name,
        source_sha256=source_sha256,
        settings=settings,
        datasets=datasets,
        examples_sha256=_digest(examples),
    )
    write_file(sidecar_path(path), sidecar.to_json())
    return sidecar


class _PatientFile(io.FileIO):
    """Keeps the error of a full disk from libhdf5 (2.0), which ends the process on it.

    After the first error nothing more is written; `check` raises it.
    """

    error: OSError | None = None

    def write(self, contents: "ReadableBuffer", /) -> int:
        """Write all of it, unless that failed before."""
        left = memoryview(contents).cast("B")
        try:
            while left and self.error is None:
                left = left[super().write(left) :]
        except OSError as error:
            self.error = error
        return memoryview(contents).nbytes

    def truncate(self, size: int | None = None, /) -> int:
        """Set the size, unless something failed before."""
        try:
            if self.error is None:
                return super().truncate(size)
        except OSError as error:
            self.error = error
        return self.tell() if size is None else size

    def check(self) -> None:
        """Raise the first error."""
        if self.error is not None:
            raise self.error


def _write_arrays(path: Path, examples: ExampleArrays) -> dict[str, DatasetPlace]:
    with _PatientFile(path, "w+") as opened:
        places = _write_hdf5(opened, examples)
        opened.check()
    return places


def _write_hdf5(opened: _PatientFile, examples: ExampleArrays) -> dict[str, DatasetPlace]:
    places = {}
    with h5py.File(
        opened, "w", alignment_threshold=ALIGNMENT_BYTES, alignment_interval=ALIGNMENT_BYTES
    ) as file:
        for name, stored in _stored_arrays(examples):
            # No time stamps: the same examples must give the same bytes.
            dataset = file.create_dataset(name, data=stored, track_times=False)
            offset = dataset.id.get_offset()
            if offset is None:
                raise DataError(f"{opened.name!s}: {name}", "has no elements", "give more text")
            places[name] = DatasetPlace(stored.dtype.str, stored.size, offset)
    return places


def _digest(examples: ExampleArrays) -> str:
    digest = hashlib.sha256()
    for name, stored in _stored_arrays(examples):
        digest.update(f"{name} {stored.dtype.str} {stored.size}\n".encode())
        digest.update(np.ascontiguousarray(stored).data)
    return digest.hexdigest()


def _stored_arrays(examples: ExampleArrays) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and values of each array, little endian."""
    for field in fields(examples):
        values: NDArray[Any] = getattr(examples, field.name)
        yield field.name, values.astype(values.dtype.newbyteorder("<"), copy=False)
