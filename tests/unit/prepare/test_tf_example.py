"""TFRecord files and tf.train.Example: every form that a writer may choose, nothing damaged."""

import gzip
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from foreign_files import field, floats, framed, integers, message, varint
from import_cases import as_dicts
from mlperf_bert.common.crc32c import masked_crc32c
from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare import tf_example
from mlperf_bert.prepare.tf_example import (
    BLOCK_BYTES,
    MOST_RECORD_BYTES,
    parse_examples,
    read_records,
    room_for_rows,
)
from support import run_process

RECORDS = [b"first", b"", bytes(range(40)), b"last one"]


def records_in(path: Path) -> list[bytes]:
    found: list[bytes] = []
    for block in read_records(path):
        assert block.first == len(found)
        assert block.ends[0] == 0
        assert block.ends[-1] == len(block.contents)
        found += [part.tobytes() for part in np.split(block.contents, block.ends[1:-1])]
    return found


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as raised:
        records_in(path)
    line = str(raised.value)
    assert line.startswith(f"{path}") and line.isprintable()
    return line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(b"".join(map(framed, RECORDS)))
    return file


def test_records_come_back(path: Path) -> None:
    assert records_in(path) == RECORDS
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert records_in(path) == RECORDS
    for records in ([], [b""]):
        path.write_bytes(b"".join(map(framed, records)))
        assert records_in(path) == records


