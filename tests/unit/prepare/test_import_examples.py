"""Examples of others: the same in every format give the same shard; what is none is one line."""

import argparse
import atexit
import functools
import os
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from foreign_files import WRITERS, Writer, examples_of, write_fixed, write_packed, write_ragged
from mlperf_bert.data.index import LengthIndex, Manifest
from mlperf_bert.data.shards import SampleReader, Shard
from mlperf_bert.data.sidecar import ShardSettings
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.prepare.cli import add_arguments, run
from mlperf_bert.prepare.foreign_examples import check_examples, collect_examples
from mlperf_bert.prepare.hdf5_rows import READING, ROWS_READER, read_hdf5
from mlperf_bert.prepare.import_examples import import_set
from mlperf_bert.prepare.sandbox import Sandbox, sandbox
from mlperf_bert.prepare.vocabulary import load_vocabulary
from support import prepare_small, run_cli

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
VOCAB = GOLDEN / "own_vocab.txt"
OF_TENSORFLOW = Path(__file__).parents[2] / "data" / "tensorflow"
WIDTH, ROOM = 64, 10
SMALL = {"max_seq_length": WIDTH, "max_predictions": ROOM}
NAMES = ("part-0", "part-1")


@pytest.fixture(scope="module")
def from_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set that `prepare --text` makes of two texts."""
    directory = tmp_path_factory.mktemp("from_text")
    documents = (GOLDEN / "own_sentences.txt").read_text(encoding="utf-8").split("\n\n")
    for number, name in enumerate(NAMES):
        (directory / f"{name}.txt").write_text("\n\n".join(documents[number::2]), encoding="utf-8")
    texts = [directory / f"{name}.txt" for name in NAMES]
    prepare_small(texts, VOCAB, directory / "set", **SMALL, dupe_factor=5)
    return directory / "set"


@pytest.fixture(scope="module")
def foreign(from_text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Ending -> both parts as files of that kind."""
    found: dict[str, list[Path]] = {}
    for ending, write in WRITERS.items():
        directory = tmp_path_factory.mktemp("foreign")
        found[ending] = [directory / f"{name}.{ending}" for name in NAMES]
        for name, path in zip(NAMES, found[ending], strict=True):
            write(path, examples_of(shard_of(from_text, name)), WIDTH, ROOM)
    return found


def shard_of(set_dir: Path, name: str) -> Path:
    return set_dir / "shards" / f"{name}.hdf5"


def bring(files: list[Path], out: Path, **changes: Any) -> Manifest:
    """`import_set` with small limits, the format by the file's ending."""
    format_name = "hdf5" if files[0].suffix == ".hdf5" else "tfrecord"
    options = {**SMALL, "workers": 1, "pick_eval": None, "format_name": format_name}
    vocab = changes.pop("vocab", VOCAB)
    return import_set(files, vocab, out, quiet=True, **{**options, **changes})


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_gives_the_shards_of_the_text(
    foreign: dict[str, list[Path]], from_text: Path, tmp_path: Path, ending: str
) -> None:
    # Processes take their time to start: one format has two.
    workers = 2 if ending == "packed.hdf5" else 1
    manifest = bring(foreign[ending][::-1], tmp_path / "set", workers=workers)
    assert [entry.num_samples for entry in manifest.shards] == [
        entry.num_samples for entry in Manifest.load(from_text).shards
    ]
    for path, name in zip(foreign[ending], NAMES, strict=True):
        ours = shard_of(tmp_path / "set", path.stem)
        # Equal arrays give equal bytes, and unequal ones do not.
        assert ours.read_bytes() == shard_of(from_text, name).read_bytes()
    found, expected = (LengthIndex.open(each) for each in (tmp_path / "set", from_text))
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.masked_counts, expected.masked_counts)


