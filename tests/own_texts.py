"""A made-up text of a user, and the sets that are prepared of it."""

import random

import numpy as np
import pytest

import support
from bert_tools.pretrain.prepare import CorpusRequest, prepare_corpus
from mlperf_bert.data.index import ShardSettings
from mlperf_bert.vocabulary.any_vocabulary import FileEncoder

WORDS = [f"w{first}{second}ord" for first in "abcdefghij" for second in "klmnopqrst"]

SETTINGS = ShardSettings(max_seq_length=48, max_predictions=8, dupe_factor=2, seed=12345)


def made_up_document(rng):
    """A few sentences."""
    sentences = [
        " ".join(rng.choices(WORDS, k=rng.randint(5, 12))) for _ in range(rng.randint(2, 6))
    ]
    return " ".join(sentence.capitalize() + "." for sentence in sentences)


def made_up_texts():
    """The same documents at every call."""
    rng = random.Random(5)
    return [made_up_document(rng) for _ in range(150)]


def write_letters(directory, num_documents=450):
    """A directory with a file per document, words of letters alone, each foretelling the next."""
    directory.mkdir()
    path = directory / "0.txt"
    support.write_synthetic_text(path, num_documents, seed=0)
    text = path.read_text().translate(str.maketrans("0123456789", "abcdefghij"))
    for number, document in enumerate(text.split("\n\n")):
        (directory / f"{number}.txt").write_text(document)
    return directory


def own_text(path, texts):
    """Small settings for documents that are written to `path`."""
    path.write_text("\n\n".join(texts) + "\n")
    return CorpusRequest(
        source=path,
        documents="empty-line",
        text_field="text",
        vocab_path=None,
        vocab_size=300,
        settings=SETTINGS,
    )


def write_parquet(path, text, **options):
    """A file of columns id and text."""
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    import pyarrow

    pq.write_table(pyarrow.table({"id": range(len(text)), "text": text}), path, **options)
    return path


def make(wanted, out, workers=1):
    assert prepare_corpus(wanted, out, workers=workers)
    return out


def contents(out):
    """Every file of the sets, and the vocabulary."""
    found = support.contents(out)
    kept = ("train", "eval", "vocab.txt")
    return {name: held for name, held in found.items() if name.split("/")[0] in kept}


def encode_lines(file, lines):
    """Token ids of each line, as `prepare` has them of a tokenizer's file."""
    encoder = FileEncoder(file)
    return [np.frombuffer(encoder.encode([line])[0], encoder.dtype) for line in lines]


def save_byte_level(path, lines, special=("<s>", "<pad>", "</s>", "<mask>")):
    """A vocabulary as `tokenizers` trains one: nothing stands around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    made.save(str(path))
    return path
