"""Single segments: every word once a pass, whole sentences where they fit, masked by the rule."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.gather import Gatherer
from mlperf_bert.data.index import LengthIndex, Manifest, masked_count_table
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.prepare.whole_sequences import cut
from support import prepare_small, write_synthetic_text
from verify_cases import check, failed, spoil, write_vocabulary

SIZES = {"max_seq_length": 24, "max_predictions": 4, "dupe_factor": 1, "segments": "single"}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("words") / "words.txt")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("texts")
    paths = [directory / f"part-{number}.txt" for number in range(3)]
    for number, path in enumerate(paths):
        write_synthetic_text(path, 30, seed=number)
    return paths


def samples_of(set_dir: Path, manifest: Manifest) -> Samples:
    return SampleReader(set_dir, manifest).read(np.arange(manifest.num_samples))


def shard_rows(set_dir: Path, half: int) -> tuple[np.ndarray, list[int]]:
    """Text and masked positions of one of the two passes of the set's first shard."""
    manifest = LengthIndex.open(set_dir).manifest
    num = manifest.shards[0].num_samples // 2
    samples = SampleReader(set_dir, manifest).read(np.arange(num) + half * num)
    rows = np.repeat(np.cumsum(samples.lengths) - samples.lengths, samples.masked_counts)
    text = samples.input_ids.copy()
    text[rows + samples.masked_positions] = samples.masked_ids
    return text, samples.masked_positions.tolist()


def plain_cut(documents: list[list[int]], room: int) -> list[int]:
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
def test_cuts_equal_the_plain_rule(documents: list[list[int]], room: int) -> None:
    lengths = [length for sentences in documents for length in sentences]
    ends = cut(
        np.cumsum([0, *lengths]), np.cumsum([0, *(len(sentences) for sentences in documents)]), room
    )
    assert np.diff(np.concatenate(([0], ends))).tolist() == plain_cut(documents, room)


def test_every_word_is_there_once_in_its_order(
    vocabulary: Path, texts: list[Path], tmp_path: Path
) -> None:
    manifest = prepare_small(texts[:1], vocabulary, tmp_path / "set", **SIZES)
    samples = samples_of(tmp_path / "set", manifest)
    rows = np.repeat(np.cumsum(samples.lengths) - samples.lengths, samples.masked_counts)
    text = samples.input_ids.copy()
    text[rows + samples.masked_positions] = samples.masked_ids
    sequences = np.split(text, np.cumsum(samples.lengths)[:-1])
    assert {(each[0], each[-1]) for each in sequences} == {(manifest.cls_id, manifest.sep_id)}
    words = [token for each in sequences for token in each[1:-1].tolist()]
    written = texts[0].read_text(encoding="utf-8").split()
    assert words == [5 + int(word[1:]) for word in written]
    assert samples.lengths.max() <= SIZES["max_seq_length"]
    assert samples.segment_b_start.tolist() == samples.lengths.tolist()
    assert not samples.next_sentence_label.any()
    table = masked_count_table(24, 4, 0.15)
    assert samples.masked_counts.tolist() == table[samples.lengths].tolist()


def test_the_set_says_what_it_is_and_passes_verification(
    vocabulary: Path, texts: list[Path], tmp_path: Path
) -> None:
    for name, files in (("train", texts[:2]), ("eval", texts[2:])):
        prepare_small(files, vocabulary, tmp_path / name, with_baseline=name == "eval", **SIZES)
    manifest = LengthIndex.open(tmp_path / "train").manifest
    assert (manifest.segments, manifest.vocabulary_file) == ("single", "vocab.txt")
    assert b'"segments": "single"' in (tmp_path / "train/shards/part-0.hdf5.json").read_bytes()
    assert failed(check(tmp_path, full=True)) == {}


SPOILED = {
    "segment_b_start is not its end": ("segment_b_start", 3, lambda value: value - 1),
    "next_sentence_label is not 0": ("next_sentence_label", 3, lambda value: 1),
    "inside its text": ("input_ids", 3, lambda value: 3),
    "is on [CLS], on [SEP] or outside": ("masked_lm_positions", 0, lambda value: 0),
}