def test_blocks_are_of_bounded_size(tmp_path: Path) -> None:
    records = [bytes([number]) * (BLOCK_BYTES // 3) for number in range(10)]
    path = tmp_path / "many"
    path.write_bytes(b"".join(map(framed, records)))
    sizes = [len(block.contents) for block in read_records(path)]
    assert 1 < len(sizes) < len(records) and max(sizes) < BLOCK_BYTES + MOST_RECORD_BYTES
    assert records_in(path) == records


def test_every_flipped_bit_is_found(path: Path) -> None:
    whole = path.read_bytes()
    ends = np.cumsum([len(framed(record)) for record in RECORDS])
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        number = np.searchsorted(ends, bit // 8, side="right")
        assert f"{path}: record {number}: has " in refusal(path)


def test_every_cut_is_found(path: Path) -> None:
    whole = path.read_bytes()
    ends = np.cumsum([len(framed(record)) for record in RECORDS])
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        if size in ends:  # as if the file ended there: nothing in it says how many there are
            assert records_in(path) == RECORDS[: int(np.searchsorted(ends, size)) + 1]
        else:
            assert "is cut short" in refusal(path)


def test_a_cut_or_changed_gzip_file_is_refused(path: Path) -> None:
    whole = gzip.compress(path.read_bytes())
    for size in range(len(tf_example._GZIP), len(whole)):
        path.write_bytes(whole[:size])
        assert "cannot be unpacked as gzip" in refusal(path)
    for place in range(10, len(whole)):  # what is before says when and how it was packed
        changed = bytearray(whole)
        changed[place] ^= 255
        path.write_bytes(changed)
        refusal(path)


@pytest.mark.parametrize("length", [MOST_RECORD_BYTES + 1, 2**31, 2**63, 2**64 - 1])
def test_a_length_is_not_believed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "huge"
    head = struct.pack("<Q", length)
    path.write_bytes(head + struct.pack("<I", masked_crc32c(head)) + b"short")
    assert f"record 0: has {length:,} bytes, at most" in refusal(path)


def test_what_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(framed(bytes(1000)) * 1000))
    assert len(records_in(path)) == 1000
    monkeypatch.setattr(tf_example, "MOST_UNPACKED_BYTES", 100_000)
    assert "record 99: begins after 100,000 bytes" in refusal(path)


def test_no_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none")
    assert "not a regular file" in refusal(tmp_path)


IDS = "input_ids"
WEIGHTS = "masked_lm_weights"


def parsed(*messages: bytes) -> tuple[int, list[dict[str, list[int]]]]:
    """The problem, and the features of each message."""
    contents = in_memory(b"".join(messages))
    ends = np.cumsum([0, *map(len, messages)])
    rows = room_for_rows(len(messages), len(contents))
    problem, record = parse_examples(contents, ends, rows)
    return (record, as_dicts(rows)) if problem == tf_example.RIGHT else (-problem, [])


def in_memory(contents: bytes) -> np.ndarray:
    """As the reader of files has it: for an array that cannot be written all is compiled anew."""
    return np.frombuffer(bytearray(contents), np.uint8)


def of_ids(feature: bytes) -> bytes:
    return message([(IDS, feature)])


def test_features_come_back_in_any_order() -> None:
    features = {name: [number, 2**31 - 1, 0, 300] for number, name in enumerate(tf_example.READ)}
    features[WEIGHTS] = [1, 0, 1, 1]
    pairs = [(name, integers(values)) for name, values in features.items()]
    others = [("other", floats([0.5])), ("input_id", integers([7])), ("", b"")]
    first, second = message([*pairs, *others]), message([*others, *pairs[::-1]])
    _, found = parsed(first, b"", second)
    assert found == [features, {}, features]


ONE_BY_ONE = field(3, b"\x08" + varint(5) + b"\x08" + varint(700))


@pytest.mark.parametrize(
    ("feature", "values"),
    [
        (integers([5, 700]), [5, 700]),
        (ONE_BY_ONE, [5, 700]),
        (field(3, field(1, varint(5)) + b"\x08" + varint(700)), [5, 700]),
        (field(3, field(2, b"else") + field(1, varint(5))), [5]),
        (field(3, b"\x10" + varint(2**64 - 1) + b"\x08\x05"), [5]),
        (field(3, b"\x15abcd\x11abcdefgh\x08\x05"), [5]),
        (field(4, b"else") + field(3, field(1, b"\x05")), [5]),
        (field(3, field(1, b"\x85\x80\x00")), [5]),  # longer than need be
        (field(3, b""), []),
        (field(1, b"bytes"), []),
        (b"", []),
    ],
)
def test_forms_of_a_list(feature: bytes, values: list[int]) -> None:
    assert parsed(of_ids(feature)) == (0, [{IDS: values}])


@pytest.mark.parametrize(
    "feature",
    [
        floats([1.0, 0.0, 1.0]),
        field(2, b"".join(b"\x0d" + struct.pack("<f", value) for value in (1, 0, 1))),
        integers([1, 0, 1]),
    ],
)
def test_weights_are_floats_or_integers(feature: bytes) -> None:
    assert parsed(message([(WEIGHTS, feature)])) == (0, [{WEIGHTS: [1, 0, 1]}])


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (of_ids(integers([-1])), tf_example.BAD_NUMBER),
        (of_ids(integers([2**31])), tf_example.BAD_NUMBER),
        (of_ids(field(3, field(1, b"\xff" * 9 + b"\x01"))), tf_example.BAD_NUMBER),
        (of_ids(field(3, field(1, b"\xff" * 10 + b"\x01"))), tf_example.MALFORMED),
        (of_ids(field(3, field(1, b"\xff"))), tf_example.MALFORMED),
        (of_ids(field(3, b"\x08")), tf_example.MALFORMED),
        (of_ids(floats([1.0])), tf_example.FLOATS),
        (message([(WEIGHTS, floats([0.5]))]), tf_example.BAD_WEIGHT),
        (message([(WEIGHTS, floats([float("nan")]))]), tf_example.BAD_WEIGHT),
        (message([(WEIGHTS, floats([-0.0]))]), tf_example.BAD_WEIGHT),
        (message([(WEIGHTS, field(2, field(1, b"abcde")))]), tf_example.MALFORMED),
        (message([(WEIGHTS, field(2, b"\x0dabc"))]), tf_example.MALFORMED),
        (message([(IDS, integers([5])), (IDS, integers([5]))]), tf_example.TWICE),
        (of_ids(integers([5]) + integers([5])), tf_example.TWICE),
        (of_ids(integers([5]) + floats([1.0])), tf_example.TWICE),
        (of_ids(integers([5])) * 2, tf_example.TWICE),
        (field(1, field(1, field(1, b"a") * 2)), tf_example.TWICE),
        (b"\x0b\x0c", tf_example.MALFORMED),  # a group
        (b"\x0f", tf_example.MALFORMED),  # a wire type that is none
        (b"\x02\x00", tf_example.MALFORMED),  # field 0
        (b"\x0a\x05abc", tf_example.MALFORMED),
        (b"\x0a\xff\xff\xff\xff\x07", tf_example.MALFORMED),
        (b"\x0a" + varint(2**64 - 1), tf_example.MALFORMED),
        (b"\x09abc", tf_example.MALFORMED),
        (b"\x80", tf_example.MALFORMED),
    ],
)
def test_what_is_refused(contents: bytes, problem: int) -> None:
    assert parsed(contents) == (-problem, [])
    good = of_ids(integers([5]))
    spans = np.cumsum([0, len(good), len(contents)])
    flat = in_memory(good + contents)
    found = parse_examples(flat, spans, room_for_rows(2, len(flat)))
    assert found == (problem, 1)


