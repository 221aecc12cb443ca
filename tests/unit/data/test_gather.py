"""Gathering: equal to the readable reference on any shards, damaged ones included."""

import mmap
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.data import gather
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.gather import Gatherer, fill, measure
from mlperf_bert.data.index import DATASET_DTYPES, Manifest, read_sidecar
from mlperf_bert.data.shards import SampleReader
from shard_sets import assert_same_batch, write_set

DENOMINATORS = {"mlm_denominator": 7.0, "nsp_denominator": 0.3}
SHARDS = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(["<u2", "<u4"])), min_size=1, max_size=7
)


def outcome(set_dir: Path, manifest: Manifest, ids: np.ndarray) -> tuple[object, object]:
    """What gathering gives and what the reference gives: a batch, or the words of an error."""
    found: list[object] = []
    for gathers in (True, False):
        reader = SampleReader(set_dir, manifest)
        try:
            if gathers:
                found.append(Gatherer(reader).batch(ids, **DENOMINATORS))
            else:
                found.append(make_batch(reader.read(ids), ids, **DENOMINATORS))
        except DataError as error:
            found.append(str(error))
    return found[0], found[1]


@settings(max_examples=12, deadline=None)
@given(shards=SHARDS, seed=st.integers(0, 2**32), data=st.data())
def test_equal_to_the_reference(
    shards: list[tuple[int, str]], seed: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        set_dir = Path(directory) / "set"
        manifest = write_set(set_dir, shards, seed)
        sample = st.integers(0, manifest.num_samples - 1)
        reader = SampleReader(set_dir, manifest)
        gatherer = Gatherer(reader)
        for _ in range(3):  # one gatherer maps shards as they are asked for
            ids = np.array(data.draw(st.lists(sample, min_size=1, max_size=20)))
            expected = make_batch(reader.read(ids), ids, **DENOMINATORS)
            assert_same_batch(gatherer.batch(ids, **DENOMINATORS), expected)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from([name for name, _ in DATASET_DTYPES]),
    place=st.integers(0, 5),
    value=st.one_of(st.integers(0, 2**63 - 1), st.integers(0, 100), st.integers(65_500, 65_535)),
    negative=st.booleans(),
)
def test_damaged_shards_are_refused_as_the_reference_refuses_them(
    seed: int, name: str, place: int, value: int, negative: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        set_dir = Path(directory) / "set"
        manifest = write_set(set_dir, [(3, "<u2"), (3, "<u4")], seed)
        path = set_dir / "shards" / f"part-{seed % 2}.hdf5"
        stored = read_sidecar(path).datasets[name]
        array = np.memmap(
            path, stored.dtype, mode="r+", offset=stored.offset, shape=(stored.count,)
        )
        array[place % stored.count] = np.array(-value if negative else value).astype(stored.dtype)
        array.flush()
        gathered, expected = outcome(set_dir, manifest, np.array([5, 0, 1, 4, 2, 3]))
        if isinstance(expected, UnpaddedBatch):
            assert isinstance(gathered, UnpaddedBatch)
            assert_same_batch(gathered, expected)
        else:
            assert gathered == expected


def test_arrays_that_are_not_aligned(tmp_path: Path) -> None:
    manifest = write_set(tmp_path / "set", [(3, "<u2"), (1, "<u4")], seed=1)
    places = [
        place
        for number in range(2)
        for place in read_sidecar(tmp_path / f"set/shards/part-{number}.hdf5").datasets.values()
    ]
    assert any(place.offset % np.dtype(place.dtype).itemsize for place in places)
    gathered, expected = outcome(tmp_path / "set", manifest, np.array([3, 0, 2, 1]))
    assert isinstance(gathered, UnpaddedBatch) and isinstance(expected, UnpaddedBatch)
    assert_same_batch(gathered, expected)


@pytest.fixture
def small_set(tmp_path: Path) -> tuple[Path, Manifest]:
    return tmp_path / "set", write_set(tmp_path / "set", [(9, "<u2"), (10, "<u2")], seed=3)


@pytest.mark.parametrize("ids", [[], [-1], [19], [2**40]])
def test_ids_out_of_range(small_set: tuple[Path, Manifest], ids: list[int]) -> None:
    gathered, expected = outcome(*small_set, np.array(ids, dtype=np.int64))
    assert isinstance(gathered, str) and gathered == expected
    assert "ask for ids of 0 .. 18" in gathered


def test_a_file_that_changes_after_it_was_mapped_is_refused(
    small_set: tuple[Path, Manifest],
) -> None:
    set_dir, manifest = small_set
    reader = SampleReader(set_dir, manifest)
    gatherer = Gatherer(reader)
    gatherer.batch(np.array([0]), **DENOMINATORS)
    path = set_dir / "shards" / "part-0.hdf5"
    stored = read_sidecar(path).datasets["offsets"]
    with path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(np.array([2**40, 2**40 + 8], dtype=stored.dtype).tobytes())
    with pytest.raises(DataError, match=rf"part-0\.hdf5: sample 0 runs from {2**40} to"):
        gatherer.batch(np.array([0]), **DENOMINATORS)


def test_construction_maps_nothing(
    small_set: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SampleReader(*small_set)
    mapped = []
    make_map = mmap.mmap

    def spy(*arguments: int, **options: int) -> mmap.mmap:
        mapped.append(arguments)
        return make_map(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", spy)
    gatherer = Gatherer(reader)
    assert mapped == []
    gatherer.batch(np.array([0, 1, 0]), **DENOMINATORS)
    assert len(mapped) == 1  # the other shard is not asked for


def test_nothing_is_compiled_after_construction(small_set: tuple[Path, Manifest]) -> None:
    gatherer = Gatherer(SampleReader(*small_set))
    before = [len(function.signatures) for function in (measure, fill)]
    gatherer.batch(np.array([18, 0, 3]), **DENOMINATORS)
    gatherer.batch(np.arange(19)[::2], **DENOMINATORS)
    assert [len(function.signatures) for function in (measure, fill)] == before


def test_a_batch_lies_in_one_block(small_set: tuple[Path, Manifest]) -> None:
    batch = Gatherer(SampleReader(*small_set)).batch(np.array([3, 12]), **DENOMINATORS)
    blocks: list[torch.Tensor] = []

    def copy(block: torch.Tensor) -> torch.Tensor:
        blocks.append(block)
        return block.clone()

    copied = batch.map_blocks(copy)
    assert_same_batch(copied, batch)
    assert len(blocks) == 1
    blocks[0].zero_()
    assert batch.input_ids.max() == 0 < copied.input_ids.max()


def test_a_damaged_cache_is_an_error_in_one_line(
    small_set: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise EOFError("Ran out of input")

    monkeypatch.setattr(gather, "measure", broken)
    with pytest.raises(ConfigError, match=r"Ran out of input.*nbi"):
        Gatherer(SampleReader(*small_set))