@pytest.mark.parametrize("words", SPOILED)
def test_what_is_no_sequence_is_found(
    vocabulary: Path, texts: list[Path], tmp_path: Path, words: str
) -> None:
    prepare_small(texts[:1], vocabulary, tmp_path / "set", **SIZES)
    name, row, change = SPOILED[words]

    def spoiled(arrays: dict[str, np.ndarray]) -> None:
        unmasked = np.setdiff1d(np.arange(1, 20), arrays["masked_lm_positions"][:4])
        place = int(unmasked[1]) if name == "input_ids" else row
        arrays[name][place] = change(arrays[name][place])

    spoil(tmp_path / "set/shards/part-0.hdf5", spoiled)
    assert words in failed(check(tmp_path / "set", full=True))["shard contents"]


def test_a_segment_b_is_refused_when_it_is_read(
    vocabulary: Path, texts: list[Path], tmp_path: Path
) -> None:
    prepare_small(texts[:1], vocabulary, tmp_path / "set", **SIZES)

    def spoiled(arrays: dict[str, np.ndarray]) -> None:
        arrays["segment_b_start"][3] -= 1

    spoil(tmp_path / "set/shards/part-0.hdf5", spoiled)
    reader = SampleReader(tmp_path / "set", LengthIndex.open(tmp_path / "set").manifest)
    ids = np.arange(2, 5)
    with pytest.raises(DataError, match=r"segment_b_start: is out of range in sample 3"):
        reader.read(ids)
    with pytest.raises(DataError, match=r"segment_b_start: is out of range in sample 3"):
        Gatherer(reader).batch(ids, mlm_denominator=1.0, nsp_denominator=1.0)


def test_a_set_of_pairs_is_written_as_ever(
    vocabulary: Path, texts: list[Path], tmp_path: Path
) -> None:
    prepare_small(texts[:1], vocabulary, tmp_path / "set", **{**SIZES, "segments": "pair"})
    for file in ("index/dataset.json", "shards/part-0.hdf5.json"):
        contents = (tmp_path / "set" / file).read_bytes()
        assert b"segments" not in contents and b"vocabulary_file" not in contents


def test_passes_differ_in_their_masks_alone_and_workers_in_nothing(
    vocabulary: Path, texts: list[Path], tmp_path: Path
) -> None:
    made = {}
    for name, options in {
        "once": {},
        "twice": {"dupe_factor": 2},
        "by two": {"workers": 2},
    }.items():
        manifest = prepare_small(texts, vocabulary, tmp_path / name, **{**SIZES, **options})
        made[name] = samples_of(tmp_path / name, manifest)
    for field in fields(Samples):
        once, by_two = (getattr(made[name], field.name) for name in ("once", "by two"))
        assert np.array_equal(once, by_two)
    once, twice = made["once"], made["twice"]
    assert sorted(twice.lengths.tolist()) == sorted([*once.lengths.tolist()] * 2)
    # The first text comes first in both, and its first pass is the only one of `once`.
    of_first = int(once.masked_counts[: len(twice.lengths) // 8].sum())
    first, second = (shard_rows(tmp_path / "twice", number) for number in (0, 1))
    assert np.array_equal(first[0], second[0]) and first[1] != second[1]
    assert np.array_equal(twice.masked_positions[:of_first], once.masked_positions[:of_first])


def test_texts_do_not_share_their_masks(
    vocabulary: Path, texts: list[Path], tmp_path: Path
) -> None:
    """Their first sequences have the same number and lengths, and the same seed."""
    sentence = " ".join(f"w{number}" for number in range(22))
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text((f"{sentence}\n" * 40) + f"\n{name}\n")
    made = [
        prepare_small([tmp_path / f"{name}.txt"], vocabulary, tmp_path / name, **SIZES)
        for name in ("a", "b")
    ]
    first, second = (
        samples_of(tmp_path / name, manifest)
        for name, manifest in zip(("a", "b"), made, strict=True)
    )
    assert first.lengths.tolist() == second.lengths.tolist()
    assert not np.array_equal(first.masked_positions, second.masked_positions)


def test_a_text_without_words_is_one_line(vocabulary: Path, tmp_path: Path) -> None:
    path = tmp_path / "nothing.txt"
    path.write_text("\x00\x00\n")
    with pytest.raises(DataError) as caught:
        prepare_small([path], vocabulary, tmp_path / "set", **SIZES)
    assert "0 documents with words" in str(caught.value)
