"""Tokenizer files of three kinds, mutated: loaded, and made to split text."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_mutations import mutate_json
from fuzz_parser import Parser
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from mlperf_bert.vocabulary.tokenizer_file import load

LINES = ("The model was trained on text.", "</s> [MASK] \u00e9\u4e00 a\u0301", " ", "x" * 300)
OF_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OF_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@cache
def tokenizer_json(kind: str) -> str:
    """A tokenizer of a few dozen tokens; `kind` is "bytes", "pieces" or "unigram"."""
    if kind == "pieces":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(
            vocab_size=60, special_tokens=OF_BERT, show_progress=False
        )
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=40, special_tokens=OF_ROBERTA, unk_token="<unk>", show_progress=False
        )
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern="-", behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=OF_ROBERTA, show_progress=False)
    made.train_from_iterator(LINES[:1] * 5, trainer)
    return json.dumps(json.loads(made.to_str()))


def parse_tokenizer(directory: Path) -> object:
    """Load the file and split a few lines with it."""
    return load(directory / "tokenizer.json").encode_lines(LINES)


def parser_of(kind: str) -> Parser:
    """The parser of one kind of tokenizer."""

    def make(directory: Path) -> None:
        (directory / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")

    return Parser(make=make, targets={"tokenizer.json": mutate_json}, parse=parse_tokenizer)


TOKENIZER_PARSERS: Mapping[str, Parser] = {
    f"tokenizer_{kind}": parser_of(kind) for kind in ("bytes", "pieces", "unigram")
}
