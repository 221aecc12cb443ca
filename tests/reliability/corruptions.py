"""Ways to spoil a good pair of prepared sets; corruption_table.py says what finds each.

Where digests are to be right, sidecars, manifest and index are written anew over the harm, as a
careless preparation would have written them.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

import verify_cases as cases
from mlperf_bert.common.records import write_json
from mlperf_bert.data.index import INDEX_ARRAYS, read_sidecar, sidecar_path

SHARD = "train/shards/b.hdf5"
SIDECAR = "train/shards/b.hdf5.json"
MANIFEST = "train/index/dataset.json"
LENGTHS, COUNTS, ORDER = (f"train/index/{name}" for name, _ in INDEX_ARRAYS)
VOCABULARY = "train/vocab.txt"
MASK = 4


def cut(pair: Path, where: str) -> None:
    os.truncate(pair / where, (pair / where).stat().st_size - 8)


def remove(pair: Path, where: str) -> None:
    (pair / where).unlink()


def flip_in(pair: Path, name: str, element: int, bit: int) -> None:
    """Flip a bit of an element of a shard's array; no digest is mended."""
    place = read_sidecar(pair / SHARD).datasets[name]
    first = place.offset + element * np.dtype(place.dtype).itemsize
    cases.flip(pair / SHARD, 8 * first + bit)


def edit_json(pair: Path, where: str, **changes: object) -> None:
    values = json.loads((pair / where).read_bytes())
    (pair / where).write_bytes(write_json(values | changes))


def edit_index(pair: Path, where: str, change: Callable[[np.ndarray], None]) -> None:
    dtype = next(dtype for name, dtype in INDEX_ARRAYS if where.endswith(name))
    values = np.memmap(pair / where, dtype=dtype, mode="r+")
    change(values)
    values.flush()


def signed(harm: Callable[..., None], pair: Path, **words: object) -> None:
    """Do it, then make every digest of the set right."""
    harm(pair, **words)
    cases.sign(pair / "train")


def swap(first: int, second: int) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[[first, second]] = values[[second, first]]

    return change


def swap_unequal(values: np.ndarray) -> None:
    swap(0, int(np.flatnonzero(values != values[0])[0]))(values)


def put(index: int, value: int) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[index] = value

    return change


def contents(change: Callable[[cases.Arrays], None], pair: Path) -> None:
    """Change a shard's arrays, with right digests and an index that fits."""
    cases.spoil(pair / SHARD, change)


def with_offset(name: str, value: int, pair: Path) -> None:
    """Let an offset table lie, with right digests; the index stays as it was."""
    place = read_sidecar(pair / SHARD).datasets[name]
    table = np.memmap(pair / SHARD, "<i8", mode="r+", offset=place.offset, shape=(place.count,))
    table[1] = value
    table.flush()
    cases.sign(pair / "train")


def other_words(pair: Path) -> None:
    text = (pair / VOCABULARY).read_text()
    (pair / VOCABULARY).write_text(text.replace("w1\nw2\n", "w2\nw1\n"))


def one_sample_many_times(arrays: cases.Arrays) -> None:
    """The published bug: every sample of the shard is the same one."""
    lengths, counts = np.diff(arrays["offsets"]), np.diff(arrays["masked_lm_offsets"])
    chosen, times = int(lengths.argmax()), len(lengths)
    tables = {"offsets": lengths, "masked_lm_offsets": counts}
    flat = {
        "input_ids": "offsets",
        "masked_lm_ids": "masked_lm_offsets",
        "masked_lm_positions": "masked_lm_offsets",
    }
    for name, table in flat.items():
        part = arrays[name][slice(*arrays[table][chosen : chosen + 2])]
        arrays[name] = np.tile(part, times)
    for name, sizes in tables.items():
        arrays[name] = np.arange(times + 1) * int(sizes[chosen])
    for name in ("segment_b_start", "next_sentence_label"):
        arrays[name][:] = arrays[name][chosen]


def shift_labels(arrays: cases.Arrays) -> None:
    arrays["masked_lm_ids"][:] = np.roll(arrays["masked_lm_ids"], 1)


