"""A user's own text and what a stopped run left of it; tokenizer files of three kinds."""

import atexit
import gzip
import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fuzz_mutations import mutate_bytes, mutate_json, mutate_lines
from fuzz_world import Parser
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from mlperf_bert.common.atomic import make_directory
from mlperf_bert.prepare.documents import clean_document
from mlperf_bert.prepare.own_files import (
    PARQUET_READER,
    digests,
    find_files,
    next_document,
    sections,
)
from mlperf_bert.prepare.own_parts import Rules, clean, plan_jobs, windows_of
from mlperf_bert.prepare.sandbox import Limits, Sandbox, sandbox
from mlperf_bert.vocabulary.tokenizer_file import load
from own_texts import encode_lines

DOCUMENTS = (
    "A first document with a sentence. And another, of some more words.",
    "Größe und 中文。第二句。 \u0645\u0631\u062d\u0628\u0627 and enough letters to stay.",
    "x" * 700 + " A long one.",
)
NAMES = ("a.txt", "b.jsonl", "c.txt.gz", "d.txt.zst")
RULES = Rules(documents="empty-line", text_field="text", held_out_share=0.25)
LINES = ("The model was trained on text.", "</s> [MASK] \u00e9\u4e00 a\u0301", " ", "x" * 300)
OF_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OF_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def make_texts(directory: Path) -> None:
    """The same documents in every form, and a job's record of them."""
    import zstandard

    text = "\n\n".join(DOCUMENTS).encode()
    objects = [json.dumps({"text": document, "id": 1}) for document in DOCUMENTS]
    make_directory(directory / "in")
    (directory / "in" / "a.txt").write_bytes(text)
    (directory / "in" / "b.jsonl").write_text("\n".join(objects) + "\n")
    (directory / "in" / "c.txt.gz").write_bytes(gzip.compress(text, mtime=0))
    (directory / "in" / "d.txt.zst").write_bytes(
        zstandard.ZstdCompressor(write_checksum=True).compress(text)
    )


def parse_texts(directory: Path) -> object:
    """Every document of every file, cleaned; and where a plain file would be cut."""
    found = []
    for name in NAMES:
        (file,) = find_files(directory / "in" / name)
        if file.packing == "plain":
            next_document(file.path, file.form, "empty-line", file.size_bytes // 2)
        for job in plan_jobs([file], digests([file], quiet=True), directory, RULES):
            for piece in job.pieces:
                for section in sections(piece, "empty-line", "text"):
                    cleaned, _ = clean_document(section.paragraphs)
                    found.append(windows_of("".join(cleaned)))
    return found


def make_record(directory: Path) -> None:
    """A job of one file, done."""
    make_texts(directory)
    for name in NAMES[1:]:
        (directory / "in" / name).unlink()
    make_directory(directory / "text")
    parse_record(directory)


def parse_record(directory: Path) -> object:
    """The job again, as after a stop."""
    files = find_files(directory / "in")
    jobs = plan_jobs(files, digests(files, quiet=True), directory / "text", RULES)
    return [clean(job) for job in jobs]


def make_parquet(directory: Path) -> None:
    """The documents in two row groups."""
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    import pyarrow

    pq.write_table(pyarrow.table({"text": DOCUMENTS}), directory / "e.parquet", row_group_size=2)


def parse_parquet(directory: Path) -> object:
    return _parquet_sandbox().read_bytes(directory / "e.parquet", "get it again")


@cache
def _parquet_sandbox() -> Sandbox:
    """One server for all inputs, until this process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(sandbox(f"{PARQUET_READER}:text", Limits(piece_cpu_seconds=1)))


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
    return encode_lines(load(directory / "tokenizer.json"), LINES)


def parser_of(kind: str) -> Parser:
    def make(directory: Path) -> None:
        (directory / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")

    return Parser(make=make, targets={"tokenizer.json": mutate_json}, parse=parse_tokenizer)


TEXT_PARSERS: Mapping[str, Parser] = {
    "own_text": Parser(
        make=make_texts,
        targets={
            "in/a.txt": mutate_bytes,
            "in/b.jsonl": mutate_lines(""),
            "in/c.txt.gz": mutate_bytes,
            "in/d.txt.zst": mutate_bytes,
        },
        parse=parse_texts,
    ),
    "own_text_parquet": Parser(
        make=make_parquet,
        targets={"e.parquet": mutate_bytes},
        parse=parse_parquet,
        inputs=5_000,
    ),
    "own_text_record": Parser(
        make=make_record,
        targets={"text/job-00000.json": mutate_json},
        optional=("text/job-00000.json",),
        parse=parse_record,
    ),
    **{f"tokenizer_{kind}": parser_of(kind) for kind in ("bytes", "pieces", "unigram")},
}
