"""Create the embedded corpus, a small but real training and evaluation set.

The text is documentation of the user's own Python: the English prose of the language topics and of
the docstrings in the standard library. Tests and demonstrations therefore need no download, also on
a laptop. The same Python version and settings always give the same sets. The sources are parsed by
`ast` in the order of their sorted paths, and never imported. The file imports large modules only
when it creates a set, so that a call is fast if the sets already exist.
"""

import ast
import hashlib
import inspect
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from mlperf_bert.config.run_config import EMBEDDED_RECIPE
from mlperf_bert.data.index import Manifest, ShardSettings
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import make_directory, write_file
from mlperf_bert.prepare.documents import EVAL_DUPE_FACTOR, digest_of, split_sentences

HELD_OUT_FRACTION = 0.10
TRAIN_PARTS = 4
MIN_VOCAB_SIZE = 256

TextDocument = tuple[str, ...]  # sentences

# These have third-party code, tests and programs, which do not document the library.
SKIPPED_DIRECTORIES = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "lib2to3",
        "turtledemo",
        "pydoc_data",
        "_bundled",
        "__pycache__",
        "encodings",
    }
)
MIN_DOCUMENTS = 500
MIN_SENTENCE_WORDS = 4
# One-sentence docstrings of a module are joined into documents of about this many sentences.
JOINED_SENTENCES = 6
_CODE_LINE = re.compile(r"\s*(>>>|\.\.\. |::=|\$ |\|)|.*::=")
_PROSE_START = re.compile(r"[A-Za-z\"'(*\-]")
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # as in the fields of the classes
_BULLET = re.compile(r"^([*\-]|\d+\.|\([a-z0-9]\))\s+")


def prepare_embedded(out_dir: Path, vocab_size: int, settings: ShardSettings) -> bool:
    """Create or complete the prepared sets `out_dir/train` and `out_dir/eval`.

    Returns True if the function had to create a set. Raises ConfigError if `vocab_size` is too
    small. Raises DataError if a set exists that was made with other settings or by another Python,
    or if this Python has too little documentation.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        problem = f"is {vocab_size}"
        raise ConfigError("model.vocab_size", problem, f"set a size of at least {MIN_VOCAB_SIZE}")
    wanted: dict[str, int | str] = {
        "vocab_size": vocab_size,
        "max_seq_length": settings.max_seq_length,
        "max_predictions": settings.max_predictions,
        "seed": settings.seed,
        "segments": settings.segments,
    }
    passes = {"train": settings.dupe_factor, "eval": EVAL_DUPE_FACTOR}
    ready = [
        _is_ready(out_dir / name, {**wanted, "dupe_factor": count})
        for name, count in passes.items()
    ]
    if not all(ready):
        _make(out_dir, vocab_size, settings)
    return not all(ready)


def split_held_out(
    documents: list[TextDocument],
) -> tuple[list[TextDocument], list[TextDocument]]:
    """Split documents into documents for training and held-out documents, and return both.

    Sentences that also occur in a training document are removed from the held-out documents.
    Whether a document is held out depends only on the hash of its text, so new documents do not
    change which old ones are held out.
    """
    train: list[TextDocument] = []
    held_out: list[TextDocument] = []
    for document in documents:
        is_held_out = digest_of("\n".join(document)) < HELD_OUT_FRACTION * 2**64
        (held_out if is_held_out else train).append(document)
    seen = {sentence for document in train for sentence in document}
    unseen = [
        tuple(sentence for sentence in document if sentence not in seen) for document in held_out
    ]
    return train, [document for document in unseen if document]


def _is_ready(set_dir: Path, wanted: dict[str, int | str]) -> bool:
    """Return True if the set is complete. Raises DataError if its settings are not `wanted`."""
    if not (set_dir / "index" / "dataset.json").exists():
        return False
    manifest = Manifest.load(set_dir)
    found: dict[str, object] = {name: getattr(manifest, name) for name in wanted}
    corpus = manifest.corpus or {}
    provenance = {"recipe": EMBEDDED_RECIPE, "python_version": platform.python_version()}
    found.update({name: corpus.get(name) for name in provenance})
    for name, value in {**wanted, **provenance}.items():
        if found[name] != value:
            problem = f"was built with {name} = {found[name]} instead of {value}"
            raise DataError(str(set_dir), problem, "use a new directory, or delete the old set")
    return True


def _make(out_dir: Path, vocab_size: int, settings: ShardSettings) -> None:
    from mlperf_bert.prepare.build import prepare_pair
    from mlperf_bert.prepare.train_vocabulary import train_vocabulary

    train, held_out = split_held_out(collect_documents())
    make_directory(out_dir / "text")
    train_paths = [
        _write_text(out_dir / "text" / f"train-{part}.txt", train[part::TRAIN_PARTS])
        for part in range(TRAIN_PARTS)
    ]
    eval_path = _write_text(out_dir / "text" / "eval.txt", held_out)
    sentences = [sentence for document in train for sentence in document]
    vocab_path = out_dir / "vocab.txt"
    tokens = train_vocabulary(sentences, vocab_size)
    write_file(vocab_path, ("\n".join(tokens) + "\n").encode())
    corpus = {
        "recipe": EMBEDDED_RECIPE,
        "python_version": platform.python_version(),
        "text_sha256": _digest([*train_paths, eval_path]),
        "documents": str(len(train) + len(held_out)),
        "sentences": str(len(sentences) + sum(len(document) for document in held_out)),
    }
    texts = {"train": train_paths, "eval": [eval_path]}
    manifests = prepare_pair(
        texts, vocab_path, out_dir, settings, workers=1, corpus=corpus, quiet=True
    )
    print(_summary(corpus, manifests["train"], manifests["eval"]), flush=True)


def _write_text(path: Path, documents: list[TextDocument]) -> Path:
    text = "\n".join("".join(sentence + "\n" for sentence in document) for document in documents)
    write_file(path, text.encode())
    return path


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _summary(corpus: dict[str, str], train: Manifest, held_out: Manifest) -> str:
    assert held_out.baseline is not None
    tokens = [
        sum(length * count for length, count in enumerate(manifest.length_histogram))
        for manifest in (train, held_out)
    ]
    return (
        f"embedded corpus: {int(corpus['documents']):,} documents with "
        f"{int(corpus['sentences']):,} sentences\n"
        f"train: {train.num_samples:,} examples with {tokens[0]:,} tokens\n"
        f"eval: {held_out.num_samples:,} examples with {tokens[1]:,} tokens, of which "
        f"{held_out.baseline.masked_tokens:,} are masked\n"
        f"context-free baseline: accuracy {held_out.baseline.context_free_accuracy:.4f}, and "
        f"{held_out.baseline.mask_only_accuracy:.4f} on [MASK] inputs only"
    )


def collect_documents(stdlib: Path | None = None) -> list[TextDocument]:
    """Return the distinct ASCII documents of at least two sentences in Python's library.

    `stdlib` is the directory of the library, by default that of the running Python. Raises
    DataError if there is not enough text, for example because this Python has no sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if stdlib is None else stdlib
    documents = [prose_sentences(text) for text in _topics(root / "pydoc_data" / "topics.py")]
    for path in _source_files(root):
        documents += _module_documents(path)
    distinct = list(dict.fromkeys(document for document in documents if len(document) >= 2))
    if len(distinct) < MIN_DOCUMENTS:
        problem = f"has only {len(distinct)} of the {MIN_DOCUMENTS} documents needed"
        raise DataError(str(root), problem, "use a Python that includes its library's source files")
    return distinct


