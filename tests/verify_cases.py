"""A small pair of prepared sets, and ways to spoil a copy of it with or without new digests."""

import dataclasses
import hashlib
import shutil
from pathlib import Path

import numpy as np

from mlperf_bert.data.index import (
    OWN_DIGEST,
    Manifest,
    ShardEntry,
    read_sidecar,
    sidecar_path,
    write_index,
)
from mlperf_bert.data.shards import Shard, ShardArrays
from mlperf_bert.files import file_sha256, write_json
from mlperf_bert.prepare.build import write_shard
from mlperf_bert.prepare.verify import verify
from support import NUM_WORDS, prepare_small, write_synthetic_text

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ("a", "b", "c", "held")
VOCAB_SIZE = len(SPECIAL) + NUM_WORDS


def write_vocabulary(path, special=SPECIAL):
    path.write_text("\n".join([*special, *(f"w{n}" for n in range(NUM_WORDS))]) + "\n")
    return path


def prepare_set(texts, out, **changes):
    """`prepare_text` with settings that give masks enough choices to tell copies from chance."""
    vocab = changes.pop("vocab", None) or write_vocabulary(out.parent / "words.txt")
    options = {"max_seq_length": 64, "max_predictions": 10, "dupe_factor": 2}
    return prepare_small(texts, vocab, out, **{**options, **changes})


def write_text(path, name):
    """Write the text of which `make_pair` makes the shard of that name."""
    write_synthetic_text(path, 40, seed=TEXTS.index(name))
    return path


def make_pair(directory, **changes):
    """`directory/pair` with train (three shards) and eval (one shard and a baseline)."""
    texts = {name: write_text(directory / f"{name}.txt", name) for name in TEXTS}
    pair, vocab = directory / "pair", write_vocabulary(directory / "words.txt")
    pair.mkdir()
    train = [texts[name] for name in ("a", "b", "c")]
    prepare_set(train, pair / "train", vocab=vocab, **changes)
    prepare_set([texts["held"]], pair / "eval", vocab=vocab, with_baseline=True, **changes)
    return pair


def copy_of(pair, target):
    return Path(shutil.copytree(pair, target / "pair"))


def shard(directory, name="b", part="train"):
    return directory / part / "shards" / f"{name}.hdf5"


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        value = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([value ^ 1 << bit % 8]))


def flip_words(path):
    """Flip the lowest bit of most words of a shard: thousands of bits, each number possible."""
    place = read_sidecar(path).datasets["input_ids"]
    ids = np.memmap(path, place.dtype, mode="r+", offset=place.offset, shape=(place.count,))
    is_word = (ids > len(SPECIAL)) & (ids < VOCAB_SIZE - 1)
    assert is_word.sum() > 1000
    ids[is_word] ^= 1
    ids.flush()


def spoil(path, change, **settings):
    """Change the arrays of a shard, then make every digest of its set right again."""
    before = Shard(path)
    mapped = before.arrays()
    arrays = {
        field.name: np.array(getattr(mapped, field.name))
        for field in dataclasses.fields(ShardArrays)
    }
    change(arrays)
    write_shard(
        path,
        ShardArrays(**arrays),
        source_name=before.sidecar.source_name,
        source_sha256=before.sidecar.source_sha256,
        settings=dataclasses.replace(before.sidecar.settings, **settings),
    )
    mend_digests(path.parents[1])


def mend_digests(set_dir, **changes):
    """Write manifest and index anew over whatever shards there are, as a forger would."""
    manifest = dataclasses.replace(Manifest.load(set_dir), **changes)
    paths = sorted((set_dir / "shards").glob("*.hdf5"))
    entries = tuple(ShardEntry.of(path) for path in paths)
    shards = [Shard(path) for path in paths]
    num_samples = sum(entry.num_samples for entry in entries)
    write_index(
        set_dir,
        dataclasses.replace(manifest, shards=entries, num_samples=num_samples),
        np.concatenate([np.diff(one.arrays().offsets) for one in shards]).astype(np.uint16),
        np.concatenate([np.diff(one.arrays().masked_lm_offsets) for one in shards]).astype(
            np.uint16
        ),
    )


def sign(set_dir):
    """Make all digests of a set right again, whatever its files hold; change nothing else."""
    manifest = Manifest.load(set_dir)
    paths = [set_dir / "shards" / entry.file for entry in manifest.shards]
    for path in paths:
        sidecar = dataclasses.replace(read_sidecar(path), shard_sha256=file_sha256(path))
        sidecar_path(path).write_bytes(sidecar.to_json())
    files = tuple(
        dataclasses.replace(file, sha256=file_sha256(set_dir / "index" / file.file))
        for file in manifest.index_files
    )
    shards = tuple(ShardEntry.of(path) for path in paths)
    changed = dataclasses.replace(manifest, index_files=files, shards=shards)
    (set_dir / "index" / "dataset.json").write_bytes(changed.to_json())


def write_signed(path, values):
    """Write a manifest of these values with its own digest right, whatever they are."""
    values.pop(OWN_DIGEST)
    digest = hashlib.sha256(write_json(values)).hexdigest()
    path.write_bytes(write_json({**values, OWN_DIGEST: digest}))


def check(directory, *, full=False, workers=1):
    return verify(directory, full=full, workers=workers, quiet=True)


def problems(directory, *, full=False):
    """All problems that `verify` finds, a line each."""
    return "\n".join(map(str, check(directory, full=full).problems))
