"""The same examples as a prepared set of two shards and as files of others, and their import."""

from pathlib import Path

from foreign_files import WRITERS, examples_of
from mlperf_bert.data.index import ShardSettings
from mlperf_bert.prepare.import_examples import import_set
from support import prepare_small

GOLDEN = Path(__file__).parent / "golden" / "data"
VOCAB = GOLDEN / "own_vocab.txt"
WIDTH, ROOM = 64, 10
SMALL = {"max_seq_length": WIDTH, "max_predictions": ROOM}
NAMES = ("part-0", "part-1")


def make_from_text(directory):
    """The set that `prepare --text` makes of two texts."""
    documents = (GOLDEN / "own_sentences.txt").read_text(encoding="utf-8").split("\n\n")
    for number, name in enumerate(NAMES):
        (directory / f"{name}.txt").write_text("\n\n".join(documents[number::2]), encoding="utf-8")
    texts = [directory / f"{name}.txt" for name in NAMES]
    prepare_small(texts, VOCAB, directory / "set", **SMALL, dupe_factor=5)
    return directory / "set"


def make_foreign(from_text, directory):
    """Ending -> both parts as files of that kind."""
    found = {}
    for ending, write in WRITERS.items():
        found[ending] = [directory / f"{name}.{ending}" for name in NAMES]
        for name, path in zip(NAMES, found[ending], strict=True):
            write(path, examples_of(shard_of(from_text, name)), WIDTH, ROOM)
    return found


def shard_of(set_dir, name):
    """The shard of that name."""
    return set_dir / "shards" / f"{name}.hdf5"


def bring(files, out, vocab=VOCAB, workers=1, **changes):
    """`import_set` with small limits."""
    settings = ShardSettings(**{**SMALL, "seed": 0, "dupe_factor": 1, **changes})
    return import_set(files, vocab, out, settings, quiet=True, workers=workers)
