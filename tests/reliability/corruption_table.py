"""Every corruption of prepared data with what finds it: the table of docs/data_faults.md."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corruptions import (
    COUNTS,
    LENGTHS,
    MANIFEST,
    ORDER,
    SHARD,
    SIDECAR,
    VOCABULARY,
    always_mask,
    contents,
    cut,
    directory,
    edit_index,
    edit_json,
    escape,
    fewer_masks,
    flip_in,
    leak_shard,
    leak_text,
    link,
    mixed,
    one_sample_many_times,
    other_words,
    pipe,
    put,
    remove,
    rename_dataset,
    same_shard_twice,
    same_text_twice,
    set_in,
    shift_labels,
    signed,
    swap,
    swap_unequal,
    with_offset,
)

from verify_cases import VOCAB_SIZE, flip

FOUND, UNSEEN, NOT_REACHED = "found", "-", ""


@dataclass(frozen=True, slots=True)
class Corruption:
    """`harm` changes a good pair; `found` says by what, of start, verify, verify --full, training.

    `where` is what the message names; in training it may be the set, where an index lies.
    """

    name: str
    where: str
    harm: Callable[[Path], None]
    found: tuple[str, str, str, str]


def at_start(name: str, where: str, harm: Callable[[Path], None]) -> Corruption:
    """Found by everything: training does not begin."""
    return Corruption(name, where, harm, (FOUND, FOUND, FOUND, NOT_REACHED))


def by_reading(
    name: str, where: str, harm: Callable[[Path], None], *, training: str = UNSEEN
) -> Corruption:
    """Found by nothing that reads no sample."""
    return Corruption(name, where, harm, (UNSEEN, UNSEEN, FOUND, training))


DAMAGED = (
    at_start("shard cut short", SHARD, partial(cut, where=SHARD)),
    at_start("shard missing", SHARD, partial(remove, where=SHARD)),
    by_reading(
        "shard: a bit of a token flipped",
        SHARD,
        partial(flip_in, name="input_ids", element=20, bit=0),
    ),
    by_reading(
        "shard: a bit of an offset flipped",
        SHARD,
        partial(flip_in, name="offsets", element=20, bit=40),
        training=FOUND,
    ),
    by_reading(
        "shard: a bit of the HDF5 header flipped", SHARD, lambda pair: flip(pair / SHARD, 5)
    ),
    at_start("sidecar missing", SIDECAR, partial(remove, where=SIDECAR)),
    at_start("sidecar edited", SIDECAR, partial(edit_json, where=SIDECAR, source_name="x")),
    at_start(
        "sidecar of another version", SIDECAR, partial(edit_json, where=SIDECAR, format_version=2)
    ),
    at_start("manifest missing", MANIFEST, partial(remove, where=MANIFEST)),
    at_start("manifest edited", MANIFEST, partial(edit_json, where=MANIFEST, seed=1)),
    at_start("index: lengths cut short", LENGTHS, partial(cut, where=LENGTHS)),
    at_start(
        "index: lengths edited", LENGTHS, partial(edit_index, where=LENGTHS, change=swap_unequal)
    ),
    at_start("index: order edited", ORDER, partial(edit_index, where=ORDER, change=swap(0, 9))),
    at_start("vocabulary missing", VOCABULARY, partial(remove, where=VOCABULARY)),
    at_start("vocabulary exchanged", VOCABULARY, other_words),
)

NO_FILES = (
    at_start("pipe in place of a shard", SHARD, partial(pipe, where=SHARD)),
    at_start("directory in place of a shard", SHARD, partial(directory, where=SHARD)),
    at_start("device in place of a shard", SHARD, partial(link, where=SHARD, target="/dev/zero")),
    at_start("link to nothing for a shard", SHARD, partial(link, where=SHARD, target="none.hdf5")),
    at_start("link to another shard", SHARD, partial(link, where=SHARD, target="a.hdf5")),
    at_start("pipe in place of a sidecar", SIDECAR, partial(pipe, where=SIDECAR)),
    at_start("pipe in place of the manifest", MANIFEST, partial(pipe, where=MANIFEST)),
    at_start("pipe in place of the vocabulary", VOCABULARY, partial(pipe, where=VOCABULARY)),
    at_start("device in place of an index", ORDER, partial(link, where=ORDER, target="/dev/zero")),
    at_start("manifest names `../b.hdf5`", MANIFEST, partial(escape, name="../b.hdf5")),
    at_start("manifest names `/etc/passwd`", MANIFEST, partial(escape, name="/etc/passwd")),
)

MIXED = (
    at_start("two preparations: vocabulary", SHARD, partial(mixed, vocabulary=True)),
    at_start("two preparations: seed", SHARD, partial(mixed, seed=7)),
    at_start("two preparations: longest sequence", SHARD, partial(mixed, max_seq_length=48)),
    at_start("two preparations: most predictions", SHARD, partial(mixed, max_predictions=9)),
    at_start("the same shard twice", "train/shards/b.hdf5", same_shard_twice),
    at_start("the same text twice, its file edited", "train/shards/b.hdf5", same_text_twice),
    at_start("training shard in the held-out set", "eval/shards/b.hdf5", leak_shard),
    by_reading("training text in the held-out set, its file edited", "eval", leak_text),
)

CARELESS = (
    by_reading("one sample many times", "b.hdf5", partial(contents, one_sample_many_times)),
    by_reading("labels shifted by one", SHARD, partial(contents, shift_labels)),
    by_reading("one mask a sample, not 15 %", SHARD, partial(contents, fewer_masks)),
    by_reading("[MASK] at 100 % of the masks, not 80 %", SHARD, partial(contents, always_mask)),
    by_reading(
        "next-sentence labels all 0",
        SHARD,
        partial(contents, set_in("next_sentence_label", slice(None), 0)),
    ),
    by_reading(
        "next-sentence label 2",
        SHARD,
        partial(contents, set_in("next_sentence_label", 3, 2)),
        training=FOUND,
    ),
    by_reading(
        "token outside the vocabulary",
        SHARD,
        partial(contents, set_in("input_ids", 1, VOCAB_SIZE)),
        training=FOUND,
    ),
    by_reading(
        "label outside the vocabulary",
        SHARD,
        partial(contents, set_in("masked_lm_ids", 0, 60_000)),
        training=FOUND,
    ),
    by_reading(
        "masked position outside its sample",
        SHARD,
        partial(contents, set_in("masked_lm_positions", -1, 65_535)),
        training=FOUND,
    ),
    by_reading(
        "segment B outside its sample",
        SHARD,
        partial(contents, set_in("segment_b_start", 2, 65_535)),
        training=FOUND,
    ),
    by_reading(
        "offset of tokens that lies", SHARD, partial(with_offset, "offsets", 2**62), training=FOUND
    ),
    by_reading(
        "offset of masks that lies",
        SHARD,
        partial(with_offset, "masked_lm_offsets", -1),
        training=FOUND,
    ),
    by_reading(
        "index: lengths of other samples",
        LENGTHS,
        partial(signed, edit_index, where=LENGTHS, change=swap_unequal),
        training=FOUND,
    ),
    by_reading(
        "index: masked counts of other samples",
        COUNTS,
        partial(signed, edit_index, where=COUNTS, change=swap_unequal),
        training=FOUND,
    ),
    by_reading(
        "index: order not by length",
        ORDER,
        partial(signed, edit_index, where=ORDER, change=swap(0, -1)),
    ),
    Corruption(
        "index: order with a number of no sample",
        ORDER,
        partial(signed, edit_index, where=ORDER, change=put(0, 2**32 - 1)),
        (FOUND, UNSEEN, FOUND, NOT_REACHED),
    ),
    by_reading("HDF5 names an array otherwise", SHARD, rename_dataset),
)

GROUPS = {
    "Damage": DAMAGED,
    "Not the files that they seem": NO_FILES,
    "Mixed up, all digests right": MIXED,
    "Careless preparation, all digests right": CARELESS,
}


UNDAMAGED = (*MIXED, *CARELESS)


def table() -> str:
    """The table of docs/data_faults.md."""
    lines = [
        "| corruption | start of training | `verify` | `verify --full` | while training |",
        "|---|---|---|---|---|",
    ]
    for group, members in GROUPS.items():
        lines.append(f"| **{group}** | | | | |")
        lines += [f"| {one.name} | {' | '.join(one.found)} |" for one in members]
    return "\n".join(lines)
