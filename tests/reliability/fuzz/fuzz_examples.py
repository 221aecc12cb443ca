"""Examples of others: TFRecord files, tf.train.Example, HDF5 and its child, and that on ours."""

import atexit
import gzip
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from fuzz_mutations import mutate_bytes
from fuzz_world import Parser

from foreign_files import (
    Example,
    framed,
    reference_message,
    varint,
    write_fixed,
    write_packed,
    write_ragged,
    write_tfrecord,
    write_tfrecord_gz,
)
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import read_regular_file
from mlperf_bert.data.index import ShardSettings, read_sidecar
from mlperf_bert.prepare.foreign_rows import Rows
from mlperf_bert.prepare.hdf5_reader import ABSENT, FEATURES, NUM_ROWS
from mlperf_bert.prepare.import_examples import (
    READING,
    ROWS_READER,
    check_examples,
    collect_examples,
    read_hdf5,
    read_tfrecord,
)
from mlperf_bert.prepare.sandbox import Sandbox, sandbox
from mlperf_bert.prepare.tf_example import MOST_RECORD_BYTES
from mlperf_bert.prepare.verify.full import check_structure
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, Vocabulary
from verify_cases import shared_sandbox

WIDTH, ROOM = 16, 4
RECORDS, PACKED_RECORDS, MESSAGE, ROWS = "a.tfrecord", "b.tfrecord.gz", "message", "rows"
HDF5 = {"fixed.hdf5": write_fixed, "ragged.hdf5": write_ragged, "packed.hdf5": write_packed}
SHARD = "shards/part-0.hdf5"
_METADATA_BYTES = 4096  # of HDF5: where most of what describes the arrays lies
_HEAD_BYTES, _CHECKSUM_BYTES = 12, 4
_COUNTS = (-(2**31), -2, -1, 0, 1, 2, 5, 10, 2**16, 2**22, 2**22 + 1, 2**31 - 1)
WORDS = (*SPECIAL_TOKENS, *(f"w{number}" for number in range(95)))
VOCABULARY = Vocabulary(WORDS, {word: id_ for id_, word in enumerate(WORDS)}, "", b"")


def make_examples() -> list[Example]:
    """Right ones, few and short."""
    rng = Random(7)
    found = []
    for number, length in enumerate((12, 16, 9, 16, 14)):
        tokens = [rng.randrange(5, len(WORDS)) for _ in range(length)]
        start_of_b = rng.randrange(3, length - 2)
        tokens[0], tokens[start_of_b - 1], tokens[-1] = 2, 3, 3
        positions = sorted(rng.sample([1, *range(start_of_b, length - 1)], round(0.15 * length)))
        labels = [tokens[position] for position in positions]
        for position in positions:
            tokens[position] = 4
        found.append(
            {
                "input_ids": tokens,
                "segment_ids": [0] * start_of_b + [1] * (length - start_of_b),
                "masked_lm_positions": positions,
                "masked_lm_ids": labels,
                "next_sentence_labels": [number % 2],
            }
        )
    return found


def checked(path: Path, lots: Iterator[Rows]) -> object:
    """As an import takes them, up to the shard that it writes."""
    limits = ShardSettings(
        vocabulary_sha256="",
        max_seq_length=WIDTH,
        max_predictions=ROOM,
        seed=0,
        dupe_factor=1,
    )
    examples = collect_examples(path, lots, VOCABULARY, limits)
    check_examples(path, examples, VOCABULARY, limits)
    return examples


def make_records(directory: Path) -> None:
    write_tfrecord(directory / RECORDS, make_examples(), WIDTH, ROOM)
    write_tfrecord_gz(directory / PACKED_RECORDS, make_examples(), WIDTH, ROOM)


def parse_records(directory: Path) -> object:
    paths = (directory / RECORDS, directory / PACKED_RECORDS)
    return [checked(path, read_tfrecord(path)) for path in paths]


def repair_records(directory: Path, target: str) -> None:
    """Give the records of a plain file the checksums of what they are now, as far as they go."""
    if target != RECORDS:
        return
    contents = (directory / target).read_bytes()
    found, at = b"", 0
    while at + _HEAD_BYTES <= len(contents):
        length = int.from_bytes(contents[at : at + 8], "little")
        end = at + _HEAD_BYTES + min(length, len(contents))
        found += framed(contents[at + _HEAD_BYTES : end])
        at = end + _CHECKSUM_BYTES
    (directory / target).write_bytes(found)


