"""The vocabulary that belongs to weights: a list of word pieces, or a tokenizer file, as bytes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.data.records import Record, read_record
from mlperf_bert.errors import CheckpointError, DataError
from mlperf_bert.prepare.vocabulary import load_vocabulary, parse_vocabulary
from mlperf_bert.untrusted import MAX_JSON_BYTES, in_brief, read_regular_file

WORD_PIECES, TOKENIZER = "vocab.txt", "tokenizer.json"
_REMEDY = "give the vocabulary of these weights with --vocab"
_MOST_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class VocabularyFile:
    """`name` is WORD_PIECES or TOKENIZER; data that were prepared with it have its `sha256`."""

    name: str
    contents: bytes
    num_tokens: int

    @property
    def sha256(self) -> str:
        """Digest of the contents, in hex."""
        return hashlib.sha256(self.contents).hexdigest()


def read_vocabulary_file(path: Path) -> VocabularyFile:
    """A file that a user named: a tokenizer file where it ends in .json, else word pieces.

    Raises DataError.
    """
    if path.suffix != ".json":
        vocabulary = load_vocabulary(path)
        return VocabularyFile(WORD_PIECES, vocabulary.contents, len(vocabulary))
    record = read_record(path, missing="is missing", remedy=_REMEDY)
    try:
        contents = read_regular_file(path, MAX_JSON_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _REMEDY) from None
    return VocabularyFile(TOKENIZER, contents, 1 + max(_ids(record).values()))


def find_vocabulary(folder: Path, given: Path | None) -> VocabularyFile:
    """The one that was given, or what lies beside the weights.

    That is vocab.txt, or the word pieces of tokenizer.json, as a list. Raises DataError, or
    CheckpointError where there is none.
    """
    if given is not None:
        return read_vocabulary_file(given)
    if (folder / WORD_PIECES).exists():
        return read_vocabulary_file(folder / WORD_PIECES)
    if not (folder / TOKENIZER).exists():
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
    return VocabularyFile(WORD_PIECES, contents, len(tokens))


def _ids(record: Record) -> dict[str, int]:
    """Token -> id of a tokenizer file, added ones too."""
    vocab = record.record("model").values.get("vocab")
    if isinstance(vocab, list):  # a unigram model's: pairs of token and score
        ids = {f"number {number}": number for number in range(len(vocab))}
    else:
        words = record.record("model").record("vocab")
        ids = {token: words.integer(token, high=_MOST_TOKENS) for token in words.values}
    if record.has("added_tokens"):
        for added in record.records("added_tokens"):
            ids[added.text("content")] = added.integer("id", high=_MOST_TOKENS)
    if not ids:
        raise record.error("model.vocab", f"is {in_brief(vocab)}")
    return ids
