"""The full check of `verify`: forged contents and structure."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from mlperf_bert.data.index import (
    INDEX_ARRAYS,
    Manifest,
    masked_count_table,
    read_sidecar,
    sidecar_path,
)
from verify_cases import (
    VOCAB_SIZE,
    Arrays,
    check,
    failed,
    first_checks,
    flip,
    mend_digests,
    prepare_set,
    shard,
    sign,
    spoil,
    write_vocabulary,
)

MASK, SEP, CLS, PAD = 4, 3, 2, 0
CHECK = "HDF5 structure"


def test_a_good_pair_passes_alike_with_one_process_and_two(made: Path) -> None:
    alone, together = (check(made, full=True, workers=workers) for workers in (1, 2))
    assert alone.problems() == []
    assert alone.to_json() == together.to_json()
    assert all(one.status == "ok" for part in alone.sets for one in part.checks)


def test_the_fast_check_reads_small_shards_only(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(shard(pair), 8 * read_sidecar(shard(pair)).datasets["input_ids"].offset)
    for full in (False, True):
        assert set(failed(check(pair, full=full))) == {"shard digests"}
    monkeypatch.setattr("mlperf_bert.prepare.verify.check.SMALL_BYTES", 0)
    assert failed(check(pair)) == {}
    assert set(failed(check(pair, full=True))) == {"shard digests"}


def test_a_flipped_bit_anywhere_is_found(pair: Path) -> None:
    size = shard(pair).stat().st_size
    places = np.random.default_rng(0).integers(0, 8 * size, 12).tolist()
    for bit in [0, *places, 8 * size - 1]:
        flip(shard(pair), bit)
        assert str(shard(pair)) in failed(check(pair / "train", full=True))["shard digests"]
        flip(shard(pair), bit)


def without_sep_before_b(arrays: Arrays) -> None:
    arrays["input_ids"][arrays["segment_b_start"][3] + arrays["offsets"][3] - 1] = CLS


def with_a_token_in_the_text(token: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        free = np.ones(arrays["offsets"][1], dtype=bool)
        free[[0, arrays["segment_b_start"][0] - 1, -1]] = False
        free[arrays["masked_lm_positions"][: arrays["masked_lm_offsets"][1]]] = False
        arrays["input_ids"][np.flatnonzero(free)[0]] = token

    return change


def swap_positions(arrays: Arrays) -> None:
    arrays["masked_lm_positions"][:2] = arrays["masked_lm_positions"][1::-1]


def shift_masked_count(arrays: Arrays) -> None:
    arrays["masked_lm_offsets"][1] -= 1


def put(name: str, index: int | slice, value: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name][index] = value

    return change


def shift_offset(arrays: Arrays) -> None:
    """Give a sample the first token of the next, where neither needs other masked counts then."""
    table = masked_count_table(64, 10, 0.15)
    lengths = np.diff(arrays["offsets"])
    is_alike = (lengths < 64) & (table[np.minimum(lengths + 1, 64)] == table[lengths])
    is_alike[:-1] &= table[lengths[1:] - 1] == table[lengths[1:]]
    arrays["offsets"][np.flatnonzero(is_alike[:-1])[0] + 1] += 1


FORGERIES = {
    "labels 0": (put("next_sentence_label", slice(None), 0), "next sentence", "is 0 in all "),
    "label 2": (put("next_sentence_label", 5, 2), "shard contents", "sample 5"),
    "position on [CLS]": (put("masked_lm_positions", 0, 0), "shard contents", "on [CLS]"),
    "position outside": (put("masked_lm_positions", -1, 63), "shard contents", "outside"),
    "position far off": (put("masked_lm_positions", -1, 65_535), "shard contents", "outside"),
    "unsorted": (swap_positions, "shard contents", "masked_lm_positions does not ascend: sample 0"),
    "token": (put("input_ids", 1, VOCAB_SIZE), "shard contents", "input_ids is not within"),
    "label": (put("masked_lm_ids", 0, VOCAB_SIZE), "shard contents", "masked_lm_ids is not within"),
    "no [CLS]": (put("input_ids", 0, 7), "shard contents", "begin with [CLS]: sample 0"),
    "no last [SEP]": (put("input_ids", -1, 7), "shard contents", "end with [SEP]"),
    "no middle [SEP]": (without_sep_before_b, "shard contents", "before segment B: sample 3"),
    "[SEP] in text": (with_a_token_in_the_text(SEP), "shard contents", "inside its text: sample 0"),
    "[PAD] in text": (with_a_token_in_the_text(PAD), "shard contents", "inside its text: sample 0"),
    "segment": (put("segment_b_start", 2, 1), "shard contents", "segment empty: sample 2"),
    "masked count": (shift_masked_count, "shard contents", "masked positions: sample 0"),
    "offsets": (shift_offset, "shard contents", "end with [SEP]: sample"),
}


@pytest.mark.parametrize(("change", "name", "problem"), FORGERIES.values(), ids=FORGERIES)
def test_forged_contents(
    pair: Path, change: Callable[[Arrays], None], name: str, problem: str
) -> None:
    spoil(shard(pair), change)
    assert failed(check(pair)) == {}
    problems = failed(check(pair, full=True))
    assert str(shard(pair)) in problems[name]
    assert problem in problems[name]


def test_labels_all_1_of_a_whole_set(pair: Path) -> None:
    for name in "abc":
        spoil(shard(pair, name), put("next_sentence_label", slice(None), 1))
    report = check(pair, full=True)
    found = first_checks(report)["next sentence"]
    assert found.status == "ok"  # single-sentence documents give it, and `prepare` takes them
    assert "nothing to learn" in found.summary


def test_an_unread_shard_is_not_called_right(pair: Path) -> None:
    flip(shard(pair), 5)
    report = check(pair, full=True)
    problems, found = failed(report), first_checks(report)
    assert set(problems) == {"shard digests"}
    unread = ("skipped", "2 of 3; not read: b.hdf5")
    for name in (CHECK, "shard contents", "index contents"):
        assert (found[name].status, found[name].summary) == unread
    sign(pair / "train")
    assert f"{shard(pair)}: cannot be read (" in failed(check(pair, full=True))[CHECK]
    sidecar_path(shard(pair)).unlink()
    structure = first_checks(check(pair, full=True))[CHECK]
    assert (structure.status, structure.summary) == unread


def test_offsets_that_lead_out_of_the_shard(pair: Path) -> None:
    for name, limit in (("offsets", 64), ("masked_lm_offsets", 10)):
        place = read_sidecar(shard(pair)).datasets[name]
        array = np.memmap(shard(pair), "<i8", mode="r+", offset=place.offset, shape=(place.count,))
        before = array[1]
        for value in (0, -1, 65, 2**62, -(2**63)):
            array[1] = value
            array.flush()
            sign(pair / "train")
            problem = failed(check(pair / "train", full=True))["shard contents"]
            assert f"{shard(pair)}: {name}: has steps outside 1 .. {limit}" in problem
        array[1] = before


def test_random_damage_with_right_digests_never_ends_in_a_traceback(pair: Path) -> None:
    rng = np.random.default_rng(3)
    pristine = shard(pair).read_bytes()
    first = min(place.offset for place in read_sidecar(shard(pair)).datasets.values())
    found = 0
    for _ in range(20):
        damaged = bytearray(pristine)
        for place in rng.integers(first, len(pristine), 20):
            damaged[place] = rng.integers(256)
        shard(pair).write_bytes(damaged)
        sign(pair / "train")
        found += "shard contents" in failed(check(pair / "train", full=True))
    assert found == 20


def test_an_index_that_does_not_fit_the_shards(pair: Path) -> None:
    for name, dtype in INDEX_ARRAYS[2]:
        path = pair / "train" / "index" / name
        values = np.memmap(path, dtype, mode="r+")
        places = [0, int(np.flatnonzero(values != values[0])[0])]
        values[places] = values[places[::-1]]
        values.flush()
        sign(pair / "train")
        assert failed(check(pair)) == {}
        problems = failed(check(pair / "train", full=True))
        assert str(path) in "".join(problems.values())
        assert set(problems) <= {"index contents", "order by length"}
        values[places] = values[places[::-1]]


def test_a_forged_baseline(pair: Path) -> None:
    baseline = Manifest.load(pair / "eval").baseline
    assert baseline is not None
    other = dataclasses.replace(baseline, context_free_accuracy=0.01)
    mend_digests(pair / "eval", baseline=other)
    assert "baseline: is Baseline(" in failed(check(pair, full=True))["baseline"]


def test_a_vocabulary_for_another_text(tmp_path: Path, made: Path) -> None:
    vocab = tmp_path / "few.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nw1\n")
    prepare_set([made.parent / "a.txt"], tmp_path / "set", vocab=vocab)
    assert "are [UNK]" in failed(check(tmp_path / "set", full=True))["unknown words"]


def test_with_a_wrong_vocabulary_nothing_more_is_read(pair: Path) -> None:
    write_vocabulary(pair / "train" / "vocab.txt", ["[PAD]", "[CLS]", "[UNK]", "[SEP]", "[MASK]"])
    report = check(pair, full=True)
    assert "unk_id = 2" in failed(report)["vocabulary"]
    assert report.sets[0].checks[-1].status == "skipped"


Change = Callable[[h5py.File], None]


def change_file(pair: Path, change: Change) -> None:
    """Change a shard through HDF5, then make every size and digest right."""
    with h5py.File(shard(pair), "r+") as file:
        change(file)
    size = shard(pair).stat().st_size
    sidecar = replace(read_sidecar(shard(pair)), shard_bytes=size)
    sidecar_path(shard(pair)).write_bytes(sidecar.to_json())
    sign(pair / "train")


def remade(shape: tuple[int, ...] = (-1,), **options: object) -> Change:
    """The same values elsewhere in the file; where the sidecar points the old ones still lie."""

    def change(file: h5py.File) -> None:
        values = file["masked_lm_ids"][:].reshape(shape)
        file.create_dataset("new", data=values, **options)
        del file["masked_lm_ids"]
        file.move("new", "masked_lm_ids")

    return change


def rename(file: h5py.File) -> None:
    file.move("masked_lm_ids", "masked\nids")


def group(file: h5py.File) -> None:
    del file["masked_lm_ids"]
    file.create_group("masked_lm_ids")


def link_outside(file: h5py.File) -> None:
    del file["masked_lm_ids"]
    file["masked_lm_ids"] = h5py.ExternalLink("/etc/passwd", "/")


def lie_outside(file: h5py.File) -> None:
    shape = file["masked_lm_ids"].shape
    del file["masked_lm_ids"]
    external = [("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
    file.create_dataset("masked_lm_ids", shape, "<u2", external=external)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remade(), "masked_lm_ids: has dtype, shape and offset ('<u2', ("),
        (remade(dtype="<u4"), "masked_lm_ids: has dtype, shape and offset ('<u4', ("),
        (remade(chunks=(16,)), ", None) where its sidecar says ('<u2', ("),
        (remade(shape=(-1, 1)), ", 1), "),
        (rename, "masked_lm_ids: is no dataset of the file"),
        (rename, r"'masked\nids': is no dataset of a shard"),
        (group, "masked_lm_ids: is no dataset of the file"),
        (link_outside, "masked_lm_ids: is no dataset of the file"),
        (lie_outside, ", None) where its sidecar says ('<u2', ("),
    ],
)
def test_hdf5_that_differs_from_its_sidecar(pair: Path, change: Change, words: str) -> None:
    change_file(pair, change)
    assert failed(check(pair)) == {}
    problems = failed(check(pair, full=True))
    assert set(problems) == {CHECK}
    assert all(line.startswith(str(shard(pair))) for line in problems[CHECK].splitlines())
    assert words in problems[CHECK]