def mutate_packed(rng: Random, contents: bytes) -> bytes:
    """Change a gzip file, or what is in it."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, contents)
    return gzip.compress(mutate_bytes(rng, gzip.decompress(contents)), 1, mtime=0)


def mutate_message(rng: Random, contents: bytes) -> bytes:
    """Change bytes, or put an integer of any size in the place of some."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, contents)
    at = rng.randrange(len(contents))
    number = rng.choice((rng.randrange(256), 2 ** rng.randrange(64), 2 ** rng.randrange(65) - 1))
    return contents[:at] + varint(number) + contents[at + rng.choice((0, 1, 1, 2)) :]


def contents_of(path: Path, limit: int) -> bytes:
    try:
        return read_regular_file(path, limit)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", "give another") from None


def make_message(directory: Path) -> None:
    """One example; all four of its masked positions are [MASK], which is too few to be judged."""
    (directory / MESSAGE).write_bytes(reference_message(make_examples()[1], WIDTH, ROOM))


def parse_message(directory: Path) -> object:
    contents = contents_of(directory / MESSAGE, MOST_RECORD_BYTES)
    framed_path = directory / "framed"
    framed_path.write_bytes(framed(contents))
    return checked(directory / MESSAGE, read_tfrecord(framed_path))


def mutate_hdf5(rng: Random, contents: bytes) -> bytes:
    """Change bytes, mostly of the metadata."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, contents)
    head, rest = contents[:_METADATA_BYTES], contents[_METADATA_BYTES:]
    return mutate_bytes(rng, head) + rest


def parse_structure(directory: Path) -> object:
    """A shard as `verify` looks at it; problems are returned, not raised: the first one is."""
    path = directory / SHARD
    for problem in check_structure(path, read_sidecar(path), shared_sandbox()):
        raise problem
    return None


def make_hdf5(directory: Path) -> None:
    for name, write in HDF5.items():
        write(directory / name, make_examples(), WIDTH, ROOM)


def parse_hdf5(directory: Path) -> object:
    paths = [directory / name for name in HDF5]
    return [checked(path, read_hdf5(path, _sandbox())) for path in paths]


def make_rows(directory: Path) -> None:
    """A child's answer for the file of variable length."""
    counts, values = [], b""
    for name in FEATURES:
        rows = [example.get(name) for example in make_examples()]
        counts.append([ABSENT if row is None else len(row) for row in rows])
        values += b"".join(np.array(row or [], "<i4").tobytes() for row in rows)
    table = np.array(counts, "<i4").T.tobytes()
    (directory / ROWS).write_bytes(NUM_ROWS.pack(len(make_examples())) + table + values)


def mutate_rows(rng: Random, contents: bytes) -> bytes:
    """Change bytes, or one of the counts."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, contents)
    at = NUM_ROWS.size + 4 * rng.randrange(len(FEATURES) * len(make_examples()))
    count = rng.choice(_COUNTS).to_bytes(4, "little", signed=True)
    return contents[:at] + count + contents[at + 4 :]


class Forger:
    """A child that a file took over: it answers what the file holds."""

    def read_pieces(self, path: Path, remedy: str) -> Iterator[bytearray]:
        """In pieces that fit nothing."""
        contents = contents_of(path, 2**24)
        for start in range(0, len(contents), 1000):
            yield bytearray(contents[start : start + 1000])


def parse_rows(directory: Path) -> object:
    path = directory / ROWS
    return checked(path, read_hdf5(path, Forger()))  # type: ignore[arg-type]


@cache
def _sandbox() -> Sandbox:
    """One server for all inputs, until this process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    # One in some hundred damaged files sends libhdf5 into a loop without end.
    limits = replace(READING, piece_cpu_seconds=1)
    return stack.enter_context(sandbox(ROWS_READER, limits))


EXAMPLE_PARSERS: Mapping[str, Parser] = {
    "tfrecord": Parser(
        make=make_records,
        targets={RECORDS: mutate_bytes, PACKED_RECORDS: mutate_packed},
        parse=parse_records,
        repair=repair_records,
    ),
    "tf_example": Parser(make=make_message, targets={MESSAGE: mutate_message}, parse=parse_message),
    "hdf5_rows": Parser(make=make_rows, targets={ROWS: mutate_rows}, parse=parse_rows),
    "hdf5_examples": Parser(
        make=make_hdf5,
        targets=dict.fromkeys(HDF5, mutate_hdf5),
        parse=parse_hdf5,
        inputs=5000,
    ),
}
