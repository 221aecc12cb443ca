"""English prose from the user's own Python: its language topics and standard-library docstrings.

Sources are read by `ast`, never imported. Order is that of sorted paths, so the same Python gives
the same documents.
"""

import ast
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare.sentences import split_sentences

TextDocument = tuple[str, ...]  # sentences

# Third-party code, tests and programs, none of which is documentation of the library.
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
# A module's one-sentence docstrings are joined into documents of about this many sentences.
JOINED_SENTENCES = 6

_CODE_LINE = re.compile(r"\s*(>>>|\.\.\. |::=|\$ |\|)|.*::=")
_PROSE_START = re.compile(r"[A-Za-z\"'(*\-]")
_BULLET = re.compile(r"^([*\-]|\d+\.|\([a-z0-9]\))\s+")


def collect_documents(stdlib: Path | None = None) -> list[TextDocument]:
    """Distinct documents of at least two sentences, ASCII only.

    Args:
        stdlib: directory to read; that of the running Python if not given.

    Raises:
        DataError: there is not enough text, as in a Python installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if stdlib is None else stdlib
    documents = [prose_sentences(text) for text in _topics(root / "pydoc_data" / "topics.py")]
    for path in _source_files(root):
        documents += _module_documents(path)
    distinct = list(dict.fromkeys(document for document in documents if len(document) >= 2))
    if len(distinct) < MIN_DOCUMENTS:
        problem = f"has documentation for {len(distinct)} documents, {MIN_DOCUMENTS} are needed"
        raise DataError(str(root), problem, "use a Python installed with its library's sources")
    return distinct


def prose_sentences(docstring: str) -> TextDocument:
    """The sentences of a docstring's prose paragraphs; code, tables and titles are dropped."""
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
    """A paragraph's text, its list items apart and without their marks."""
    block: list[str] = []
    for line in lines:
        if _CODE_LINE.match(line):
            yield " ".join(block)
            return  # what follows a prompt is its output
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
    tree = _parsed(path)
    if tree is None:
        return []
    documents: list[TextDocument] = []
    single: list[str] = []
    for node in ast.walk(tree):
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


def _parsed(path: Path) -> ast.Module | None:
    try:
        source = path.read_bytes()
        if b'"""' not in source and b"'''" not in source and path.name != "topics.py":
            return None  # no docstring worth the parsing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old docstrings
            return ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
