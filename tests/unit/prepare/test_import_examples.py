"""Examples of others: the shards of the same text; what is wrong is one line, and no shard."""

import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from foreign_files import WRITERS, examples_of, write_fixed
from import_cases import NAMES, ROOM, SMALL, VOCAB, WIDTH, bring, shard_of
from mlperf_bert.__main__ import main
from mlperf_bert.data.index import (
    LengthIndex,
    Manifest,
    ShardSettings,
    examples_digest,
    read_sidecar,
)
from mlperf_bert.data.shards import Shard
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.prepare.build import ShardJob
from mlperf_bert.prepare.import_examples import import_shard
from mlperf_bert.prepare.verify import verify
from support import contents, prepare_small, refusal


@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_gives_the_shards_of_the_text(foreign, from_text, tmp_path, ending):
    # Processes take their time to start: one format has two.
    workers = 2 if ending == "fixed.hdf5" else 1
    manifest = bring(foreign[ending][::-1], tmp_path / "set", workers=workers)
    assert [entry.num_samples for entry in manifest.shards] == [
        entry.num_samples for entry in Manifest.load(from_text).shards
    ]
    for path, name in zip(foreign[ending], NAMES, strict=True):
        ours = shard_of(tmp_path / "set", path.stem)
        # Equal arrays give equal bytes, and unequal ones do not.
        assert ours.read_bytes() == shard_of(from_text, name).read_bytes()
    digests = {
        examples_digest(read_sidecar(path) for path in sorted(each.glob("shards/*.hdf5")))
        for each in (tmp_path / "set", from_text)
    }
    assert len(digests) == 1 and None not in digests
    found, expected = (LengthIndex.open(each) for each in (tmp_path / "set", from_text))
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.masked_counts, expected.masked_counts)


def test_a_restart_keeps_finished_shards(foreign, tmp_path):
    files, set_dir = foreign["fixed.hdf5"][:1], tmp_path / "set"
    bring(files, set_dir)
    made = shard_of(set_dir, files[0].stem).stat()
    shutil.rmtree(set_dir / "index")
    bring(files, set_dir)
    assert shard_of(set_dir, files[0].stem).stat().st_mtime_ns == made.st_mtime_ns


def test_a_vocabulary_of_more_than_sixteen_bits(from_text, tmp_path):
    vocab = tmp_path / "vocab.txt"
    more = "".join(f"more{each}\n" for each in range(70_000))
    vocab.write_text(VOCAB.read_text(encoding="utf-8") + more, encoding="utf-8")
    text = from_text.parent / f"{NAMES[0]}.txt"
    prepare_small([text], vocab, tmp_path / "made", **SMALL, dupe_factor=1)
    made = shard_of(tmp_path / "made", NAMES[0])
    path = tmp_path / f"{NAMES[0]}.hdf5"
    write_fixed(path, examples_of(made), WIDTH, ROOM)
    bring([path], tmp_path / "set", vocab=vocab)
    found = Shard(shard_of(tmp_path / "set", NAMES[0])).arrays().input_ids
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, Shard(made).arrays().input_ids)


def test_the_same_examples_twice_are_found_in_any_form(foreign, tmp_path):
    path = foreign["fixed.hdf5"][0]
    twin = Path(shutil.copy(path, tmp_path / "twin.hdf5"))
    with pytest.raises(DataError, match="was prepared from the same text as part-0"):
        bring([path, twin], tmp_path / "twice")
    kinds = ("fixed.hdf5", "fixed_gzip.hdf5")
    twins = [Path(shutil.copy(foreign[kind][0], tmp_path / kind)) for kind in kinds]
    with pytest.raises(DataError, match=r"has the same examples as fixed\.hdf5"):
        bring(twins, tmp_path / "set")
    for kind, part in zip(kinds, ("train", "eval"), strict=True):
        bring(foreign[kind][:1], tmp_path / "pair" / part)
    (problem,) = verify(tmp_path / "pair", full=False, workers=1, quiet=True).problems
    assert "has the same examples as train's part-0" in str(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_seq_length": 63}, "more tokens than --max-seq-length"),
        ({"max_predictions": 9}, "more masked positions than --max-predictions"),
        ({"vocab": Path("tokenizer.json")}, r"--vocab.*pass the vocab\.txt"),
    ],
)
def test_limits_and_vocabularies_that_do_not_fit(foreign, tmp_path, changes, problem):
    with pytest.raises((DataError, ConfigError), match=problem):
        bring(foreign["fixed.hdf5"][:1], tmp_path / "set", **changes)


