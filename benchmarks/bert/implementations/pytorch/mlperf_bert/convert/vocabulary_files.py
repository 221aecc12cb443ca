"""The vocabulary that belongs to weights: the one that is given, or what lies beside them."""

import os
from pathlib import Path

from mlperf_bert.data.records import Record, read_record
from mlperf_bert.errors import CheckpointError
from mlperf_bert.prepare.any_vocabulary import AnyVocabulary, load_any_vocabulary
from mlperf_bert.prepare.vocabulary import parse_vocabulary

WORD_PIECES, TOKENIZER = "vocab.txt", "tokenizer.json"
_REMEDY = "give the vocabulary of these weights with --vocab"
_MOST_TOKENS = 2**24


def find_vocabulary(folder: Path, given: Path | None) -> AnyVocabulary:
    """The one that was given, or beside the weights vocab.txt, or the words of tokenizer.json.

    The last become a list, as `prepare --vocab` takes it. Raises DataError, or CheckpointError
    where there is none.
    """
    if given is not None:
        return load_any_vocabulary(given)
    if os.path.lexists(folder / WORD_PIECES):
        return load_any_vocabulary(folder / WORD_PIECES)
    if not os.path.lexists(folder / TOKENIZER):
        problem = f"has neither {WORD_PIECES} nor {TOKENIZER}"
        raise CheckpointError(str(folder), problem, _REMEDY)
    record = read_record(folder / TOKENIZER, missing="is missing", remedy=_REMEDY)
    if record.record("model").values.get("type") != "WordPiece":
        raise record.error("model.type", "is not WordPiece")
    ids = _ids(record)
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise record.error("model.vocab", "does not number its tokens from 0 on")
    contents = "".join(f"{token}\n" for token in tokens).encode("utf-8", "replace")
    vocabulary = parse_vocabulary(contents, f"{record.where}: model.vocab")
    if list(vocabulary.tokens) != tokens:
        raise record.error("model.vocab", "has tokens that no list of lines can hold")
    return vocabulary


def _ids(record: Record) -> dict[str, int]:
    """Token -> id of a tokenizer file, added ones too."""
    words = record.record("model").record("vocab")
    ids = {token: words.integer(token, high=_MOST_TOKENS) for token in words.values}
    if record.has("added_tokens"):
        for added in record.records("added_tokens"):
            ids[added.text("content")] = added.integer("id", high=_MOST_TOKENS)
    return ids