def test_every_cut_within_the_features_is_malformed() -> None:
    whole = message([(IDS, integers([5, 700])), (WEIGHTS, floats([1.0, 0.0]))])
    for size in range(1, len(whole)):
        assert parsed(whole[:size]) == (-tf_example.MALFORMED, [])


# The same functions not compiled: Python finds what lies outside an array, machine code does not.
UNCOMPILED = """
import sys
import numpy as np
from numba import config
assert config.DISABLE_JIT
from mlperf_bert.prepare import foreign_rows, tf_example
from test_tf_example import mutated_messages, taken
with np.errstate(all="raise"):
    for each in mutated_messages(int(sys.argv[1])):
        print(*taken(each))
"""


def mutated_messages(count: int) -> list[bytes]:
    """Messages of an example with some bytes changed, their lengths too."""
    rng = random.Random(5)
    found = []
    for _ in range(count):
        features = {
            "input_ids": [2, 7, 3, 8, 3, 0],
            "input_mask": [1, 1, 1, 1, 1, 0],
            "segment_ids": [0, 0, 0, 1, 1, 0],
            "masked_lm_positions": [1, 0],
            "masked_lm_ids": [7, 0],
            "next_sentence_labels": [1],
        }
        for values in features.values():
            if rng.random() < 0.1:
                values[rng.randrange(len(values))] = rng.choice((0, 1, 2, 9, 2**31 - 1))
            if rng.random() < 0.05:
                values.pop()
        weights = ("masked_lm_weights", floats([1.0, 0.0]))
        pairs = [(name, integers(values)) for name, values in features.items()]
        whole = bytearray(message([*pairs, weights]))
        for _ in range(rng.choice((0, 0, 1, 3))):
            whole[rng.randrange(len(whole))] = rng.choice((0, 1, 2, 10, 26, 127, 128, 255))
        found.append(bytes(whole[: rng.choice((len(whole), len(whole), rng.randrange(200)))]))
    return found


def taken(contents: bytes) -> tuple[int, ...]:
    """The result for a message: both problems, and a sum over the values."""
    from mlperf_bert.prepare.foreign_rows import Bounds, room_for, take_rows

    flat = in_memory(contents)
    rows = room_for_rows(1, len(flat))
    problem, _ = parse_examples(flat, np.array([0, len(flat)]), rows)
    if problem != tf_example.RIGHT:
        return int(problem), 0, 0
    found = room_for(rows)
    count, problem, _ = take_rows(rows, Bounds(10, 0, 8, 2), found)
    total = found.input_ids[: found.offsets[count]].sum() if problem == 0 else 0
    return int(count), int(problem), int(total)


def test_compiled_and_plain_agree_on_anything() -> None:
    count = 3000
    here = Path(__file__).parent
    paths = (f"sys.path[:0] = {[str(here), str(here.parents[1])]!r}\n", UNCOMPILED)
    code = "import sys\n" + "".join(paths)
    done = run_process("env", "NUMBA_DISABLE_JIT=1", sys.executable, "-c", code, count)
    assert done.returncode == 0, done.stderr
    expected = [taken(each) for each in mutated_messages(count)]
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert found == expected
    assert len({each[:2] for each in expected}) > 12  # most problems there are, and none
