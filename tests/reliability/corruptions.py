"""Every corruption of prepared data, and what finds it (docs/guides/prepare_data.md).

Where digests are to be right, sidecars, manifest and index are written anew over the harm, as a
careless preparation would have written them.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import verify_cases as cases
from mlperf_bert.data.index import INDEX_ARRAYS, read_sidecar, sidecar_path
from mlperf_bert.files import write_json

SHARD = "train/shards/b.hdf5"
AGAIN = "train/shards/again.hdf5"
SIDECAR = f"{SHARD}.json"
MANIFEST = "train/index/dataset.json"
LENGTHS, COUNTS, ORDER = (f"train/index/{name}" for name, _ in INDEX_ARRAYS[2])
VOCABULARY = "train/vocab.txt"
MASK = 4
FOUND, UNSEEN, NOT_REACHED = "found", "-", ""

Harm = Callable[[Path, Path], None]  # of the pair, and of its file that the message names
Change = Callable[[np.ndarray], None]


@dataclass(frozen=True, slots=True)
class Corruption:
    """`found` says by what `harm` is: start, verify, verify --full, training.

    `where` is what the message names; in training it may be the set, where an index lies.
    """

    name: str
    where: str
    harm: Harm
    found: tuple[str, str, str, str]

    def do(self, pair):
        self.harm(pair, pair / self.where)


def at_start(name, where, harm):
    """Found by everything: training does not begin."""
    return Corruption(name, where, harm, (FOUND, FOUND, FOUND, NOT_REACHED))


def by_reading(name, where, harm):
    """Found by the full check alone."""
    return Corruption(name, where, harm, (UNSEEN, UNSEEN, FOUND, UNSEEN))


def by_digest(name, where, harm):
    """Found once the shards are hashed, which training does beside its first steps."""
    return Corruption(name, where, harm, (UNSEEN, FOUND, FOUND, FOUND))


def in_training(name, where, harm):
    """Found by whatever reads samples."""
    return Corruption(name, where, harm, (UNSEEN, UNSEEN, FOUND, FOUND))


def cut(_, file):
    os.truncate(file, file.stat().st_size - 8)


def remove(_, file):
    file.unlink()


def pipe(_, file):
    file.unlink()
    os.mkfifo(file)


def directory(_, file):
    file.unlink()
    file.mkdir()


def link(target):
    def harm(_, file):
        file.unlink()
        file.symlink_to(target)

    return harm


def flip(bit):
    return lambda _, file: cases.flip(file, bit)


def flip_in(name, element, bit):
    """Flip a bit of an element of a shard's array; no digest is mended."""

    def harm(_, file):
        place = read_sidecar(file).datasets[name]
        cases.flip(file, 8 * (place.offset + element * np.dtype(place.dtype).itemsize) + bit)

    return harm


def edit_json(**changes):
    def harm(_, file):
        file.write_bytes(write_json(json.loads(file.read_bytes()) | changes))

    return harm


def edit_index(change):
    def harm(_, file):
        values = np.memmap(file, dtype=dict(INDEX_ARRAYS[2])[file.name], mode="r+")
        change(values)
        values.flush()

    return harm


def signed(harm):
    """Do it, then make every digest of the set right."""

    def both(pair, file):
        harm(pair, file)
        cases.sign(pair / "train")

    return both


def swap(first, second):
    def change(values):
        values[[first, second]] = values[[second, first]]

    return change


def swap_unequal(values):
    swap(0, int(np.flatnonzero(values != values[0])[0]))(values)


def put(index, value):
    def change(values):
        values[index] = value

    return change


def contents(change):
    """Change a shard's arrays, with right digests and an index that fits."""
    return lambda pair, _: cases.spoil(pair / SHARD, change)


def set_in(name, index, value):
    def change(arrays):
        arrays[name][index] = value

    return contents(change)


def with_offset(name, value):
    """Let an offset table lie, with right digests; the index stays as it was."""

    def harm(_, file):
        place = read_sidecar(file).datasets[name]
        table = np.memmap(file, "<i8", mode="r+", offset=place.offset, shape=(place.count,))
        table[1] = value
        table.flush()

    return signed(harm)


def other_words(_, file):
    file.write_text(file.read_text().replace("w1\nw2\n", "w2\nw1\n"))


def masked_rows(arrays):
    counts = np.diff(arrays["masked_lm_offsets"])
    return np.repeat(arrays["offsets"][:-1], counts) + arrays["masked_lm_positions"]


def fewer_masks(arrays):
    """One masked position of each sample instead of 15 % of its tokens; the others show again."""
    rows, first = masked_rows(arrays), arrays["masked_lm_offsets"][:-1]
    arrays["input_ids"][rows] = arrays["masked_lm_ids"]
    arrays["input_ids"][rows[first]] = MASK
    for name in ("masked_lm_ids", "masked_lm_positions"):
        arrays[name] = arrays[name][first]
    arrays["masked_lm_offsets"] = np.arange(len(first) + 1)


def bring_shard(source, target):
    shutil.copy(source, target)
    shutil.copy(sidecar_path(source), sidecar_path(target))
    cases.mend_digests(target.parents[1])


def text_of(pair):
    """The text of which `make_pair` made SHARD; made anew, as `pair` is a copy."""
    return cases.write_text(pair.parent / "b.txt", "b")


def same_shard_twice(pair, _):
    bring_shard(pair / SHARD, pair / AGAIN)


def same_text_twice(pair, _):
    """The text again with a blank more, so that its digest is another."""
    text = pair.parent / "again.txt"
    text.write_text(text_of(pair).read_text() + " \n")
    cases.prepare_set([text], pair.parent / "other", vocab=pair / VOCABULARY)
    bring_shard(pair.parent / "other/shards/again.hdf5", pair / AGAIN)


