"""Examples are those of the MLPerf reference, token by token.

The sets in `reference/` were made by the reference's own procedure (`create_pretraining_data.py`
of mlcommons/training) from sentences of this project's pages, with a vocabulary that this project
trained. The smaller set in `data/` was made
by this implementation; its short rows reach cases that long ones do not.
"""

from pathlib import Path

import h5py
import numpy as np
import pytest

from mlperf_bert.data.index import ShardSettings
from mlperf_bert.prepare.documents import read_text, tokenize_documents
from mlperf_bert.prepare.examples import make_examples
from mlperf_bert.vocabulary.word_pieces import Tokenizer, load_vocabulary
from plain_examples import plain_examples
from support import prepare_small

OWN = Path(__file__).parent / "data"
REFERENCE = Path(__file__).parent / "reference"
TEXT = REFERENCE / "sentences.txt"
VOCAB = REFERENCE / "vocab.txt"
SIZES = {
    "seq128_pred20_dupe2_seed7": (128, 20, 2, 7),
    "seq512_pred76_dupe2_seed12345": (512, 76, 2, 12345),
}
SETTINGS = ("max_seq_length", "max_predictions", "dupe_factor", "seed")
SETS = {name: dict(zip(SETTINGS, sizes, strict=True)) for name, sizes in SIZES.items()}


def made(maker, text, vocab, **settings):
    vocabulary = load_vocabulary(vocab)
    documents = tokenize_documents(read_text(text).text, Tokenizer(vocabulary))
    return maker(documents, vocabulary, ShardSettings(**settings))


def assert_same_as_reference(found, expected):
    lengths = np.diff(found["offsets"])
    within = np.arange(lengths.sum()) - np.repeat(found["offsets"][:-1], lengths)
    segment_ids = within >= np.repeat(found["segment_b_start"], lengths)
    shared_names = found.keys() & expected.keys()
    assert len(shared_names) == 5
    for key in shared_names:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)
    np.testing.assert_array_equal(found["next_sentence_label"], expected["next_sentence_labels"])
    np.testing.assert_array_equal(segment_ids, expected["segment_ids"])


@pytest.mark.parametrize("name", SETS)
def test_reference_sets_come_out_of_whole_preparations(name, tmp_path):
    """And of the readable procedure, which other tests compare with."""
    expected = dict(np.load(REFERENCE / f"{name}.npz"))
    examples = made(plain_examples, TEXT, VOCAB, **SETS[name])
    found = {each: getattr(examples, each) for each in examples.__slots__}
    assert_same_as_reference(found, expected)
    # Two texts, or two workers would share out nothing; the reference's arrays fit one of them.
    half = tmp_path / "half.txt"
    documents = TEXT.read_text(encoding="utf-8").split("\n\n")
    half.write_text("\n\n".join(documents[: len(documents) // 2]), encoding="utf-8")
    shards = {}
    for workers in (1, 2):
        out = tmp_path / str(workers)
        prepare_small([half, TEXT], VOCAB, out, **SETS[name], workers=workers)
        shards[workers] = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    assert len(shards[1]) == 4
    assert shards[1] == shards[2]
    with h5py.File(tmp_path / "2" / "shards" / "sentences.hdf5") as file:
        found = {key: file[key][:] for key in file}
    assert_same_as_reference(found, expected)


@pytest.mark.parametrize("maker", [make_examples, plain_examples])
def test_own_set_is_reproduced(maker):
    options = {"max_seq_length": 64, "max_predictions": 10, "dupe_factor": 3, "seed": 12345}
    examples = made(maker, OWN / "own_sentences.txt", OWN / "own_vocab.txt", **options)
    expected = np.load(OWN / "own_seq64_dupe3_seed12345.npz")
    for key in expected.files:
        np.testing.assert_array_equal(getattr(examples, key), expected[key], err_msg=key)