def test_command_line(foreign, tmp_path, capsys):
    words = ["prepare", "--hdf5", *foreign["fixed.hdf5"], "--vocab", VOCAB, "--workers", 1]
    words += ["--max-seq-length", 128, "--max-predictions", 20]  # the limit of ten did not bind
    assert main([str(word) for word in (*words, "--out", tmp_path / "set")]) == 0
    manifest = Manifest.load(tmp_path / "set")
    assert f"{manifest.num_samples} examples in 2 shards" in capsys.readouterr().out
    assert manifest.corpus == {"examples": "imported from HDF5 files"}
    words[2] = VOCAB
    error = refusal(capsys, *words, "--out", tmp_path / "other")
    assert "own_vocab.txt: cannot be read (" in error


def problem_of(path):
    """The line with which an HDF5 file is refused."""
    settings = ShardSettings(**SMALL, seed=0, dupe_factor=1)
    with pytest.raises(DataError) as raised:
        import_shard(ShardJob(path, path.with_name("none.hdf5"), VOCAB, settings))
    return str(raised.value)


def put(place, value):
    def change(values):
        values[place] = value
        return values

    return change


def ragged(rows):
    """Rows of their own lengths, as packed and unpadded files have them."""
    found = np.empty(len(rows), dtype=h5py.vlen_dtype(np.int32))
    for number, row in enumerate(rows):
        found[number] = row
    return found


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("input_ids", put((3, 1), 480), r"row 3: has input_ids outside the vocabulary"),
        ("masked_lm_positions", put((5, 0), 64), r"row 5: has masked_lm_positions outside"),
        ("input_mask", put(..., 0), r"row 0: has values other than zeros where"),
        ("segment_ids", put((4, 0), 1), r"row 4: has segment_ids that are not zeros"),
        ("next_sentence_labels", put(..., 2), r"row 0: has next_sentence_labels other"),
        ("input_ids", put((6, 0), 7), r"does not start with \[CLS\]: sample 6"),
        ("masked_lm_positions", put(..., 0), "row 0: has values other than zeros after"),
        ("masked_lm_ids", put((2, 0), 480), r"row 2: has masked_lm_ids outside the vocabulary"),
        ("masked_lm_ids", put((2, 0), -1), r"row 2: has masked_lm_ids outside the vocabulary"),
        ("input_mask", put((3, 1), 0), "row 3: has an input_mask that is not ones and then zeros"),
        ("input_mask", put((3, slice(4, None)), 0), "row 3: has values other than zeros where"),
        ("next_sentence_labels", put(..., 0), "next_sentence_label: is 0 in all "),
        ("input_ids", lambda ids: ids + np.int64(2**40), "row 0: has input_ids outside"),
        ("input_ids", lambda ids: ids[:, :-1], "input_mask has the shape"),
        ("input_ids", lambda ids: ids[None], "input_ids has the shape"),
        ("input_ids", lambda ids: ids + 0.5, "input_ids is not an array of integers"),
        ("masked_lm_ids", lambda ids: ids[:, :-1], "masked_lm_ids has the shape"),
        ("next_sentence_labels", lambda labels: labels[1:], "differ in their number of rows"),
        ("input_mask", lambda _: None, "cannot be read .*input_mask"),
        ("segment_ids", ragged, "segment_ids is not an array of integers"),
    ],
)
def test_a_wrong_row_is_named(foreign, tmp_path, name, change, problem):
    path = Path(shutil.copy(foreign["fixed.hdf5"][0], tmp_path))
    with h5py.File(path, "r+") as file:
        values = change(file[name][()])
        del file[name]
        if values is not None:
            file[name] = values
    line = problem_of(path)
    assert line.startswith(f"{path}") and line.isprintable()
    assert re.search(problem, line)


def test_another_share_of_masks_is_refused(from_text, tmp_path):
    examples = examples_of(shard_of(from_text, NAMES[0]))
    for example in examples:
        for name in ("masked_lm_positions", "masked_lm_ids"):
            del example[name][1:]
    write_fixed(tmp_path / "a.hdf5", examples, WIDTH, ROOM)
    assert "does not have min(max_predictions, max(1, round(0.15" in problem_of(tmp_path / "a.hdf5")


@pytest.mark.parametrize("kind", ["garbage", "text", "zeros", "truncated", "a shard of ours"])
def test_what_is_no_file_of_examples_is_one_line(foreign, from_text, tmp_path, kind):
    whole = foreign["fixed.hdf5"][0].read_bytes()
    contents_of = {
        "garbage": np.random.default_rng(7).bytes(5000),
        "text": b"One sentence.\nAnother.\n\nA document.\n",
        "zeros": bytes(5000),
        "truncated": whole[: len(whole) // 2],
        "a shard of ours": shard_of(from_text, NAMES[0]).read_bytes(),
    }
    path = tmp_path / "wrong.hdf5"
    path.write_bytes(contents_of[kind])
    with pytest.raises(DataError) as raised:
        bring([path], tmp_path / "set")
    line = str(raised.value)
    assert line.startswith(f"{path}") and line.isprintable() and len(line) < 300
    assert contents(tmp_path / "set").keys() == {"vocab.txt"}
