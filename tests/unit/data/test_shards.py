"""Reading shards: any ids, nothing mapped early, no damage trusted."""

import io
import json
import os
import shutil
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.data import set_checks, shards
from mlperf_bert.data.index import DATASET_DTYPES, read_sidecar
from mlperf_bert.data.set_checks import ContentsCheck
from mlperf_bert.data.shards import SampleReader, Samples, Shard
from mlperf_bert.errors import DataError
from shard_sets import write_set

ODD_NUMBERS = st.integers(0, 2**63 - 1) | st.integers(0, 100) | st.integers(65_500, 65_535)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A set of three shards."""
    set_dir = tmp_path_factory.mktemp("shards") / "set"
    return set_dir, write_set(set_dir, [(20, "<u2"), (15, "<u2"), (10, "<u2")], seed=1)


@pytest.fixture
def prepared(made, tmp_path):
    """A copy for each test, as some tests damage it."""
    return shutil.copytree(made[0], tmp_path / "set"), made[1]


def test_no_shard_is_mapped_before_it_is_read(made, monkeypatch):
    mapped = Mock(wraps=shards.map_file)
    monkeypatch.setattr(shards, "map_file", mapped)
    reader = SampleReader(*made)
    assert not mapped.called
    for ids in ([0], [1, 0, 1]):
        reader.read(np.array(ids))
    assert mapped.call_count == 1


def test_hdf5_readers_see_the_same_arrays(made):
    import h5py

    path = made[0] / "shards" / "part-1.hdf5"
    arrays = Shard(path).arrays()
    with h5py.File(path) as file:
        assert set(file) == set(arrays.__slots__)
        for name in file:
            assert file[name].chunks is None
            np.testing.assert_array_equal(file[name][:], getattr(arrays, name))
            assert getattr(arrays, name).flags.aligned
            assert not getattr(arrays, name).flags.writeable


def poke(path, name, index, value):
    """Overwrite one element of a shard in place."""
    place = read_sidecar(path).datasets[name]
    array = np.memmap(path, place.dtype, mode="r+", offset=place.offset, shape=(place.count,))
    array[index % place.count] = np.array(value).astype(place.dtype)
    array.flush()


def test_a_check_that_is_left_ends_and_closes_its_file(made, monkeypatch):
    endless = io.FileIO("/dev/zero")
    monkeypatch.setattr(set_checks, "open_regular_file", lambda _: endless)
    monkeypatch.setattr(set_checks, "SMALL_BYTES", 2**60)
    reader = SampleReader(*made)
    shard = reader.shards[0]
    shard.sidecar = replace(shard.sidecar, shard_bytes=2**50)
    with ContentsCheck((reader,)) as check:
        assert check._thread.is_alive()
    assert not check._thread.is_alive() and endless.closed


def test_blocks_of_every_shard_count_and_a_partial_stage_has_none(made, tmp_path, monkeypatch):
    set_dir = tmp_path / "set"
    shutil.copytree(made[0], set_dir)
    monkeypatch.setattr(set_checks, "SMALL_BYTES", 0)
    monkeypatch.setattr(set_checks, "NUM_BLOCKS", 12)
    monkeypatch.setattr(set_checks, "BLOCK_BYTES", 1)

    def found():
        with ContentsCheck((SampleReader(set_dir, made[1]),)) as check:
            return check.result()

    whole, changed = found(), set()
    assert whole == found()
    for path in sorted(set_dir.glob("shards/*.hdf5")):
        kept = path.read_bytes()
        path.write_bytes(bytes(~byte & 255 for byte in kept))
        changed.add(found())
        path.write_bytes(kept)
    assert len(changed | {whole}) == 4


def outcome(a_set, ids):
    """The samples as read, all of them in range, or the message of the error."""
    try:
        found = SampleReader(*a_set).read(ids)
    except DataError as error:
        return str(error)
    manifest = a_set[1]
    assert found.lengths.min() >= 1 and found.lengths.max() <= manifest.max_seq_length
    assert found.masked_counts.min() >= 1
    assert found.masked_counts.max() <= manifest.max_predictions
    assert max(found.input_ids.max(), found.masked_ids.max()) < manifest.vocab_size
    assert (found.masked_positions < np.repeat(found.lengths, found.masked_counts)).all()
    assert (found.segment_b_start < found.lengths).all()
    assert found.next_sentence_label.max() <= 1
    return found


@settings(max_examples=12, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(["<u2", "<u4"])), min_size=1, max_size=7
    ),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_samples_are_those_of_the_shards(parts, seed, data):
    with tempfile.TemporaryDirectory() as directory:
        set_dir = Path(directory) / "set"
        reader = SampleReader(set_dir, write_set(set_dir, parts, seed))
        places = [(shard, row) for shard, (count, _) in enumerate(parts) for row in range(count)]
        ids = np.array(data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1)))
        wanted = {field.name: [] for field in fields(Samples)}
        for shard, row in [places[number] for number in ids]:
            arrays = reader.shards[shard].arrays()
            text = slice(*arrays.offsets[row : row + 2])
            masked = slice(*arrays.masked_lm_offsets[row : row + 2])
            wanted["input_ids"].extend(arrays.input_ids[text])
            wanted["lengths"].append(text.stop - text.start)
            wanted["segment_b_start"].append(arrays.segment_b_start[row])
            wanted["masked_positions"].extend(arrays.masked_lm_positions[masked])
            wanted["masked_ids"].extend(arrays.masked_lm_ids[masked])
            wanted["masked_counts"].append(masked.stop - masked.start)
            wanted["next_sentence_label"].append(arrays.next_sentence_label[row])
        found = reader.read(ids)
        for name, values in wanted.items():
            assert getattr(found, name).dtype == np.int64
            assert getattr(found, name).tolist() == values, name


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from([name for name, _ in DATASET_DTYPES]),
    place=st.integers(0, 5),
    value=ODD_NUMBERS | ODD_NUMBERS.map(int.__neg__),
)
def test_damaged_shards_are_refused_or_read_in_range(seed, name, place, value):
    with tempfile.TemporaryDirectory() as directory:
        set_dir = Path(directory) / "set"
        manifest = write_set(set_dir, [(3, "<u2"), (3, "<u4")], seed)
        poke(set_dir / "shards" / f"part-{seed % 2}.hdf5", name, place, value)
        outcome((set_dir, manifest), np.array([5, 0, 1, 4, 2, 3]))


@pytest.mark.parametrize("ids", [[], [-1], [10**6], [2**40]])
def test_ids_out_of_range(made, ids):
    found = outcome(made, np.array(ids, dtype=np.int64))
    assert f"request ids in 0 .. {made[1].num_samples - 1}" in str(found)


def test_a_file_that_is_cut_or_changes_after_it_was_opened_is_refused(prepared):
    reader = SampleReader(*prepared)
    os.truncate(prepared[0] / "shards" / "part-2.hdf5", 100)
    with pytest.raises(DataError, match="has 100 bytes"):
        reader.read(np.array([40]))
    reader.read(np.array([0]))
    for index in (0, 1):
        poke(prepared[0] / "shards" / "part-0.hdf5", "offsets", index, 2**40 + 8 * index)
    with pytest.raises(
        DataError, match=rf"part-0\.hdf5: sample 0 has the invalid range {2**40} to"
    ):
        reader.read(np.array([0]))


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("input_ids", 0, 65_535),
        ("masked_lm_ids", 0, 60_000),
        ("masked_lm_positions", 0, 64),
        ("segment_b_start", 0, 65),
        ("segment_b_start", 0, "its length"),
        ("next_sentence_label", 0, 2),
        ("offsets", 0, 1),
        ("offsets", 1, -1),
        ("offsets", 1, 0),
        ("offsets", 1, 2**62),
        ("offsets", 1, 65),
        ("offsets", -1, 2**40),
        ("masked_lm_offsets", 1, 11),
        ("masked_lm_offsets", 1, -(2**63)),
        ("masked_lm_offsets", -1, 0),
    ],
)
def test_damaged_values_are_refused(prepared, name, index, value):
    if value == "its length":
        value = SampleReader(*prepared).read(np.array([0])).lengths[0]
    poke(prepared[0] / "shards" / "part-0.hdf5", name, index, value)
    found = outcome(prepared, np.array([0, 1]))
    assert isinstance(found, str) and "prepare" in found


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("format_version", 2, "format_version is 2, but this program reads 1"),
        ("num_samples", None, "has no key 'num_samples'"),
        ("num_samples", 3, "elements instead of"),
        ("datasets.offsets", None, "has no key 'offsets'"),
        ("datasets.offsets.offset", 10**9, "ends at byte"),
        ("datasets.input_ids.dtype", "<f8", "input_ids must have dtype <u2 or <u4, not '<f8'"),
        ("shard_sha256", "f" * 64, "does not match the set's manifest, which has"),
        ("settings.vocabulary_sha256", "f" * 64, "vocabulary_sha256"),
    ],
)
def test_wrong_sidecars_are_refused(prepared, key, value, problem):
    path = prepared[0] / "shards" / "part-2.hdf5.json"
    sidecar = json.loads(path.read_bytes())
    *outer, last = key.split(".")
    within = sidecar
    for name in outer:
        within = within[name]
    within[last] = value
    if value is None:
        del within[last]
    path.write_text(json.dumps(sidecar))
    with pytest.raises(DataError, match=problem):
        SampleReader(*prepared)