def mixed(*, vocabulary=False, **settings):
    """A shard of the same text prepared otherwise, with right digests."""

    def harm(pair, file):
        vocab = pair / VOCABULARY
        if vocabulary:
            vocab = cases.write_vocabulary(pair.parent / "more.txt", [*cases.SPECIAL, "more"])
        cases.prepare_set([text_of(pair)], pair.parent / "other", vocab=vocab, **settings)
        bring_shard(pair.parent / "other/shards/b.hdf5", file)

    return harm


def leak_shard(pair, file):
    bring_shard(pair / SHARD, file)


def escape(name):
    """Let the manifest name a shard outside of the set, with the manifest's own digest right."""

    def harm(_, file):
        values = json.loads(file.read_bytes())
        values["shards"][1]["file"] = name
        cases.write_signed(file, values)

    return harm


DAMAGED = (
    at_start("shard cut short", SHARD, cut),
    at_start("shard missing", SHARD, remove),
    by_digest("flipped bit in a token of a shard", SHARD, flip_in("input_ids", 20, bit=0)),
    by_digest("flipped bit in an offset of a shard", SHARD, flip_in("offsets", 20, bit=40)),
    by_digest("flipped bit in the HDF5 header of a shard", SHARD, flip(5)),
    at_start("sidecar missing", SIDECAR, remove),
    at_start("sidecar edited", SIDECAR, edit_json(source_name="x")),
    at_start("sidecar of another format version", SIDECAR, edit_json(format_version=2)),
    at_start("manifest missing", MANIFEST, remove),
    at_start("manifest edited", MANIFEST, edit_json(seed=1)),
    at_start("lengths in the index cut short", LENGTHS, cut),
    at_start("lengths in the index edited", LENGTHS, edit_index(swap_unequal)),
    at_start("order in the index edited", ORDER, edit_index(swap(0, 9))),
    at_start("vocabulary missing", VOCABULARY, remove),
    at_start("vocabulary replaced", VOCABULARY, other_words),
)
NO_FILES = (
    at_start("pipe instead of a shard", SHARD, pipe),
    at_start("directory instead of a shard", SHARD, directory),
    at_start("device instead of a shard", SHARD, link("/dev/zero")),
    at_start("broken link instead of a shard", SHARD, link("none.hdf5")),
    at_start("shard replaced by a link to another shard", SHARD, link("a.hdf5")),
    at_start("pipe instead of a sidecar", SIDECAR, pipe),
    at_start("pipe instead of the manifest", MANIFEST, pipe),
    at_start("pipe instead of the vocabulary", VOCABULARY, pipe),
    at_start("device instead of an index file", ORDER, link("/dev/zero")),
    at_start("manifest that lists `../b.hdf5`", MANIFEST, escape("../b.hdf5")),
    at_start("manifest that lists `/etc/passwd`", MANIFEST, escape("/etc/passwd")),
)
MIXED = (
    at_start("shard prepared with another vocabulary", SHARD, mixed(vocabulary=True)),
    at_start("shard prepared with another seed", SHARD, mixed(seed=7)),
    at_start("shard prepared with another maximum length", SHARD, mixed(max_seq_length=48)),
    at_start("shard prepared with another maximum of masks", SHARD, mixed(max_predictions=9)),
    at_start("the same shard twice", SHARD, same_shard_twice),
    at_start("the same text twice, with one file edited", SHARD, same_text_twice),
    at_start("training shard in the held-out set", "eval/shards/b.hdf5", leak_shard),
)
CARELESS = (
    by_reading("one mask per sample instead of 15%", SHARD, contents(fewer_masks)),
    by_reading("next-sentence labels all 0", SHARD, set_in("next_sentence_label", slice(None), 0)),
    in_training("next-sentence label of 2", SHARD, set_in("next_sentence_label", 3, 2)),
    in_training("token outside the vocabulary", SHARD, set_in("input_ids", 1, cases.VOCAB_SIZE)),
    in_training("label outside the vocabulary", SHARD, set_in("masked_lm_ids", 0, 60_000)),
    in_training(
        "masked position outside its sample", SHARD, set_in("masked_lm_positions", -1, 65_535)
    ),
    in_training("segment B outside its sample", SHARD, set_in("segment_b_start", 2, 65_535)),
    in_training("wrong offset of tokens", SHARD, with_offset("offsets", 2**62)),
    in_training("wrong offset of masks", SHARD, with_offset("masked_lm_offsets", -1)),
    in_training("index with wrong lengths", LENGTHS, signed(edit_index(swap_unequal))),
    in_training("index with wrong mask counts", COUNTS, signed(edit_index(swap_unequal))),
    by_reading("index that is not sorted by length", ORDER, signed(edit_index(swap(0, -1)))),
    at_start(
        "index with the number of a missing sample", ORDER, signed(edit_index(put(0, 2**32 - 1)))
    ),
)
GROUPS = {
    "Damaged files": DAMAGED,
    "Other kinds of files": NO_FILES,
    "Mixed-up files": MIXED,
    "Careless preparation": CARELESS,
}


def table():
    """The table of docs/guides/prepare_data.md: a row for each group that is found alike."""
    stages = "at the start", "by `verify`", "by `verify --full`", "during training"
    lines = ["| found | corruption |", "|---|---|"]
    for group, members in GROUPS.items():
        for found in dict.fromkeys(one.found for one in members):
            pairs = zip(stages, found, strict=True)
            by = ", ".join(stage for stage, each in pairs if each == FOUND)
            names = "; ".join(one.name for one in members if one.found == found)
            lines.append(f"| {by} | **{group}**: {names} |")
    return "\n".join(lines)
