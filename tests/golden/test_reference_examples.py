"""Examples are those of the MLPerf reference, token by token.

The large golden sets were made by the reference procedure itself and are too big to travel with
the project: they are read from the directory MLPERF_BERT_SHARED (default: `shared` beside the
repository). The small set in `data/` was written for this project and made by this
implementation after it had reproduced the large ones.
"""

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from mlperf_bert.data.index import ShardSettings
from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.prepare.documents import Documents, read_text, tokenize_documents
from mlperf_bert.prepare.examples import make_examples
from mlperf_bert.vocabulary.word_pieces import Tokenizer, Vocabulary, load_vocabulary
from plain_examples import plain_examples
from support import prepare_small

OWN = Path(__file__).parent / "data"
SHARED = Path(
    os.environ.get("MLPERF_BERT_SHARED", str(Path(__file__).resolve().parents[3] / "shared"))
)
GOLDEN = SHARED / "data" / "golden"
VOCAB = SHARED / "data" / "bert_uncased_vocab.txt"
SETS = {
    "a": {"max_seq_length": 512, "max_predictions": 76, "seed": 12345},
    "b": {"max_seq_length": 128, "max_predictions": 20, "seed": 7},
}
Maker = Callable[[Documents, Vocabulary, ShardSettings], ShardArrays]


def needs_golden_sets() -> None:
    if not GOLDEN.exists():
        pytest.skip(f"no reference golden sets in {SHARED}; set MLPERF_BERT_SHARED")


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    options = SETS[name]
    length, seed = options["max_seq_length"], options["seed"]
    return dict(np.load(GOLDEN / f"sentences_{name}_seq{length}_dupe2_seed{seed}.npz"))


def made(maker: Maker, text: Path, vocab: Path, **settings: int) -> ShardArrays:
    vocabulary = load_vocabulary(vocab)
    documents = tokenize_documents(read_text(text).text, Tokenizer(vocabulary), split=False)
    return maker(documents, vocabulary, ShardSettings(**settings))


def as_arrays(examples: ShardArrays) -> dict[str, np.ndarray]:
    return {name: getattr(examples, name) for name in examples.__slots__}


def assert_same_as_golden(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    lengths = np.diff(found["offsets"])
    within = np.arange(lengths.sum()) - np.repeat(found["offsets"][:-1], lengths)
    segment_ids = within >= np.repeat(found["segment_b_start"], lengths)
    shared_names = found.keys() & expected.keys()
    assert len(shared_names) == 5
    for key in shared_names:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)
    np.testing.assert_array_equal(found["next_sentence_label"], expected["next_sentence_labels"])
    np.testing.assert_array_equal(segment_ids, expected["segment_ids"])


@pytest.mark.parametrize("maker", [make_examples, plain_examples])
@pytest.mark.parametrize("name", SETS)
def test_reference_sets_are_reproduced(name: str, maker: Maker) -> None:
    needs_golden_sets()
    text = GOLDEN / f"sentences_{name}.txt"
    examples = made(maker, text, VOCAB, dupe_factor=2, **SETS[name])
    assert_same_as_golden(as_arrays(examples), golden_arrays(name))


@pytest.mark.parametrize("name", SETS)
def test_reference_sets_come_out_of_whole_preparations(name: str, tmp_path: Path) -> None:
    # Two texts, or two workers would share out nothing; the golden arrays fit one of them.
    needs_golden_sets()
    texts = [GOLDEN / f"sentences_{each}.txt" for each in SETS]
    shards: dict[int, dict[str, bytes]] = {}
    for workers in (1, 2):
        out = tmp_path / str(workers)
        prepare_small(texts, VOCAB, out, **SETS[name], dupe_factor=2, workers=workers)
        shards[workers] = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    assert len(shards[1]) == 4
    assert shards[1] == shards[2]
    with h5py.File(tmp_path / "2" / "shards" / f"sentences_{name}.hdf5") as file:
        found = {key: file[key][:] for key in file}
    assert_same_as_golden(found, golden_arrays(name))


@pytest.mark.parametrize("maker", [make_examples, plain_examples])
def test_own_set_is_reproduced(maker: Maker) -> None:
    options = {"max_seq_length": 64, "max_predictions": 10, "dupe_factor": 3, "seed": 12345}
    examples = made(maker, OWN / "own_sentences.txt", OWN / "own_vocab.txt", **options)
    expected = np.load(OWN / "own_seq64_dupe3_seed12345.npz")
    for key in expected.files:
        np.testing.assert_array_equal(getattr(examples, key), expected[key], err_msg=key)
