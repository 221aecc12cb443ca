"""Prepares a corpus for training: generates a training set, a held-out set and a vocabulary.

    files -> cleaned parts, split by document -> held-out text
          -> vocabulary of the training parts -> the two prepared sets -> corpus.json

Each step writes its files completely or not at all, so a stopped command can be resumed. The first
steps write their files to DIR/text. DIR/corpus.json records the sources of the vocabulary and of
the sets, so that two corpora are never mixed. The last step completes this record.

A document is held out if the digest of its text (or of its first section, if the document is cut)
is low enough. Therefore adding documents does not move other documents between the two sets, and
all copies of a document are in the same set. The held-out set keeps only some of the held-out
documents. Both sets have each distinct text (or section of a document that is cut) only once.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
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
from bert_tools.pretrain.parts import (
    MAX_PART_BYTES,
    MIN_DOCUMENTS,
    Part,
    PartWriter,
    num_documents,
    training_texts,
    without_copies,
)
from bert_tools.pretrain.vocabulary import check_vocab_size, corpus_vocabulary
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
from mlperf_bert.vocabulary.any_vocabulary import file_name, load_new_vocabulary
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES

RECIPE = "own-1"
CLEANING_VERSION = 5  # version of the rules that turn text into parts
_REMEDY = "use a new directory, or delete the old one"
_CONVERT = "convert them to UTF-8, for example with iconv -f WINDOWS-1252 -t UTF-8"
MIN_FILES = 32  # with fewer plain files, each paragraph is a document
MIN_DIFFERENT = 2 * MIN_DOCUMENTS  # of both sets together, because copies stay on one side
MANY_OF_ONE_SENTENCE = 0.9  # fraction of the documents that gives a warning if pairs are learned
MAX_LEFT_OUT = 0.05  # fraction of the characters that may be left out without a warning

MIN_PART_BYTES = 2**18
WANTED_PARTS = 8  # parts of a small corpus, so that as many workers have work

LARGEST_SHARE = 1 / 16  # fraction of the documents that are held out
# The maximum ratio of the held-out bytes to the share of all bytes, and the factor by which the
# share changes until it fits.
MAX_HELD_OUT, SHARE_STEP = 2, 1.25
WANTED_HELD_OUT = 4  # sections to hold out if there are few

# An evaluation should be cheap. This size gives about half a million tokens in two passes, and a
# standard error of the accuracy of 0.002.
EVAL_BYTES = 2**20
HELD_OUT_BYTES = 4 * EVAL_BYTES  # maximum size of the held-out text


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusRequest:
    """A request to prepare a corpus, with the properties of the sets to generate.

    `vocab_path` is an existing vocabulary or tokenizer. If it is None, a vocabulary of `vocab_size`
    tokens is built. If `documents` is None, each plain file is a document, or each paragraph if
    there are fewer than MIN_FILES files. `also` lists further endings of plain text files.
    """

    source: Path
    documents: DocumentRule | None
    text_field: str
    vocab_path: Path | None
    vocab_size: int
    settings: ShardSettings
    also: tuple[str, ...] = ()


def prepare_corpus(wanted: CorpusRequest, out_dir: Path, *, workers: int) -> bool:
    """Prepare a corpus, or resume an interrupted preparation.

    Writes train/, eval/, the vocabulary and corpus.json to `out_dir`. Returns False if they had
    already been prepared. Raises ConfigError or DataError for a user's mistake, and DataError if
    `out_dir` was prepared from other text or with other settings.
    """
    check_options(wanted, out_dir, workers)
    files, unread = _checked_files(wanted, out_dir)
    is_few = len(files) < MIN_FILES and all(file.form == "text" for file in files)
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

    trained_on = without_copies(cleaned.train, parts_dir)
    held_out, num_held_out = choose_held_out(cleaned, fitting, parts_dir)
    documents = {
        "train": num_documents(cleaned.train),
        "eval": num_held_out,
        "held out but not needed": num_documents(cleaned.held_out) - num_held_out,
        "repeated sections left out of train": sum(part.sections for part in cleaned.train)
        - sum(part.sections for part in trained_on),
    }
    _check_documents(wanted, cleaned, min(sum(part.sections for part in trained_on), len(held_out)))
    eval_path = text_dir / "eval.txt"
    write_file(eval_path, "\n".join(held_out).encode())
    texts = {"train": training_texts(trained_on, parts_dir), "eval": [eval_path]}

    record: dict[str, object] = {"settings": settings}
    write_file(out_dir / "corpus.json", write_json(record))
    vocab_path = _vocabulary(wanted, out_dir, texts["train"], workers)
    corpus = {
        "recipe": RECIPE,
        "text_sha256": _digest(*(part.sha256 for part in (*cleaned.train, *cleaned.held_out))),
        "files": str(len(files)),
        "documents": str(documents["train"]),
        "held_out_documents": str(documents["eval"]),
    }
    prepare_pair(
        texts, vocab_path, out_dir, wanted.settings, workers=workers, corpus=corpus, quiet=False
    )
    record |= {"rules": asdict(rules), "documents": documents, "characters": characters}
    write_file(out_dir / "corpus.json", write_json(record))
    counts = (f"{count:,} {name}" for name, count in documents.items() if count)
    print(f"documents: {', '.join(counts)}")
    return True


# Check --------------------------------------------------------------------------------------------


def check_options(wanted: CorpusRequest, out_dir: Path, workers: int) -> None:
    """Check the options before the text is read, because reading it may take hours.

    Raises ConfigError.
    """
    if wanted.vocab_path is None:
        check_vocab_size(wanted.vocab_size)
    check_settings(wanted.settings, workers, num_texts=1)
    check_out_dir(wanted.source, out_dir)


def _checked_files(wanted: CorpusRequest, out_dir: Path) -> tuple[list[TextFile], list[Unread]]:
    """Return the files with their encodings, and the files that are not read.

    Prints the encodings if some files are not UTF-8. Raises DataError if more than half of the
    bytes are not Unicode text.
    """
    with ProgressLines().never_silent(lambda: "searching for files"):
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
        print(f"encodings of the files: {found}, and all others in UTF-8", flush=True)
    if foreign:
        name = in_brief(foreign[0].name)
        number = len(files) + len(foreign)
        problem = f"{len(foreign):,} of {number:,} files are not Unicode text (the first is {name})"
        if text_bytes(foreign) > text_bytes(files):
            raise DataError(str(wanted.source), problem, _CONVERT)
        print(f"warning: {problem} and are left out. To use them, {_CONVERT}", flush=True)
    return files, unread


def check_out_dir(text: Path, out_dir: Path) -> None:
    """Raise ConfigError if files that are written to `out_dir` would be read as text."""
    source, out = text.resolve(), out_dir.resolve()
    is_read = out.is_relative_to(source) and not any(
        name.startswith(".") for name in out.relative_to(source).parts
    )
    if is_read or source.is_relative_to(out / "text"):
        problem = f"files in {out_dir} would be read as part of the text in {text}"
        raise ConfigError("--out", problem, "pass a directory outside the text's directory")


def text_digest(files: Sequence[TextFile]) -> str:
    """Return a digest of the files' contents and kinds, and of the version of the cleaning.

    Raises DataError if a file cannot be read.
    """
    kinds = [f"{file.form} {file.packing}" for file in files]
    digests = [file_digest(file.path, "check its permissions") for file in files]
    return _digest(str(CLEANING_VERSION), *kinds, *digests)


def _digest(*words: str) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def _settings_of(wanted: CorpusRequest, files: Sequence[TextFile], rules: Rules) -> dict[str, str]:
    """Return the settings that must not change when a prepared directory is used again."""
    given = None if wanted.vocab_path is None else load_new_vocabulary(wanted.vocab_path).sha256
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
    """Return whether a directory is completely prepared with these settings.

    Raises DataError if it was prepared with other settings.
    """
    path = out_dir / "corpus.json"
    if not path.exists():
        return False
    record = read_json(path, missing="is missing", remedy=_REMEDY)
    with reading(path, _REMEDY):
        before = {name: record["settings"].get(name) for name in settings}
    for name, value in settings.items():
        if before[name] != value:
            problem = f"was prepared with {name} = {before[name]}, which is now {value}"
            if name == "text":
                problem = "was prepared from a different text"
            raise DataError(str(out_dir), problem, _REMEDY)
    has_vocabulary = any((out_dir / name).exists() for name in VOCABULARY_FILES)
    if "documents" not in record or not has_vocabulary:
        return False
    return not verify(out_dir, full=False, workers=1, quiet=True).problems


# Clean --------------------------------------------------------------------------------------------


class Cleaned(NamedTuple):
    """The result of cleaning, for one job or for several jobs together.

    `num_chars` counts the characters that are kept. `left_out` counts the characters that are left
    out for each reason. `lowest` has [digest, number of sections, bytes] for each held-out document
    and for the documents with the next higher digests of each job, in the order of the text.
    `different` has the lowest distinct digests of each job, which show whether most documents are
    copies. `one_sentence` counts the documents whose first section has a single sentence.
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
    """Clean all files and split their documents into training and held-out text.

    Returns the directory of the resulting parts, which depends on the text, the rules, the share
    and the form of the records, and the results of all jobs together.
    """
    parts_dir = text_dir / _digest(text, str(rules), str(share), *Part._fields)[:16]
    make_directory(parts_dir)
    jobs = plan_jobs(files, rules)
    found = run_with_progress(
        partial(clean, parts_dir=parts_dir, rules=rules, share=share),
        jobs,
        workers,
        sizes=[text_bytes(pieces) for _, pieces in jobs],
        activity="cleaning the text",
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
    """Group small files into jobs, and cut large plain files between documents.

    The jobs depend only on the names and sizes of the files, not on the number of workers, so the
    same files always result in the same parts.
    """
    wanted = min(MAX_PART_BYTES, max(MIN_PART_BYTES, text_bytes(files) // WANTED_PARTS))
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
    """Cut a file into pieces of about `wanted` bytes, or yield it whole if it cannot be cut."""
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
    """Clean the files of a job, or read its earlier result if the job is already complete.

    The result is recorded last, so the record exists only if the job is complete. Raises DataError
    if a file or the record cannot be read.
    """
    number, pieces = job
    record = parts_dir / f"job-{number:05d}.json"
    if record.exists():
        values = read_json(record, missing="is missing", remedy=_REMEDY)
        with reading(record, _REMEDY):
            for side in ("train", "held_out"):
                values[side] = [Part(*each) for each in values[side]]
            return Cleaned(**values)
    train = PartWriter(parts_dir / f"train-{number:05d}")
    held_out = PartWriter(parts_dir / f"held_out-{number:05d}")
    to, opens, num_chars, one_sentence = train, True, 0, 0
    left_out: Counter[str] = Counter()
    documents: list[list[int]] = []  # digest, sections and bytes of each document
    for section in (each for piece in pieces for each in sections(piece, rules)):
        opens = opens or section.opens  # stays true if the opening section was left out
        sentences, lost = clean_document(section.paragraphs)
        left_out.update(lost)
        if not sentences:
            continue
        text = "".join(sentence + "\n" for sentence in sentences)
        num_chars += len(text)
        one_sentence += opens and len(sentences) == 1
        if opens:
            documents.append([digest_of(text), 0, 0])
            to = held_out if documents[-1][0] < share * 2**64 else train
        documents[-1][1] += 1
        documents[-1][2] += len(text.encode()) + 1
        to.add(text, opens=opens)
        opens = False
    digests = sorted({digest for digest, _, _ in documents})
    num_held_out = sum(digest < share * 2**64 for digest in digests)
    highest = digests[: num_held_out + WANTED_HELD_OUT][-1:]
    lowest = [each for each in documents if each[0] <= highest[0]]
    different = digests[:MIN_DIFFERENT]
    parts = train.finish(), held_out.finish()
    made = Cleaned(*parts, num_chars, left_out, lowest, different, one_sentence)
    write_file(record, json.dumps(made._asdict()).encode())
    return made


def _vocabulary(wanted: CorpusRequest, out_dir: Path, train: Sequence[Path], workers: int) -> Path:
    """Write a copy of the given vocabulary, or build one from the training text.

    Returns the path of the written file.
    """
    if wanted.vocab_path is not None:
        vocabulary = load_new_vocabulary(wanted.vocab_path)
        path = out_dir / file_name(vocabulary)
        write_file(path, vocabulary.contents)
        return path
    path = out_dir / "vocab.txt"
    if not path.exists():
        tokens = corpus_vocabulary(train, wanted.vocab_size, workers)
        write_file(path, ("\n".join(tokens) + "\n").encode())
    elif (size := len(load_new_vocabulary(path))) != wanted.vocab_size:
        raise DataError(str(path), f"has {size:,} tokens, not {wanted.vocab_size:,}", _REMEDY)
    return path


def _check_documents(wanted: CorpusRequest, cleaned: Cleaned, of_smaller_set: int) -> None:
    """Raise DataError if a model cannot learn from the documents, with advice in the message.

    `of_smaller_set` is the number of sections in the smaller one of the two sets.
    """
    number = num_documents([*cleaned.train, *cleaned.held_out])
    problem = f"has {number:,} document{'' if number == 1 else 's'}"
    if number == 0:
        reasons = ", ".join(f"{name} {count:,}" for name, count in cleaned.left_out.items())
        problem += f" after cleaning (characters left out: {reasons or 0})"
        remedy = _CONVERT if "not UTF-8" in cleaned.left_out else "pass text that has sentences"
        raise DataError(str(wanted.source), problem, remedy)
    if number >= MIN_DIFFERENT > len(cleaned.different):
        problem += f", but only {len(cleaned.different)} of them differ, because others are copies"
        raise DataError(str(wanted.source), problem, "pass documents that differ from each other")
    if number < MIN_DIFFERENT or of_smaller_set < MIN_DOCUMENTS:
        needed = MIN_DIFFERENT if number < MIN_DIFFERENT else "more"
        problem += f" of {cleaned.num_chars:,} characters, but {needed} are needed"
        remedy = "pass more documents, or separate those in a file of plain text by empty lines"
        raise DataError(str(wanted.source), problem, f"{remedy} (--documents empty-line)")
    if wanted.settings.segments == "single":
        return
    share = cleaned.one_sentence / number
    problem = (
        f"{cleaned.one_sentence:,} of {number:,} documents have a single sentence, so they have no "
        "next sentence to predict"
    )
    remedy = (
        "pass longer documents, or predict only masked words (prepare: --segments single, "
        "pretrain: --set model.objective=mlm)"
    )
    if share == 1:
        raise DataError(str(wanted.source), problem, remedy)
    if share > MANY_OF_ONE_SENTENCE:
        print(f"warning: {problem}; {remedy}", flush=True)


# Hold out -----------------------------------------------------------------------------------------


def default_share(files: Sequence[TextFile]) -> float:
    """Return the default fraction of documents to hold out, which is a power of two.

    If the user adds text, the fraction stays the same or is halved, possibly several times. Each
    time it is halved, about half of the held-out documents stay held out.
    """
    share = LARGEST_SHARE
    while share * text_bytes(files) > HELD_OUT_BYTES:
        share /= 2
    return share


def fitting_share(cleaned: Cleaned, share: float) -> float:
    """Return the fraction of documents to hold out.

    The result differs from `share` if there are few documents, or if the held-out ones are long.
    """
    parts = [*cleaned.train, *cleaned.held_out]
    max_bytes = MAX_HELD_OUT * share * sum(part.num_bytes for part in parts)
    wanted = max(MIN_DOCUMENTS, min(WANTED_HELD_OUT, sum(part.sections for part in parts) // 8))

    def held_out() -> tuple[int, int]:
        """Return the number of sections and of bytes that the current share holds out."""
        low = {each[0]: each for each in cleaned.lowest if each[0] < share * 2**64}  # no copies
        return sum(count for _, count, _ in low.values()), sum(size for _, _, size in low.values())

    while held_out()[0] >= wanted and held_out()[1] > max_bytes:
        share /= SHARE_STEP
    while held_out()[0] < wanted and share < 1:
        share = min(share * SHARE_STEP, 1.0)
    return share


def choose_held_out(cleaned: Cleaned, share: float, parts_dir: Path) -> tuple[list[str], int]:
    """Return the sections of the held-out set, and the number of documents they belong to.

    These are the distinct sections with the lowest digests, about EVAL_BYTES in total.
    """
    counts = [count for digest, count, _ in cleaned.lowest if digest < share * 2**64]
    document_of = (number for number, count in enumerate(counts) for _ in range(count))
    kept: dict[tuple[int, str], int] = {}
    for part in cleaned.held_out:
        for section in documents_of(parts_dir / part.file):
            kept.setdefault((digest_of(section), section), next(document_of))
        candidates = sorted(kept.items())
        kept, num_chars = {}, 0
        for key, document in candidates:
            num_chars += len(key[1])
            if kept and num_chars > EVAL_BYTES:
                break
            kept[key] = document
    return [section for _, section in kept], len(set(kept.values()))


# Print --------------------------------------------------------------------------------------------


def _show_files(files: Sequence[TextFile], rules: Rules, unread: Sequence[Unread]) -> None:
    """Print the size of the corpus, the rule for documents, and which files are not read."""
    megabytes = sum(file.size_bytes for file in files) / 1e6
    rule = f"read with --documents {rules.documents}"
    print(f"corpus: {megabytes:,.1f} MB of text in {len(files):,} files, {rule}", flush=True)
    if unread:
        print(f"not read: {unread_in_words(unread)}", flush=True)


def _show_left_out(cleaned: Cleaned) -> dict[str, object]:
    """Print how much of the text is left out and why, as a warning if the fraction is large.

    Returns these counts for corpus.json.
    """
    left_out = sum(cleaned.left_out.values())
    of_the_text = cleaned.num_chars + left_out
    warning = "warning: " if left_out > MAX_LEFT_OUT * of_the_text else ""
    share = left_out / max(1, of_the_text)
    counts = [f"{name} {count:,}" for name, count in sorted(cleaned.left_out.items())]
    reasons = f" ({', '.join(counts)})" if counts else ""
    remedy = f"; {_CONVERT}" if warning and "not UTF-8" in cleaned.left_out else ""
    print(f"{warning}{share:.1%} of {of_the_text:,} characters are left out{reasons}{remedy}")
    return {"of_the_text": of_the_text, "left_out": left_out, "reasons": cleaned.left_out}