@pytest.mark.parametrize("ending", ["tfrecord", "tfrecord.gz"])
def test_what_tensorflow_wrote_is_read_equal(tmp_path: Path, ending: str) -> None:
    path = OF_TENSORFLOW / f"own_seq64_dupe3_seed12345.{ending}"
    bring([path], tmp_path / "set")
    arrays = Shard(shard_of(tmp_path / "set", path.stem)).arrays()
    golden = np.load(GOLDEN / "own_seq64_dupe3_seed12345.npz")
    assert len(golden["input_ids"]) > 6000
    for name in golden:
        np.testing.assert_array_equal(getattr(arrays, name), golden[name])


def test_a_restart_keeps_finished_shards(foreign: dict[str, list[Path]], tmp_path: Path) -> None:
    files, set_dir = foreign["tfrecord"], tmp_path / "set"
    bring(files, set_dir)
    before = contents(set_dir)
    kept, lost = (shard_of(set_dir, name) for name in NAMES)
    kept_since = kept.stat().st_mtime_ns
    shutil.rmtree(set_dir / "index")
    os.truncate(lost, lost.stat().st_size - 1)
    (set_dir / "shards" / f".{NAMES[1]}.hdf5.1.tmp").write_bytes(b"left by a killed run")
    bring(files, set_dir)
    assert contents(set_dir) == before
    assert kept.stat().st_mtime_ns == kept_since


def test_other_limits_or_files_in_the_same_directory_are_refused(
    foreign: dict[str, list[Path]], tmp_path: Path
) -> None:
    files = [Path(shutil.copy(path, tmp_path)) for path in foreign["tfrecord"]]
    bring(files, tmp_path / "set")
    before = contents(tmp_path / "set")
    with pytest.raises(DataError, match="max_seq_length = 64, now it is 128"):
        bring(files, tmp_path / "set", max_seq_length=128)
    shutil.copy(files[1], files[0])
    with pytest.raises(DataError, match=r"part-0.*text sha256"):
        bring(files, tmp_path / "set")
    assert contents(tmp_path / "set") == before


def test_a_file_that_is_there_twice_is_found_by_the_check_at_the_end(
    foreign: dict[str, list[Path]], tmp_path: Path
) -> None:
    path = foreign["tfrecord"][0]
    twin = Path(shutil.copy(path, tmp_path / "twin.tfrecord"))
    with pytest.raises(DataError, match="was made from the same text as part-0"):
        bring([path, twin], tmp_path / "set")


def test_pick_eval_takes_evenly_and_stores_the_baseline(
    foreign: dict[str, list[Path]], from_text: Path, tmp_path: Path
) -> None:
    (path, _) = foreign["fixed.hdf5"]
    picked = bring([path], tmp_path / "set", pick_eval=7)
    everything = Manifest.load(from_text)
    total = everything.shards[0].num_samples
    expected = SampleReader(from_text, everything).read(
        np.array([int(i * total / 7) for i in range(7)])
    )
    found = SampleReader(tmp_path / "set", picked).read(np.arange(7))
    np.testing.assert_array_equal(found.input_ids, expected.input_ids)
    assert picked.baseline is not None
    assert picked.baseline.masked_tokens == len(found.masked_ids)
    with pytest.raises(DataError, match=f"holds {total} examples where 5000 are to be picked"):
        bring([path], tmp_path / "more", pick_eval=5000)


