"""Sparse copies of a shard: right where samples are wanted, empty and refused elsewhere."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.cli.stage_data import PAGE_BYTES, copy_samples
from mlperf_bert.common.errors import DataError
from mlperf_bert.data.index import Manifest, sidecar_path
from mlperf_bert.data.shards import SampleReader, Shard


def test_a_partial_stage_holds_the_wanted_samples_and_refuses_the_others(
    synthetic_data: Path, tmp_path: Path
) -> None:
    shutil.copytree(synthetic_data / "train", tmp_path / "set")
    manifest = Manifest.load(tmp_path / "set")
    shard = Shard(synthetic_data / "train" / "shards" / "train.hdf5")
    is_wanted = np.zeros(manifest.num_samples, dtype=np.bool_)
    is_wanted[[0, 17, manifest.num_samples - 1]] = True
    copy = tmp_path / "set" / "shards" / "train.hdf5"
    copy.unlink()
    copy_samples(shard, is_wanted, copy)
    assert copy.stat().st_size == shard.path.stat().st_size
    whole = SampleReader(synthetic_data / "train", manifest)
    part = SampleReader(tmp_path / "set", manifest)
    for number in np.flatnonzero(is_wanted):
        ids = np.array([number])
        assert np.array_equal(part.read(ids).input_ids, whole.read(ids).input_ids)
        assert np.array_equal(part.read(ids).masked_ids, whole.read(ids).masked_ids)
    for number in np.flatnonzero(~is_wanted):
        with pytest.raises(DataError, match="next_sentence_label"):
            part.read(np.array([number]))


def test_only_the_pages_of_wanted_samples_are_copied(synthetic_data: Path, tmp_path: Path) -> None:
    shard = Shard(synthetic_data / "train" / "shards" / "train.hdf5")
    place, offsets = shard.sidecar.datasets["input_ids"], shard.arrays().offsets
    starts = place.offset + offsets[:-1] * np.dtype(place.dtype).itemsize
    stops = place.offset + offsets[1:] * np.dtype(place.dtype).itemsize
    on_two_pages = np.flatnonzero(starts // PAGE_BYTES != (stops - 1) // PAGE_BYTES)
    number = on_two_pages[len(on_two_pages) // 2]
    is_wanted = np.zeros(len(starts), dtype=np.bool_)
    copy_samples(shard, is_wanted, tmp_path / "none.hdf5")
    is_wanted[number] = True
    copy_samples(shard, is_wanted, tmp_path / "one.hdf5")
    source = shard.path.read_bytes()
    none, one = ((tmp_path / f"{name}.hdf5").read_bytes() for name in ("none", "one"))
    touched = {starts[number] // PAGE_BYTES, starts[number] // PAGE_BYTES + 1}
    of_tokens_only = range(-(-place.offset // PAGE_BYTES), place.end // PAGE_BYTES)
    assert touched < set(of_tokens_only)
    for page in of_tokens_only:
        span = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
        assert none[span] == bytes(PAGE_BYTES)
        assert one[span] == (source[span] if page in touched else bytes(PAGE_BYTES))


@pytest.mark.parametrize("value", [-1, 0, 2**40])
def test_damaged_offsets_are_refused(synthetic_data: Path, tmp_path: Path, value: int) -> None:
    damaged = tmp_path / "train.hdf5"
    shutil.copy(synthetic_data / "train" / "shards" / "train.hdf5", damaged)
    shutil.copy(sidecar_path(synthetic_data / "train" / "shards" / "train.hdf5"), tmp_path)
    shard = Shard(damaged)
    place = shard.sidecar.datasets["offsets"]
    array = np.memmap(damaged, place.dtype, mode="r+", offset=place.offset, shape=(place.count,))
    array[5] = value
    array.flush()
    is_wanted = np.zeros(shard.sidecar.num_samples, dtype=np.bool_)
    is_wanted[4] = True
    with pytest.raises(DataError, match="offsets: does not ascend; check the source"):
        copy_samples(shard, is_wanted, tmp_path / "copy.hdf5")
    assert not list(tmp_path.glob("*copy*"))
