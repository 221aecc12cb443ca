"""Examples are those of the MLPerf reference, token by token.

The large golden sets were made by the reference procedure itself and are too big to travel with
the project: they are read from the directory MLPERF_BERT_SHARED (default: `shared` beside the
repository). The small set in `data/` was written for this project and made by this
implementation after it had reproduced the large ones.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.prepare.documents import read_text, tokenize_documents
from mlperf_bert.prepare.examples import ExampleArrays, ExampleMaker
from mlperf_bert.prepare.vocabulary import load_vocabulary
from mlperf_bert.prepare.wordpiece import PlainTokenizer, Tokenizer

OWN = Path(__file__).parent / "data"
SHARED = Path(
    os.environ.get("MLPERF_BERT_SHARED", str(Path(__file__).resolve().parents[3] / "shared"))
)


def make_examples(
    text: Path, vocab: Path, length: int, predictions: int, seed: int, dupe_factor: int
) -> ExampleArrays:
    vocabulary = load_vocabulary(vocab)
    documents = tokenize_documents(read_text(text).text, Tokenizer(vocabulary), split=False)
    maker = ExampleMaker(vocabulary, max_seq_length=length, max_predictions=predictions, seed=seed)
    return maker.make(documents, dupe_factor)


def segment_ids(examples: ExampleArrays) -> np.ndarray:
    lengths = np.diff(examples.offsets)
    within = np.arange(lengths.sum()) - np.repeat(examples.offsets[:-1], lengths)
    return (within >= np.repeat(examples.segment_b_start, lengths)).astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "length", "predictions", "seed"), [("a", 512, 76, 12345), ("b", 128, 20, 7)]
)
def test_reference_sets_are_reproduced(name: str, length: int, predictions: int, seed: int) -> None:
    stem = SHARED / "data" / "golden" / f"sentences_{name}"
    if not stem.with_suffix(".txt").exists():
        pytest.skip(f"no reference golden sets in {SHARED}; set MLPERF_BERT_SHARED")
    expected = np.load(f"{stem}_seq{length}_dupe2_seed{seed}.npz")
    examples = make_examples(
        stem.with_suffix(".txt"),
        SHARED / "data" / "bert_uncased_vocab.txt",
        length,
        predictions,
        seed,
        2,
    )
    for key in (
        "input_ids",
        "offsets",
        "masked_lm_positions",
        "masked_lm_ids",
        "masked_lm_offsets",
    ):
        np.testing.assert_array_equal(getattr(examples, key), expected[key], err_msg=key)
    np.testing.assert_array_equal(examples.next_sentence_label, expected["next_sentence_labels"])
    np.testing.assert_array_equal(segment_ids(examples), expected["segment_ids"])


def test_own_set_is_reproduced() -> None:
    examples = make_examples(OWN / "own_sentences.txt", OWN / "own_vocab.txt", 64, 10, 12345, 3)
    expected = np.load(OWN / "own_seq64_dupe3_seed12345.npz")
    for key in expected.files:
        np.testing.assert_array_equal(getattr(examples, key), expected[key], err_msg=key)


def test_own_set_takes_both_tokenizer_paths() -> None:
    vocabulary = load_vocabulary(OWN / "own_vocab.txt")
    lines = read_text(OWN / "own_sentences.txt").text.split("\n")
    plain = PlainTokenizer(vocabulary)
    tokenizer = Tokenizer(vocabulary)
    assert tokenizer.encode_lines(lines) == [plain.encode(line) for line in lines]
    unsafe = [line for line in lines if not tokenizer.is_safe(line)]
    assert 0 < len(unsafe) < len(lines)
