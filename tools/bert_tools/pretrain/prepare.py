"""A user's own text to a training and a held-out set, with a vocabulary.

    files -> cleaned parts, split by document -> held-out text
          -> vocabulary of the training parts -> the two prepared sets -> corpus.json

Each step writes its files whole or not at all, so a stopped run can be resumed. DIR/text holds the
files of the first steps. DIR/corpus.json says what vocabulary and sets are made of, so that they
never mix two texts; the last step completes it.

The digest of a document's text (of its first section, if it is cut) decides if it is held out, so
new documents move no others, and copies of a document stay on one side. Evaluation keeps few
held-out documents, and each text once.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bert_tools.pretrain.cleaning import clean_document, documents_of
from bert_tools.pretrain.documents import (
    DocumentRule,
    Rules,
    can_be_cut,
    next_document,
    sections,
)
from bert_tools.pretrain.files import (
    TextFile,
    Unread,
    find_files,
    text_bytes,
    unread_in_words,
    with_encodings,
)
from bert_tools.pretrain.vocabulary import check_vocab_size, own_vocabulary
from mlperf_bert.data.index import ShardSettings
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import (
    file_digest,
    in_brief,
    make_directory,
    read_json,
    reading,
    write_file,
    write_json,
)
from mlperf_bert.prepare.build import check_settings, prepare_pair
from mlperf_bert.prepare.documents import digest_of
from mlperf_bert.prepare.pool import run_with_progress
from mlperf_bert.prepare.verify import verify
from mlperf_bert.run.console import ProgressLines
from mlperf_bert.vocabulary.any_vocabulary import file_name, load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES

RECIPE = "own-1"
CLEANING_VERSION = 5  # version of the rules that turn text into parts
_REMEDY = "name a new directory or delete this one"
_CONVERT = "convert what is not, for example by iconv -f WINDOWS-1252 -t UTF-8"
FEWEST_FILES = 32  # of which each is a document
LEAST_DOCUMENTS = 2  # in each text: the reference pairs a document with another one
LEAST_DIFFERENT = 2 * LEAST_DOCUMENTS  # as copies stay on one side
MANY_OF_ONE_SENTENCE = 0.9  # share of the documents, with a warning where pairs are learned
MOST_LEFT_OUT = 0.05  # share of the characters, without a warning

# Making examples of a part of 16 MiB (S 512, ten passes) takes less than 1 GB.
MOST_PART_BYTES = 16 * 2**20
LEAST_PART_BYTES = 2**18
WANTED_PARTS = 8  # parts of a small text, for as many workers

LARGEST_SHARE = 1 / 16
MOST_HELD_OUT, SHARE_STEP = 2, 1.25  # most characters, over the share; factor between shares
WANTED_HELD_OUT = 4  # of few documents

# An evaluation should cost little: this gives about half a million tokens in two passes, and a
# standard error of the accuracy of 0.002.
EVAL_BYTES = 2**20
HELD_OUT_BYTES = 4 * EVAL_BYTES  # the most that is held out


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusRequest:
    """A request: the text, and the sets to make of it.

    `vocab_path` is a given vocabulary or tokenizer; without it a vocabulary of `vocab_size` tokens
    is made. If `documents` is None, each plain file is a document, but of fewer than FEWEST_FILES
    each paragraph is one. `also` has endings of plain text beside the usual ones.
    """

    source: Path
    documents: DocumentRule | None
    text_field: str
    vocab_path: Path | None
    vocab_size: int
    settings: ShardSettings
    also: tuple[str, ...] = ()


def prepare_corpus(wanted: CorpusRequest, out_dir: Path, *, workers: int) -> bool:
    """Make or finish `out_dir`/train, /eval, /vocab.txt and /corpus.json.

    Returns True if anything had to be made. Raises ConfigError and DataError for faults that the
    user can mend, and if `out_dir` was made of other text or with other settings.
    """
    check_options(wanted, out_dir, workers)
    files, unread = _checked_files(wanted, out_dir)
    is_few = len(files) < FEWEST_FILES and all(file.form == "text" for file in files)
    by_number: DocumentRule = "empty-line" if is_few else "file"
    rules = Rules(wanted.documents or by_number, wanted.text_field)
    _show_files(files, rules, unread)
    settings = _settings_of(wanted, files, rules)
    if _is_ready(out_dir, settings):
        return False

    text_dir = out_dir / "text"
    clean_all = partial(_clean_all, files, rules, settings["text"], text_dir, workers)
    share = default_share(files)
    parts_dir, cleaned = clean_all(share)
    fitting = fitting_share(cleaned, share)
    if fitting != share:
        parts_dir, cleaned = clean_all(fitting)
    characters = _show_left_out(cleaned)

    held_out = choose_held_out(parts_dir / part.file for part in cleaned.held_out)
    documents = {
        "train": num_documents(cleaned.train),
        "eval": len(held_out),
        "held out, but not needed": num_documents(cleaned.held_out) - len(held_out),
    }
    _check_documents(wanted, rules, cleaned, documents)
    eval_path = text_dir / "eval.txt"
    write_file(eval_path, "\n".join(held_out).encode())
    texts = {"train": _training_texts(cleaned, parts_dir), "eval": [eval_path]}

    record: dict[str, object] = {"settings": settings}
    write_file(out_dir / "corpus.json", write_json(record))
    vocab_path = _vocabulary(wanted, out_dir, texts["train"], workers)
    digests_of_parts = (part.sha256 for part in (*cleaned.train, *cleaned.held_out))
    corpus = {
        "recipe": RECIPE,
        "text_sha256": _digest(*digests_of_parts),
        "files": str(len(files)),
        "documents": str(documents["train"]),
        "held_out_documents": str(documents["eval"]),
    }
    prepare_pair(
        texts, vocab_path, out_dir, wanted.settings, workers=workers, corpus=corpus, quiet=False
    )
    record |= {"rules": asdict(rules), "documents": documents, "characters": characters}
    write_file(out_dir / "corpus.json", write_json(record))
    print("documents: " + "; ".join(f"{name} {count:,}" for name, count in documents.items()))
    return True


# Check --------------------------------------------------------------------------------------------


def check_options(wanted: CorpusRequest, out_dir: Path, workers: int) -> None:
    """Check the options before the text is read for hours. Raises ConfigError."""
    if wanted.vocab_path is None:
        check_vocab_size(wanted.vocab_size)
    check_settings(wanted.settings, workers, num_texts=1)
    check_place(wanted.source, out_dir)


def _checked_files(wanted: CorpusRequest, out_dir: Path) -> tuple[list[TextFile], list[Unread]]:
    """The files with their encodings, and what is not read.

    A line tells of encodings where they are not all UTF-8.

    Raises DataError if most bytes are in none of Unicode's encodings.
    """
    with ProgressLines().never_silent(lambda: "looking at the files"):
        given, unread = find_files(
            wanted.source,
            wanted.vocab_path,
            text_field=wanted.text_field,
            also=wanted.also,
            out=out_dir,
        )
        files, foreign = with_encodings(given)
    counts = Counter(file.encoding for file in files if file.encoding != "utf-8")
    if counts:
        found = ", ".join(f"{count:,} in {name.upper()}" for name, count in counts.most_common())
        print(f"encodings: {found}; the others in UTF-8", flush=True)
    if foreign:
        name = in_brief(foreign[0].name)
        number = len(files) + len(foreign)
        problem = f"{len(foreign):,} of {number:,} files are not Unicode text (first {name})"
        if text_bytes(foreign) > text_bytes(files):
            raise DataError(str(wanted.source), problem, _CONVERT)
        print(f"warning: {problem}, so they are left out; {_CONVERT}", flush=True)
    return files, unread


def check_place(text: Path, out_dir: Path) -> None:
    """Raise ConfigError for an `out_dir` whose files would be read as text."""
    source, out = text.resolve(), out_dir.resolve()
    is_read = out.is_relative_to(source) and not any(
        name.startswith(".") for name in out.relative_to(source).parts
    )
    if is_read or source.is_relative_to(out / "text"):
        problem = f"is {out_dir}, whose files would be read as text of {text}"
        raise ConfigError("--out", problem, "name a directory outside of the text")


def text_digest(files: Sequence[TextFile]) -> str:
    """A digest of the text. Raises DataError if it cannot be read."""
    kinds = [f"{file.form} {file.packing}" for file in files]
    digests = [file_digest(file.path, "give readable text files") for file in files]
    return _digest(str(CLEANING_VERSION), *kinds, *digests)


def _digest(*words: str) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def _settings_of(wanted: CorpusRequest, files: Sequence[TextFile], rules: Rules) -> dict[str, str]:
    """What must be as before if the directory exists."""
    given = None if wanted.vocab_path is None else load_any_vocabulary(wanted.vocab_path).sha256
    settings = {
        "text": text_digest(files),
        "vocabulary": given or f"own, {wanted.vocab_size} tokens",
        "documents": rules.documents,
        "text_field": rules.text_field,
    }
    for name in ("max_seq_length", "max_predictions", "dupe_factor", "seed", "segments"):
        settings[name] = str(getattr(wanted.settings, name))
    return settings


def _is_ready(out_dir: Path, settings: dict[str, str]) -> bool:
    """True if everything is there and complete; DataError if it was made with other settings."""
    path = out_dir / "corpus.json"
    if not path.exists():
        return False
    record = read_json(path, missing="is missing", remedy=_REMEDY)
    with reading(path, _REMEDY):
        before = {name: record["settings"].get(name) for name in settings}
    for name, value in settings.items():
        if before[name] != value:
            now = f"{name} = {before[name]}, now it is {value}"
            was = "other text" if name == "text" else now
            raise DataError(str(out_dir), f"was made with {was}", _REMEDY)
    has_vocabulary = any((out_dir / name).exists() for name in VOCABULARY_FILES)
    if "documents" not in record or not has_vocabulary:
        return False
    return not verify(out_dir, full=False, workers=1, quiet=True).problems


# Clean --------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A file of cleaned text; each section counts as a document."""

    file: str
    documents: int
    num_bytes: int
    sha256: str


