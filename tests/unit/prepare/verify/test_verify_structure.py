"""`verify --full` holds a shard's HDF5 structure against its sidecar, whatever its digest."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from mlperf_bert.data.index import read_sidecar, sidecar_path
from verify_cases import check, failed, flip, shard, sign

CHECK = "HDF5 structure"
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


def add_many(file: h5py.File) -> None:
    for number in range(70):
        file.create_group(f"more{number}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remade(), "masked_lm_ids: has offset"),
        (remade(dtype="<u4"), "masked_lm_ids: has dtype '<u4' where its sidecar says '<u2'"),
        (remade(chunks=(16,)), "masked_lm_ids: has kind 'chunked'"),
        (remade(shape=(-1, 1)), "masked_lm_ids: has shape '"),
        (rename, "masked_lm_ids: is not in the file"),
        (rename, r"'masked\nids': is no dataset of a shard"),
        (group, "masked_lm_ids: has kind 'group'"),
        (link_outside, "masked_lm_ids: has kind 'link'"),
        (lie_outside, "masked_lm_ids: has kind 'in other files'"),
        (add_many, "it has 77 entries, at most 64"),
    ],
)
def test_hdf5_that_differs_from_its_sidecar(pair: Path, change: Change, words: str) -> None:
    change_file(pair, change)
    assert failed(check(pair)) == {}
    problems = failed(check(pair, full=True))
    assert set(problems) == {CHECK}
    assert all(line.startswith(str(shard(pair))) for line in problems[CHECK].splitlines())
    assert words in problems[CHECK]


def test_a_damaged_shard_that_hdf5_can_still_read(pair: Path) -> None:
    place = read_sidecar(shard(pair)).datasets["input_ids"]
    flip(shard(pair), 8 * place.offset)
    assert set(failed(check(pair, full=True))) == {"shard digests"}


def test_a_damaged_shard_that_is_no_hdf5_any_more(pair: Path) -> None:
    flip(shard(pair), 5)
    problems = failed(check(pair, full=True))
    assert set(problems) == {"shard digests", CHECK}
    assert f"{shard(pair)}: cannot be read (" in problems[CHECK]


def test_a_shard_without_a_sidecar_is_not_compared(pair: Path) -> None:
    sidecar_path(shard(pair)).unlink()
    found = {one.name: one for one in check(pair, full=True).sets[0].checks}[CHECK]
    assert (found.status, found.summary) == ("skipped", "2 of 3; not read: b.hdf5")


def test_random_damage_to_what_hdf5_says_never_ends_in_a_traceback(pair: Path) -> None:
    rng = np.random.default_rng(4)
    pristine = shard(pair).read_bytes()
    first = min(place.offset for place in read_sidecar(shard(pair)).datasets.values())
    for _ in range(30):
        damaged = bytearray(pristine)
        for place in rng.integers(0, first, 4):
            damaged[place] = rng.integers(256)
        shard(pair).write_bytes(damaged)
        problems = failed(check(pair / "train", full=True))
        assert str(shard(pair)) in problems["shard digests"]
