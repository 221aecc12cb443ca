"""Single segments: every word once a pass, whole sentences where they fit, masked by the rule."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.data.index import LengthIndex, masked_count_table
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import DataError
from mlperf_bert.prepare.whole_sequences import cut
from verify_cases import make_pair, prepare_set, problems, spoil

SIZES = {"max_seq_length": 24, "max_predictions": 4, "dupe_factor": 1, "segments": "single"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Three texts to train on, one held out; not to be changed."""
    return make_pair(tmp_path_factory.mktemp("single"), **SIZES)


def texts_of(pair):
    return [pair.parent / f"{name}.txt" for name in ("a", "b", "c")]


def samples_of(set_dir, first=0, count=None):
    manifest = LengthIndex.open(set_dir).manifest
    ids = np.arange(first, manifest.num_samples if count is None else first + count)
    return SampleReader(set_dir, manifest).read(ids)


def text_of(samples):
    rows = np.repeat(np.cumsum(samples.lengths) - samples.lengths, samples.masked_counts)
    text = samples.input_ids.copy()
    text[rows + samples.masked_positions] = samples.masked_ids
    return text


def plain_cut(documents, room):
    """Lengths of the sequences of documents of sentences of so many tokens."""
    found = []
    for sentences in documents:
        length = 0
        for sentence in sentences:
            if length and length + sentence > room:
                found.append(length)
                length = 0
            length += sentence
            while length > room:
                found.append(room)
                length -= room
        found.append(length)
    return found


@settings(max_examples=200, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), max_size=6),
    room=st.integers(1, 25),
)
def test_cuts_equal_the_plain_rule(documents, room):
    lengths = [length for sentences in documents for length in sentences]
    ends = cut(
        np.cumsum([0, *lengths]), np.cumsum([0, *(len(sentences) for sentences in documents)]), room
    )
    assert np.diff(np.concatenate(([0], ends))).tolist() == plain_cut(documents, room)


def test_every_word_is_there_once_in_its_order_and_the_set_says_what_it_is(pair):
    manifest = LengthIndex.open(pair / "train").manifest
    assert (manifest.segments, manifest.vocabulary_file) == ("single", "vocab.txt")
    assert problems(pair, full=True) == ""
    samples = samples_of(pair / "train")
    sequences = np.split(text_of(samples), np.cumsum(samples.lengths)[:-1])
    assert {(each[0], each[-1]) for each in sequences} == {(2, 3)}  # [CLS] and [SEP]
    words = [token for each in sequences for token in each[1:-1].tolist()]
    written = [word for path in texts_of(pair) for word in path.read_text(encoding="utf-8").split()]
    assert words == [5 + int(word[1:]) for word in written]
    assert samples.lengths.max() <= SIZES["max_seq_length"]
    assert samples.segment_b_start.tolist() == samples.lengths.tolist()
    assert not samples.next_sentence_label.any()
    table = masked_count_table(24, 4, 0.15)
    assert samples.masked_counts.tolist() == table[samples.lengths].tolist()


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("segment_b_start", -1, "segment_b_start is not the length"),
        ("next_sentence_label", 1, "next_sentence_label is not 0"),
    ],
)
def test_what_is_no_sequence_is_found(pair, tmp_path, name, more, words):
    set_dir = Path(shutil.copytree(pair / "eval", tmp_path / "set"))

    def spoiled(arrays):
        arrays[name][3] = int(arrays[name][3]) + more

    spoil(set_dir / "shards/held.hdf5", spoiled)
    assert words in problems(set_dir, full=True)
    if name == "segment_b_start":
        reader = SampleReader(set_dir, LengthIndex.open(set_dir).manifest)
        with pytest.raises(
            DataError, match=r"segment_b_start: sample 3 has a value that is out of range"
        ):
            reader.read(np.arange(2, 5))


def test_passes_differ_in_their_masks_alone(pair, tmp_path):
    prepare_set(texts_of(pair), tmp_path / "twice", **{**SIZES, "dupe_factor": 2})
    once, twice = samples_of(pair / "train"), samples_of(tmp_path / "twice")
    assert sorted(twice.lengths.tolist()) == sorted([*once.lengths.tolist()] * 2)
    # The first text comes first in both, and its first pass is the only one of `once`.
    num = LengthIndex.open(tmp_path / "twice").manifest.shards[0].num_samples // 2
    first, second = (samples_of(tmp_path / "twice", half * num, num) for half in (0, 1))
    assert np.array_equal(text_of(first), text_of(second))
    assert not np.array_equal(first.masked_positions, second.masked_positions)
    of_first = len(first.masked_positions)
    assert np.array_equal(first.masked_positions, once.masked_positions[:of_first])


def test_texts_do_not_share_their_masks(tmp_path):
    """Their first sequences have the same number and lengths, and the same seed."""
    sentence = " ".join(f"w{number}" for number in range(22))
    for name in ("a", "b"):
        text = tmp_path / f"{name}.txt"
        text.write_text((f"{sentence}\n" * 40) + f"\n{name}\n")
        prepare_set([text], tmp_path / name, **SIZES)
    first, second = (samples_of(tmp_path / name) for name in ("a", "b"))
    assert first.lengths.tolist() == second.lengths.tolist()
    assert not np.array_equal(first.masked_positions, second.masked_positions)