class Cleaned(NamedTuple):
    """The result of one job or of several.

    `num_chars` are kept, and `left_out` counts characters by the reason. `lowest` has the digest,
    sections, and bytes of the held-out documents, and of the next few of each job. `different` has
    the lowest digests of each job, each once, so that copies are seen. `one_sentence` counts
    documents that have no second sentence.
    """

    train: list[Part]
    held_out: list[Part]
    num_chars: int
    left_out: dict[str, int]
    lowest: list[list[int]]
    different: list[int]
    one_sentence: int


Job = tuple[int, list[TextFile]]  # a number, and pieces of files


def _clean_all(
    files: Sequence[TextFile], rules: Rules, text: str, text_dir: Path, workers: int, share: float
) -> tuple[Path, Cleaned]:
    """Clean and split all files in a directory of their own for this text, rules, and share."""
    parts_dir = text_dir / _digest(text, str(rules), str(share))[:16]
    make_directory(parts_dir)
    jobs = plan_jobs(files, rules)
    found = run_with_progress(
        partial(clean, parts_dir=parts_dir, rules=rules, share=share),
        jobs,
        workers,
        sizes=[text_bytes(pieces) for _, pieces in jobs],
        words=("cleaned", "pieces"),
        quiet=False,
    )
    by_number = {number: cleaned for (number, _), cleaned in found}
    made = [by_number[number] for number in range(len(jobs))]
    together = Cleaned(
        [part for each in made for part in each.train],
        [part for each in made for part in each.held_out],
        sum(each.num_chars for each in made),
        sum((Counter(each.left_out) for each in made), Counter()),
        [document for each in made for document in each.lowest],
        sorted({digest for each in made for digest in each.different}),
        sum(each.one_sentence for each in made),
    )
    return parts_dir, together