def prose_sentences(docstring: str) -> TextDocument:
    """Return the sentences of prose in a docstring, without code, tables and titles."""
    sentences: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        for block in _blocks(paragraph.split("\n")):
            if _is_prose(block):
                sentences += split_sentences(block)
    return tuple(
        sentence
        for sentence in sentences
        if sentence.isascii() and len(sentence.split()) >= MIN_SENTENCE_WORDS
    )


def _blocks(lines: list[str]) -> Iterator[str]:
    """Yield the blocks of text in the lines of a paragraph.

    Each list item is a separate block, without its bullet. The first line of code ends the blocks.
    """
    block: list[str] = []
    for line in lines:
        if _CODE_LINE.match(line):
            yield " ".join(block)
            return  # The rest is code, or the output of a prompt.
        stripped = line.strip()
        if _BULLET.match(stripped):
            yield " ".join(block)
            block = []
        block.append(_BULLET.sub("", stripped))
    yield " ".join(block)


def _is_prose(block: str) -> bool:
    if len(block.split()) < MIN_SENTENCE_WORDS or not _PROSE_START.match(block):
        return False
    plain = sum(char.isalpha() or char == " " for char in block)
    return plain >= 0.80 * len(block)


def _topics(path: Path) -> list[str]:
    """Return the texts of Python's language topics, as `help()` shows them."""
    tree = _parsed(path)
    if tree is None:
        return []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            values = [value for value in node.value.values if isinstance(value, ast.Constant)]
            return [value.value for value in values if isinstance(value.value, str)]
    return []


def _source_files(root: Path) -> list[Path]:
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        found += [Path(directory) / name for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _module_documents(path: Path) -> list[TextDocument]:
    """Return the documents of a source file.

    Each docstring of several sentences is a document. Docstrings of one sentence are joined to
    documents of several sentences.
    """
    tree = _parsed(path)
    if tree is None:
        return []
    documents: list[TextDocument] = []
    single: list[str] = []
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            sentences = prose_sentences(ast.get_docstring(node, clean=False) or "")
            if len(sentences) == 1:
                single += sentences
            else:
                documents.append(sentences)
    single = list(dict.fromkeys(single))
    for first in range(0, len(single), JOINED_SENTENCES):
        documents.append(tuple(single[first : first + JOINED_SENTENCES]))
    return documents


def _statements(tree: ast.Module) -> list[ast.AST]:
    """Return the module and its statements in the order of `ast.walk`, without expressions.

    Only statements have docstrings, and most nodes of a tree are expressions.
    """
    found: list[ast.AST] = [tree]
    for node in found:  # The list grows.
        for block in _BLOCKS:
            found += getattr(node, block, ())
    return found


def _parsed(path: Path) -> ast.Module | None:
    """Return the syntax tree of a source file.

    Returns None if the file has no docstring, or if it cannot be read or parsed.
    """
    try:
        source = path.read_bytes()
        if b'"""' not in source and b"'''" not in source and path.name != "topics.py":
            return None  # It has no docstring.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old docstrings
            return ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
