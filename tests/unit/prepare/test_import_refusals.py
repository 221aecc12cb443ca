"""What is no right file of examples of others: one line that says which row, and no shard."""

import atexit
import functools
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import h5py
import numpy as np
import pytest

from foreign_files import Writer, examples_of, write_fixed, write_packed, write_ragged
from import_cases import NAMES, ROOM, SMALL, VOCAB, WIDTH, bring, shard_of
from mlperf_bert.common.errors import DataError
from mlperf_bert.data.index import ShardSettings
from mlperf_bert.prepare.import_examples import (
    READING,
    ROWS_READER,
    check_examples,
    collect_examples,
    read_hdf5,
)
from mlperf_bert.prepare.sandbox import Sandbox, sandbox
from mlperf_bert.vocabulary.word_pieces import load_vocabulary
from support import contents

OF_TENSORFLOW = Path(__file__).parents[2] / "data/tensorflow/own_seq64_dupe3_seed12345.tfrecord"
Change = Callable[[Path], None]


def changed(**arrays: Callable[[np.ndarray], object]) -> Change:
    """A change of the datasets of these names, in place or by what is returned."""

    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            for name, function in arrays.items():
                values = file[name][()]
                result = function(values)
                values = values if result is None else np.asarray(result)
                del file[name]
                file[name] = values

    return change


def put(row: int, column: int, value: int) -> Callable[[np.ndarray], None]:
    def function(values: np.ndarray) -> None:
        values[row, column] = value

    return function


def fill(value: int) -> Callable[[np.ndarray], None]:
    return lambda values: values.fill(value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed(input_ids=put(3, 1, 480)), r"row 3: has input_ids outside the vocabulary"),
        (changed(masked_lm_positions=put(5, 0, 64)), r"row 5: has masked_lm_positions outside"),
        (changed(input_mask=fill(0)), r"row 0: has something else than zeros where"),
        (changed(segment_ids=put(4, 0, 1)), r"row 4: has segment_ids that are not zeros"),
        (changed(next_sentence_labels=fill(2)), r"row 0: has a next_sentence_labels other"),
        (changed(input_ids=put(6, 0, 7)), r"does not begin with \[CLS\]: sample 6"),
        (changed(masked_lm_positions=fill(0), masked_lm_ids=fill(0)), "row 0: has an example with"),
        (changed(next_sentence_labels=fill(0)), "labels are 1, half or more belong"),
        (changed(input_ids=lambda values: values[:, :-1]), "row 0: has segment_ids or input_mask"),
        (changed(input_ids=lambda values: values[None]), "input_ids has 3 dimensions"),
        (changed(input_ids=lambda values: values.astype(np.int64) + 2**40), "32 bits cannot hold"),
    ],
)
def test_a_wrong_row_is_named(
    foreign: dict[str, list[Path]], tmp_path: Path, change: Change, problem: str
) -> None:
    path = Path(shutil.copy(foreign["fixed.hdf5"][0], tmp_path))
    change(path)
    line = refusal(path)
    assert line.startswith(f"{path}") and line.isprintable()
    assert re.search(problem, line)


def refusal(path: Path) -> str:
    """The line with which an HDF5 file is refused."""
    vocabulary = load_vocabulary(VOCAB)
    limits = ShardSettings(
        **SMALL,
        vocabulary_sha256=vocabulary.sha256,
        seed=0,
        dupe_factor=1,
    )
    with pytest.raises(DataError) as raised:
        examples = collect_examples(path, read_hdf5(path, shared_sandbox()), vocabulary, limits)
        check_examples(path, examples, vocabulary, limits)
    return str(raised.value)


@functools.cache
def shared_sandbox() -> Sandbox:
    """One for all tests: it takes longer to start than a test."""
    running = ExitStack()
    atexit.register(running.close)
    return running.enter_context(sandbox(ROWS_READER, READING))


@pytest.mark.parametrize("write", [write_fixed, write_ragged, write_packed])
def test_examples_that_are_there_twice_are_refused(
    from_text: Path, tmp_path: Path, write: Writer
) -> None:
    examples = examples_of(shard_of(from_text, NAMES[0]))
    write(tmp_path / "a.hdf5", [*examples, *examples[::-1]], WIDTH, ROOM)
    assert "examples are copies of others" in refusal(tmp_path / "a.hdf5")


def test_other_masking_is_refused(from_text: Path, tmp_path: Path) -> None:
    examples = examples_of(shard_of(from_text, NAMES[0]))
    mask_id = load_vocabulary(VOCAB).mask_id
    for example in examples:
        for position in example["masked_lm_positions"]:
            example["input_ids"][position] = mask_id
    write_ragged(tmp_path / "a.hdf5", examples, WIDTH, ROOM)
    assert "masked positions are [MASK], about" in refusal(tmp_path / "a.hdf5")
    for example in examples:
        for name in ("masked_lm_positions", "masked_lm_ids"):
            del example[name][1:]
    write_ragged(tmp_path / "a.hdf5", examples, WIDTH, ROOM)
    assert "has not min(max_predictions, max(1, round(0.15" in refusal(tmp_path / "a.hdf5")


@pytest.mark.parametrize("option", ["tfrecord", "hdf5"])
@pytest.mark.parametrize("kind", ["garbage", "text", "zeros", "truncated", "a shard of ours"])
def test_what_is_no_file_of_examples_is_one_line(
    foreign: dict[str, list[Path]], from_text: Path, tmp_path: Path, option: str, kind: str
) -> None:
    whole = foreign["tfrecord" if option == "tfrecord" else "ragged.hdf5"][0].read_bytes()
    contents_of = {
        "garbage": np.random.default_rng(7).bytes(5000),
        "text": b"One sentence.\nAnother.\n\nA document.\n",
        "zeros": bytes(5000),
        "truncated": whole[: len(whole) // 2],
        "a shard of ours": shard_of(from_text, NAMES[0]).read_bytes(),
    }
    path = tmp_path / f"wrong.{option}"
    path.write_bytes(contents_of[kind])
    with pytest.raises(DataError) as raised:
        bring([path], tmp_path / "set", format_name=option)
    line = str(raised.value)
    assert line.startswith(f"{path}") and line.isprintable() and len(line) < 300
    assert contents(tmp_path / "set").keys() == {"vocab.txt"}