def test_a_vocabulary_of_more_than_sixteen_bits(
    foreign: dict[str, list[Path]], from_text: Path, tmp_path: Path
) -> None:
    words = VOCAB.read_text(encoding="utf-8").splitlines()
    words += [f"more{number}" for number in range(70_000)]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(words) + "\n", encoding="utf-8")
    # Fewer random tokens than one in ten are those that the larger vocabulary would have given.
    bring(foreign["tfrecord"][:1], tmp_path / "set", vocab=vocab)
    found = Shard(shard_of(tmp_path / "set", NAMES[0])).arrays()
    assert found.input_ids.dtype == np.uint32
    expected = Shard(shard_of(from_text, NAMES[0])).arrays()
    np.testing.assert_array_equal(found.input_ids, expected.input_ids)


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
        (changed(input_ids=put(3, 1, -1)), r"row 3: has input_ids outside the vocabulary"),
        (changed(masked_lm_ids=put(5, 0, 480)), r"row 5: has masked_lm_ids outside the voc"),
        (changed(masked_lm_positions=put(5, 0, 64)), r"row 5: has masked_lm_positions outside"),
        (changed(masked_lm_positions=put(5, 0, 0)), r"row 5: has something else than zeros after"),
        (changed(input_mask=put(2, 1, 0)), r"row 2: has an input_mask that is not ones"),
        (changed(input_mask=fill(0)), r"row 0: has something else than zeros where"),
        (changed(segment_ids=put(4, 0, 1)), r"row 4: has segment_ids that are not zeros"),
        (changed(segment_ids=fill(0)), r"row 0: has segment_ids that are not zeros and then"),
        (changed(next_sentence_labels=fill(2)), r"row 0: has a next_sentence_labels other"),
        (changed(input_ids=put(6, 0, 7)), r"does not begin with \[CLS\]: sample 6"),
        (changed(masked_lm_positions=fill(0), masked_lm_ids=fill(0)), "row 0: has an example with"),
        (changed(next_sentence_labels=fill(0)), "labels are 1, half or more belong"),
        (changed(input_ids=lambda values: values[:-1]), "rows, input_ids has"),
        (changed(input_ids=lambda values: values[:, :-1]), "row 0: has segment_ids or input_mask"),
        (changed(input_ids=lambda values: values / 1), "input_ids holds no integers"),
        (changed(input_ids=lambda values: values[0]), "rows, input_ids has 64"),
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
        split_sentences=False,
        pick_eval=None,
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


def assert_no_set(set_dir: Path) -> None:
    assert contents(set_dir).keys() <= {"vocab.txt"}


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


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"max_seq_length": 63}, "more tokens than --max-seq-length"),
        ({"max_predictions": 9}, "more masked positions than --max-predictions"),
        ({"max_seq_length": 128, "max_predictions": 20}, None),  # the limit of ten did not bind
        ({"max_seq_length": 7}, "max_seq_length: is 7"),
        ({"workers": 0}, "workers: is 0"),
    ],
)
def test_limits(
    foreign: dict[str, list[Path]], tmp_path: Path, limits: dict[str, int], problem: str | None
) -> None:
    (path, _) = foreign["tfrecord"]
    if problem is None:
        assert bring([path], tmp_path / "set", **limits).num_samples > 0
        return
    with pytest.raises((DataError, ConfigError), match=problem):
        bring([path], tmp_path / "set", **limits)


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


def test_command_line(foreign: dict[str, list[Path]], tmp_path: Path) -> None:
    words = ("--vocab", VOCAB, "--max-seq-length", WIDTH, "--max-predictions", ROOM)
    words = (*words, "--workers", 1)
    files = foreign["packed.hdf5"]
    done = run_cli("prepare", "--hdf5", *files, "--out", tmp_path / "set", *words)
    assert done.returncode == 0, done.stderr
    manifest = Manifest.load(tmp_path / "set")
    assert f"{manifest.num_samples} examples in 2 shards" in done.stdout
    assert manifest.corpus == {"examples": "imported from HDF5 files"}
    done = run_cli("prepare", "--tfrecord", *files, "--out", tmp_path / "other", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "part-0.packed.hdf5: record 0: has a length that differs" in done.stderr


def test_an_option_that_does_not_go_with_it(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--hdf5", "a.hdf5", "--vocab", "v", "--out", str(tmp_path), "--seed", "1"]
    with pytest.raises(ConfigError, match="--seed: does not go with --hdf5"):
        run(parser.parse_args(words))