def plan_jobs(files: Sequence[TextFile], rules: Rules) -> list[Job]:
    """Plan the jobs: small files together, large plain files cut between documents.

    They depend only on names and sizes of the files, never on the number of workers, so the same
    files give the same parts.
    """
    wanted = min(MOST_PART_BYTES, max(LEAST_PART_BYTES, text_bytes(files) // WANTED_PARTS))
    groups: list[list[TextFile]] = []
    in_group = 0
    for piece in (each for file in files for each in _pieces(file, rules, wanted)):
        if not groups or in_group + piece.text_bytes > wanted:
            groups.append([])
            in_group = 0
        groups[-1].append(piece)
        in_group += piece.text_bytes
    return list(enumerate(groups))


def _pieces(file: TextFile, rules: Rules, wanted: int) -> Iterator[TextFile]:
    if can_be_cut(file, rules):
        for position in range(wanted, file.size_bytes, wanted):
            if position > file.start:
                start = next_document(file, position)
                if start is None:
                    break
                yield replace(file, stop=start)
                file = replace(file, start=start)
    yield file


def clean(job: Job, *, parts_dir: Path, rules: Rules, share: float) -> Cleaned:
    """Do a job, or read the record of its earlier result, which is written last.

    Raises DataError for what cannot be read.
    """
    number, pieces = job
    record = parts_dir / f"job-{number:05d}.json"
    if record.exists():
        values = read_json(record, missing="is missing", remedy=_REMEDY)
        with reading(record, _REMEDY):
            for side in ("train", "held_out"):
                values[side] = [Part(*each) for each in values[side]]
            return Cleaned(**values)
    train = _PartWriter(parts_dir / f"train-{number:05d}")
    held_out = _PartWriter(parts_dir / f"held_out-{number:05d}")
    to, opens, num_chars, one_sentence = train, True, 0, 0
    left_out: Counter[str] = Counter()
    documents: list[list[int]] = []  # the digest, sections and bytes of each
    for section in (each for piece in pieces for each in sections(piece, rules)):
        opens = opens or section.opens  # also if the opening section was left out
        sentences, lost = clean_document(section.paragraphs)
        left_out.update(lost)
        if not sentences:
            continue
        text = "".join(sentence + "\n" for sentence in sentences)
        num_chars += len(text)
        one_sentence += len(sentences) == 1
        if opens:
            documents.append([digest_of(text), 0, 0])
            to = held_out if documents[-1][0] < share * 2**64 else train
        documents[-1][1] += 1
        documents[-1][2] += len(text.encode()) + 1
        to.add(text)
        opens = False
    num_held_out = sum(digest < share * 2**64 for digest, _, _ in documents)
    lowest = sorted(documents)[: num_held_out + WANTED_HELD_OUT]
    different = sorted({digest for digest, _, _ in documents})[:LEAST_DIFFERENT]
    parts = train.finish(), held_out.finish()
    made = Cleaned(*parts, num_chars, left_out, lowest, different, one_sentence)
    write_file(record, json.dumps(made._asdict()).encode())
    return made


class _PartWriter:
    """Writes documents to files of about MOST_PART_BYTES, whose names begin with `stem`."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._parts: list[Part] = []
        self._documents: list[bytes] = []
        self._num_bytes = 0

    def add(self, document: str) -> None:
        """Add a document's sentences."""
        if self._num_bytes > MOST_PART_BYTES:
            self.finish()
        self._documents.append(document.encode())
        self._num_bytes += len(self._documents[-1]) + 1

    def finish(self) -> list[Part]:
        """Write what is not written yet; return all parts."""
        if self._documents:
            path = self._stem.with_name(f"{self._stem.name}-{len(self._parts):03d}.txt")
            contents = b"\n".join(self._documents)
            write_file(path, contents)
            digest = hashlib.sha256(contents).hexdigest()
            self._parts.append(Part(path.name, len(self._documents), len(contents), digest))
            self._documents, self._num_bytes = [], 0
        return self._parts


def num_documents(parts: Iterable[Part]) -> int:
    """Documents of all these parts."""
    return sum(part.documents for part in parts)


def _training_texts(cleaned: Cleaned, parts_dir: Path) -> list[Path]:
    """The parts with enough documents; documents of the other parts are joined to one more part."""
    large = [part for part in cleaned.train if part.documents >= LEAST_DOCUMENTS]
    small = [part for part in cleaned.train if part.documents < LEAST_DOCUMENTS]
    if small and len(small) < LEAST_DOCUMENTS and large:
        small.append(large.pop())
    paths = [parts_dir / part.file for part in large]
    if small:
        path = parts_dir / "train-others.txt"
        write_file(path, b"\n".join((parts_dir / part.file).read_bytes() for part in small))
        paths.append(path)
    return paths


def _vocabulary(wanted: CorpusRequest, out_dir: Path, train: Sequence[Path], workers: int) -> Path:
    """A copy of the given vocabulary, or one of the training text."""
    if wanted.vocab_path is not None:
        vocabulary = load_any_vocabulary(wanted.vocab_path)
        path = out_dir / file_name(vocabulary)
        write_file(path, vocabulary.contents)
        return path
    path = out_dir / "vocab.txt"
    if not path.exists():
        tokens = own_vocabulary(train, wanted.vocab_size, workers)
        write_file(path, ("\n".join(tokens) + "\n").encode())
    elif (size := len(load_any_vocabulary(path))) != wanted.vocab_size:
        raise DataError(str(path), f"has {size:,} tokens, not {wanted.vocab_size:,}", _REMEDY)
    return path


def _check_documents(
    wanted: CorpusRequest, rules: Rules, cleaned: Cleaned, documents: dict[str, int]
) -> None:
    """Raise DataError, with what would help, where the documents cannot be learned from."""
    parts = [*cleaned.train, *cleaned.held_out]
    number = num_documents(parts)
    problem = f"has {number:,} documents"
    if number == 0:
        reasons = ", ".join(f"{name} {count:,}" for name, count in cleaned.left_out.items())
        problem += f" after cleaning (left out: characters {reasons or 0})"
        remedy = _CONVERT if "not UTF-8" in cleaned.left_out else "give text of sentences"
        raise DataError(str(wanted.source), problem, remedy)
    if number >= LEAST_DIFFERENT > len(cleaned.different):
        problem += f", of which {len(cleaned.different)} differ, as the others are copies"
        raise DataError(str(wanted.source), problem, "give different documents")
    if min(documents["train"], documents["eval"]) < LEAST_DOCUMENTS:
        by_line = rules.documents == "empty-line"
        problem += f" of {cleaned.num_chars:,} characters, {LEAST_DIFFERENT} are needed"
        remedy = "separate documents by an empty line" if by_line else "try --documents empty-line"
        raise DataError(str(wanted.source), problem, f"{remedy}, or give more of them")
    if wanted.settings.segments == "single":
        return
    share = cleaned.one_sentence / number
    problem = f"{cleaned.one_sentence:,} of {number:,} documents have one sentence, so none follows"
    remedy = "train masked LM alone (--segments single), or give longer documents"
    if share == 1:
        raise DataError(str(wanted.source), problem, remedy)
    if share > MANY_OF_ONE_SENTENCE:
        print(f"warning: {problem}; {remedy}", flush=True)


# Hold out -----------------------------------------------------------------------------------------


def default_share(files: Sequence[TextFile]) -> float:
    """The default share, a power of two: as text is added it stays, or halves and keeps half."""
    share = LARGEST_SHARE
    while share * text_bytes(files) > HELD_OUT_BYTES:
        share /= 2
    return share


def fitting_share(cleaned: Cleaned, share: float) -> float:
    """The share to hold out, if few or long documents make `share` too much or too little."""
    parts = [*cleaned.train, *cleaned.held_out]
    most = MOST_HELD_OUT * share * sum(part.num_bytes for part in parts)
    wanted = max(LEAST_DOCUMENTS, min(WANTED_HELD_OUT, num_documents(parts) // 8))

    def held_out() -> tuple[int, int]:
        """Documents and bytes that the share holds out."""
        low = [each for each in cleaned.lowest if each[0] < share * 2**64]
        return sum(count for _, count, _ in low), sum(size for _, _, size in low)

    while held_out()[0] >= wanted and held_out()[1] > most:
        share /= SHARE_STEP
    while held_out()[0] < wanted and share < 1:
        share = min(share * SHARE_STEP, 1.0)
    return share


def choose_held_out(paths: Iterable[Path]) -> list[str]:
    """The documents of these parts with the lowest digests, each once: about EVAL_BYTES."""
    kept: list[tuple[int, str]] = []
    for path in paths:
        found = {(digest_of(document), document) for document in documents_of(path)}
        candidates = sorted(found.union(kept))
        kept, num_chars = [], 0
        for digest, document in candidates:
            num_chars += len(document)
            if kept and num_chars > EVAL_BYTES:
                break
            kept.append((digest, document))
    return [document for _, document in kept]


# Say ----------------------------------------------------------------------------------------------


def _show_files(files: Sequence[TextFile], rules: Rules, unread: Sequence[Unread]) -> None:
    """Print how documents are found, and how much is not read."""
    megabytes = sum(file.size_bytes for file in files) / 1e6
    way = f"read with --documents {rules.documents}"
    print(f"own text of {megabytes:,.1f} MB in {len(files):,} files, {way}", flush=True)
    if unread:
        print(f"not read: {unread_in_words(unread)}", flush=True)


def _show_left_out(cleaned: Cleaned) -> dict[str, object]:
    """Print the left-out share of the text and the reasons, as a warning if it is large."""
    left_out = sum(cleaned.left_out.values())
    of_the_text = cleaned.num_chars + left_out
    much = "warning: " if left_out > MOST_LEFT_OUT * of_the_text else ""
    share = left_out / max(1, of_the_text)
    reasons = "".join(f"; {name} {count:,}" for name, count in sorted(cleaned.left_out.items()))
    remedy = f"; {_CONVERT}" if much and "not UTF-8" in cleaned.left_out else ""
    print(f"{much}left out: {share:.1%} of {of_the_text:,} characters{reasons}{remedy}")
    return {"of_the_text": of_the_text, "left_out": left_out, "reasons": cleaned.left_out}