def fewer_masks(arrays: cases.Arrays) -> None:
    """One masked position of each sample instead of 15 % of its tokens; the others show again."""
    counts = np.diff(arrays["masked_lm_offsets"])
    rows = np.repeat(arrays["offsets"][:-1], counts) + arrays["masked_lm_positions"]
    arrays["input_ids"][rows] = arrays["masked_lm_ids"]
    first = arrays["masked_lm_offsets"][:-1]
    arrays["input_ids"][rows[first]] = MASK
    for name in ("masked_lm_ids", "masked_lm_positions"):
        arrays[name] = arrays[name][first]
    arrays["masked_lm_offsets"] = np.arange(len(first) + 1)


def always_mask(arrays: cases.Arrays) -> None:
    counts = np.diff(arrays["masked_lm_offsets"])
    rows = np.repeat(arrays["offsets"][:-1], counts) + arrays["masked_lm_positions"]
    arrays["input_ids"][rows] = MASK


def set_in(name: str, index: int | slice, value: int) -> Callable[[cases.Arrays], None]:
    def change(arrays: cases.Arrays) -> None:
        arrays[name][index] = value

    return change


def bring_shard(source: Path, target: Path) -> None:
    shutil.copy(source, target)
    shutil.copy(sidecar_path(source), sidecar_path(target))


def same_shard_twice(pair: Path) -> None:
    bring_shard(pair / SHARD, pair / "train/shards/again.hdf5")
    cases.mend_digests(pair / "train")


def same_text_twice(pair: Path) -> None:
    """The text again with a blank more, so that its digest is another."""
    text = pair.parent / "again.txt"
    text.write_text(text_of(pair, "b").read_text() + " \n")
    cases.prepare_set([text], pair.parent / "other", vocab=pair / VOCABULARY)
    bring_shard(pair.parent / "other/shards/again.hdf5", pair / "train/shards/again.hdf5")
    cases.mend_digests(pair / "train")


def text_of(pair: Path, name: str) -> Path:
    """The text of which `make_pair` made a shard; made anew, as `pair` is a copy."""
    return cases.write_text(pair.parent / f"{name}.txt", name)


def mixed(pair: Path, *, vocabulary: bool = False, **settings: int) -> None:
    """A shard of the same text prepared otherwise, with right digests."""
    vocab = pair / VOCABULARY
    if vocabulary:
        vocab = cases.write_vocabulary(pair.parent / "more.txt", [*cases.SPECIAL, "more"])
    cases.prepare_set([text_of(pair, "b")], pair.parent / "other", vocab=vocab, **settings)
    bring_shard(pair.parent / "other/shards/b.hdf5", pair / SHARD)
    cases.mend_digests(pair / "train")


def leak_shard(pair: Path) -> None:
    bring_shard(pair / SHARD, pair / "eval/shards/b.hdf5")
    cases.mend_digests(pair / "eval")


def leak_text(pair: Path) -> None:
    """Held-out text that is trained on, with a line more, so that its digest is another."""
    text = pair.parent / "held.txt"
    text.write_text(text_of(pair, "b").read_text() + "\nw1 w2 w3\n")
    shutil.rmtree(pair / "eval")
    cases.prepare_set([text], pair / "eval", vocab=pair / VOCABULARY, seed=1)


def pipe(pair: Path, where: str) -> None:
    (pair / where).unlink()
    os.mkfifo(pair / where)


def link(pair: Path, where: str, target: str) -> None:
    (pair / where).unlink()
    (pair / where).symlink_to(target)


def directory(pair: Path, where: str) -> None:
    (pair / where).unlink()
    (pair / where).mkdir()


def escape(pair: Path, name: str) -> None:
    """Let the manifest name a shard outside of the set, with the manifest's own digest right."""
    values = json.loads((pair / MANIFEST).read_bytes())
    values["shards"][1]["file"] = name
    cases.write_signed(pair / MANIFEST, values)


def rename_dataset(pair: Path) -> None:
    """Every array is where the sidecar says, but HDF5 calls one of them otherwise."""
    with h5py.File(pair / SHARD, "r+") as file:
        file.move("masked_lm_ids", "masked_ids")
    size = (pair / SHARD).stat().st_size
    sidecar = replace(read_sidecar(pair / SHARD), shard_bytes=size)
    sidecar_path(pair / SHARD).write_bytes(sidecar.to_json())
    cases.sign(pair / "train")
