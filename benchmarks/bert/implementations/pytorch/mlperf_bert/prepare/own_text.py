"""A user's own text to a training and a held-out set, with a vocabulary.

    files -> cleaned parts, split by document -> held-out text
          -> vocabulary of the training parts -> the two prepared sets -> corpus.json

The request (`OwnText`) is checked before the text is read, and compared with existing results. Each
step writes its files whole or not at all, so a stopped run can be resumed; DIR/text holds the files
of the first steps.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import check_version, read_json, reading, write_json
from mlperf_bert.common.untrusted import in_brief
from mlperf_bert.data.index import Manifest, ShardSettings
from mlperf_bert.prepare.build import check_settings, prepare_pair
from mlperf_bert.prepare.documents import LEAST_CHARS, clean_document
from mlperf_bert.prepare.own_files import (
    DocumentRule,
    Layout,
    Piece,
    TextFile,
    digests,
    find_files,
    layout_of,
    unread_files,
)
from mlperf_bert.prepare.own_parts import (
    CLEANING_VERSION,
    REMEDY,
    WANTED_HELD_OUT,
    Cleaned,
    CleanJob,
    HeldOut,
    LeftOut,
    Lowest,
    Part,
    Rules,
    choose_held_out,
    clean,
    default_share,
    fingerprint,
    plan_jobs,
    text_bytes,
)
from mlperf_bert.prepare.pool import finished_in_sight
from mlperf_bert.prepare.train_vocabulary import check_vocab_size, own_vocabulary
from mlperf_bert.prepare.verify import verify
from mlperf_bert.vocabulary.any_vocabulary import file_name, load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES, load_vocabulary

RECORD_VERSION = 1

RECIPE = "own-1"
LEAST_DOCUMENTS = 2  # in each part: the reference pairs a document with another one
MOST_HELD_OUT, SHARE_STEP = 2, 1.25  # most characters, over the share; factor between shares
MOST_LEFT_OUT = 0.05  # share of the characters, without a warning
SHOWN, LOOKED_AT = 3, 256  # documents shown, out of the first ones looked at
NOT_NEEDED = "held out, but not needed"
REMEDIES = {
    "not UTF-8": "convert such files to UTF-8",
    "too short": f"fewer than {LEAST_CHARS} letters and digits: join them, or give no --documents",
    "few letters": "figures and rules of tables: write what matters of them as words",
    NOT_NEEDED: "give a smaller --held-out to train on more",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnText:
    """A request: the text, and the sets to make of it.

    `vocab_path` is a given vocabulary or tokenizer; without it a vocabulary of `vocab_size` tokens
    is made. If `documents` is None, `layout_of` decides. `held_out_share` of the documents are held
    out; None means `default_share`, adjusted if it would hold out too few or too many of few
    documents.
    """

    source: Path
    documents: DocumentRule | None
    text_field: str
    held_out_share: float | None
    vocab_path: Path | None
    vocab_size: int
    settings: ShardSettings


def text_digest(source: Path, vocab_path: Path | None) -> str:
    """A digest of the text in `source` and its rules; the vocabulary file does not count as text.

    Raises DataError if there is no text, or it cannot be read.
    """
    contents = digests(find_files(source, vocab_path), quiet=True)
    return hashlib.sha256(" ".join([str(CLEANING_VERSION), *contents]).encode()).hexdigest()


def check_options(wanted: OwnText, out_dir: Path, workers: int) -> None:
    """Check the options before the text is read for hours. Raises ConfigError."""
    if wanted.vocab_path is None:
        check_vocab_size(wanted.vocab_size)
    check_settings(wanted.settings, workers, num_texts=1)
    check_place(wanted.source, out_dir)


def check_place(text: Path, out_dir: Path) -> None:
    """Raise ConfigError for an `out_dir` inside of the text, or one that cannot be written."""
    source, out = text.resolve(), out_dir.resolve()
    is_read = out.is_relative_to(source) and not any(
        name.startswith(".") for name in out.relative_to(source).parts
    )
    if is_read or source.is_relative_to(out / "text"):
        problem = f"is {out_dir}, whose files would be read as text of {text}"
        raise ConfigError("--out", problem, "name a directory outside of the text")
    there = next(each for each in (out, *out.parents) if os.path.lexists(each))
    may_write = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    if not (may_write or (out / "corpus.json").exists()):  # what is ready need not be written
        problem = f"is {out_dir}, which cannot be made or written to"
        raise ConfigError("--out", problem, "give a directory where you may write")


def rules_of(wanted: OwnText, files: Sequence[TextFile], layout: Layout) -> Rules:
    """The rules that turn the text into parts. Raises ConfigError for the share held out."""
    share = default_share(files) if wanted.held_out_share is None else wanted.held_out_share
    if not 0 < share <= 0.5:
        raise ConfigError("--held-out", f"is {share}", "set it above 0, to 0.5 at most")
    return Rules(
        documents=layout.rule,
        text_field=wanted.text_field,
        held_out_share=share,
        join_chars=layout.join_chars,
    )


def settings_of(wanted: OwnText, text: str) -> dict[str, str]:
    """The settings that must equal those of an existing directory."""
    given = None if wanted.vocab_path is None else load_any_vocabulary(wanted.vocab_path).sha256
    names = ("max_seq_length", "max_predictions", "dupe_factor", "seed", "segments")
    return {
        "text": text,
        "vocabulary": given or f"own, {wanted.vocab_size} tokens",
        **{name: str(getattr(wanted.settings, name)) for name in names},
    }


def is_ready(out_dir: Path, settings: dict[str, str]) -> bool:
    """True if everything is there and complete; DataError if it was made with other settings."""
    path = out_dir / "corpus.json"
    if not path.exists():
        return False
    values = read_json(path, missing="is missing", remedy=REMEDY)
    with reading(path, REMEDY):
        check_version(values, RECORD_VERSION)
        before = {name: values["settings"][name] for name in settings}
    for name, value in settings.items():
        found = before[name]
        if found != value:
            was = f"{name} = {found}, now it is {value}"
            problem = "was made with " + ("other text, or rules for it" if name == "text" else was)
            raise DataError(str(out_dir), problem, REMEDY)
    if not any((out_dir / name).exists() for name in VOCABULARY_FILES):
        return False
    return not verify(out_dir, full=False, workers=1, quiet=True).problems


def begin_sets(out_dir: Path, wanted: OwnText, text: str) -> None:
    """Record the text that vocabulary and sets come from, so that they never mix two texts."""
    path = out_dir / "text" / "sets.json"
    if path.exists():
        values = read_json(path, missing="is missing", remedy=REMEDY)
        with reading(path, REMEDY):
            check_version(values, RECORD_VERSION)
            if values["text"] == text:
                return
        if any((out_dir / name).exists() for name in ("train", "eval")):
            problem = "has sets begun with other text, or rules for it"
            raise DataError(str(out_dir), problem, REMEDY)
        if wanted.vocab_path is None:
            (out_dir / "vocab.txt").unlink(missing_ok=True)
    write_file(path, write_json({"format_version": RECORD_VERSION, "text": text}))


def prepare_own_text(wanted: OwnText, out_dir: Path, *, workers: int, quiet: bool = False) -> bool:
    """Make or finish `out_dir`/train, /eval, /vocab.txt and /corpus.json.

    Returns True if anything had to be made. Raises ConfigError and DataError for faults that the
    user can mend, and if `out_dir` was made of other text or with other settings.
    """
    check_options(wanted, out_dir, workers)
    files = find_files(wanted.source, wanted.vocab_path)
    layout = layout_of(files, wanted.documents)
    rules = rules_of(wanted, files, layout)
    decided = _show_decided(files, rules, layout.why)
    _show_unread(unread_files(wanted.source, wanted.vocab_path))
    contents = digests(files, quiet=quiet)
    settings = settings_of(wanted, fingerprint(files, contents, rules))
    if is_ready(out_dir, settings):
        return False
    text_dir = out_dir / "text"
    make_directory(text_dir)

    def clean_with(rules: Rules) -> Cleaned:
        jobs = plan_jobs(files, contents, text_dir, rules)
        return _clean_all(jobs, text_bytes(files), workers, quiet)

    if wanted.held_out_share is None:
        rules, cleaned = _clean_fitting(rules, clean_with)
    else:
        cleaned = clean_with(rules)
    begin_sets(out_dir, wanted, settings["text"])
    train = _training_parts(cleaned, text_dir, wanted)
    held_out = choose_held_out(text_dir / part.file for part in cleaned.held_out)
    eval_path = _eval_text(held_out, cleaned, text_dir, wanted)
    vocab_path = _vocabulary(wanted, out_dir, train, workers, quiet)
    corpus = _provenance(files, cleaned, held_out)
    texts = {"train": train, "eval": [eval_path]}
    manifests = prepare_pair(
        texts, vocab_path, out_dir, wanted.settings, workers=workers, corpus=corpus, quiet=quiet
    )
    _finish(wanted, out_dir, settings, rules, decided, cleaned, held_out, manifests)
    return True


def _show_decided(files: Sequence[TextFile], rules: Rules, why: str) -> dict[str, object]:
    """Print how documents were found, why, and the first cleaned ones; return a record of it."""
    megabytes = sum(file.size_bytes for file in files) / 1e6
    print(f"own text of {megabytes:,.1f} MB: {why}", flush=True)
    pieces = ((file.name, Piece(file.path, file.form, file.packing, 0, None)) for file in files)
    found = ((name, each) for name, piece in pieces for each in rules.sections(piece))
    shown: list[dict[str, object]] = []
    for name, section in islice(found, LOOKED_AT):
        text = " ".join(clean_document(section.paragraphs)[0])
        if text and (section.opens or rules.join_chars):
            shown.append({"file": name, "characters": len(text), "begins": text[:60].strip()})
            print(f'  {name}, {len(text):,} characters: "{text[:60].strip()} ..."', flush=True)
        if len(shown) == SHOWN:
            break
    return {"why": why, "first_documents": shown}


def _show_unread(names: Sequence[str]) -> None:
    """Print how many files of other kinds there are."""
    if names:
        kind = "file of another kind" if len(names) == 1 else "files of other kinds"
        print(f"not read: {len(names):,} {kind}, first {in_brief(names[0])}", flush=True)


def _clean_fitting(rules: Rules, clean_with: Callable[[Rules], Cleaned]) -> tuple[Rules, Cleaned]:
    """Clean, adjusting the share if few or long documents would hold out too much or too little.

    One cleaning finds the lowest documents; if they ask for another share, a second one follows.
    """
    cleaned = clean_with(rules)
    total, share = _total((*cleaned.train, *cleaned.held_out)), rules.held_out_share
    most = MOST_HELD_OUT * share * total.num_bytes
    wanted = max(LEAST_DOCUMENTS, min(WANTED_HELD_OUT, total.documents // 8))

    def held_out() -> Part:
        return _total([each for each in cleaned.lowest if each.place < share * 2**64])

    while (found := held_out()).documents >= wanted and found.num_bytes > most:
        share /= SHARE_STEP
    while held_out().documents < wanted and share < 1:
        share = min(share * SHARE_STEP, 1.0)
    if share == rules.held_out_share:
        return rules, cleaned
    rules = replace(rules, held_out_share=share)
    return rules, clean_with(rules)


def _total(found: Sequence[Part | Lowest]) -> Part:
    num_bytes = sum(each.num_bytes for each in found)
    return Part("", sum(each.documents for each in found), num_bytes, "")


def _clean_all(jobs: Sequence[CleanJob], num_text_bytes: int, workers: int, quiet: bool) -> Cleaned:
    made: dict[int, Cleaned] = {}
    for job, cleaned in finished_in_sight(
        clean,
        jobs,
        workers,
        sizes=[num_text_bytes // len(jobs)] * len(jobs),
        words=("cleaned", "pieces"),
        quiet=quiet,
    ):
        made[job.number] = cleaned
    ordered = [made[job.number] for job in jobs]
    left_out: dict[str, LeftOut] = {}
    for cleaned in ordered:
        for reason, found in cleaned.left_out.items():
            left_out[reason] = left_out.get(reason, LeftOut()) + found
    return Cleaned(
        tuple(part for cleaned in ordered for part in cleaned.train),
        tuple(part for cleaned in ordered for part in cleaned.held_out),
        sum(cleaned.num_chars for cleaned in ordered),
        left_out,
        tuple(each for cleaned in ordered for each in cleaned.lowest),
    )


def _training_parts(cleaned: Cleaned, text_dir: Path, wanted: OwnText) -> list[Path]:
    """The parts with enough documents; documents of the other parts are joined to one more part."""
    large = [part for part in cleaned.train if part.documents >= LEAST_DOCUMENTS]
    small = [part for part in cleaned.train if part.documents < LEAST_DOCUMENTS]
    if small and len(small) < LEAST_DOCUMENTS and large:
        small.append(large.pop())
    if _total(cleaned.train).documents < LEAST_DOCUMENTS:
        raise _too_few(wanted, "training", _total(cleaned.train).documents, cleaned)
    paths = [text_dir / part.file for part in large]
    if small:
        path = text_dir / "train-others.txt"
        write_file(path, b"\n".join((text_dir / part.file).read_bytes() for part in small))
        paths.append(path)
    return paths


def _eval_text(held_out: HeldOut, cleaned: Cleaned, text_dir: Path, wanted: OwnText) -> Path:
    if len(held_out.documents) < LEAST_DOCUMENTS:
        raise _too_few(wanted, "evaluation", len(held_out.documents), cleaned)
    path = text_dir / "eval.txt"
    write_file(path, "\n".join(held_out.documents).encode())
    return path


def _too_few(wanted: OwnText, what: str, number: int, cleaned: Cleaned) -> DataError:
    problem = f"has {number} documents for {what}, {LEAST_DOCUMENTS} are needed"
    if cleaned.left_out:
        found = sorted(cleaned.left_out.items())
        reasons = (f"{each.documents:,} {reason}" for reason, each in found)
        problem += f" (left out: {', '.join(reasons)})"
    remedy = "give more text, or say where a document ends with --documents"
    if wanted.documents is not None:
        ends = {"empty-line": "an empty line", "line": "a line end", "file": "a file's end"}
        remedy = f"a document ends at {ends[wanted.documents]}: leave out --documents, or {remedy}"
    if what == "evaluation":
        remedy += ", or a larger --held-out"
    return DataError(str(wanted.source), problem, remedy)


def _vocabulary(
    wanted: OwnText, out_dir: Path, train: Sequence[Path], workers: int, quiet: bool
) -> Path:
    if wanted.vocab_path is not None:
        return wanted.vocab_path
    path = out_dir / "vocab.txt"
    if not path.exists():
        tokens = own_vocabulary(train, wanted.vocab_size, workers, quiet=quiet)
        write_file(path, ("\n".join(tokens) + "\n").encode())
    elif len(load_vocabulary(path)) != wanted.vocab_size:
        problem = f"has {len(load_vocabulary(path))} tokens, now it is {wanted.vocab_size}"
        raise DataError(str(path), problem, REMEDY)
    return path


def _provenance(files: Sequence[TextFile], cleaned: Cleaned, held_out: HeldOut) -> dict[str, str]:
    digests = [part.sha256 for part in (*cleaned.train, *cleaned.held_out)]
    return {
        "recipe": RECIPE,
        "text_sha256": hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        "files": str(len(files)),
        "documents": str(_total(cleaned.train).documents),
        "held_out_documents": str(len(held_out.documents)),
    }


def _finish(
    wanted: OwnText,
    out_dir: Path,
    settings: dict[str, str],
    rules: Rules,
    decided: dict[str, object],
    cleaned: Cleaned,
    held_out: HeldOut,
    manifests: dict[str, Manifest],
) -> None:
    if wanted.vocab_path is not None:
        vocabulary = load_any_vocabulary(wanted.vocab_path)
        write_file(out_dir / file_name(vocabulary), vocabulary.contents)
    found = sorted(cleaned.left_out.items())
    documents = {
        "train": _total(cleaned.train).documents,
        "eval": len(held_out.documents),
        NOT_NEEDED: held_out.not_needed.documents,
        **{f"left out, {name}": each.documents for name, each in found if each.documents},
    }
    values = {
        "format_version": RECORD_VERSION,
        "settings": settings,
        "rules": asdict(rules),
        "decided": decided,
        "documents": documents,
        "characters": _show_left_out(cleaned, held_out),
        "examples": {name: manifest.num_samples for name, manifest in manifests.items()},
        "corpus": manifests["train"].corpus,
    }
    write_file(out_dir / "corpus.json", write_json(values))
    print("documents: " + "; ".join(f"{name} {count:,}" for name, count in documents.items()))


def _show_left_out(cleaned: Cleaned, held_out: HeldOut) -> dict[str, object]:
    """Print the left-out share of the text and the reasons, as a warning if it is large."""
    total = cleaned.num_chars + sum(each.num_chars for each in cleaned.left_out.values())
    others = {NOT_NEEDED: held_out.not_needed}
    found = [(name, each) for name, each in (cleaned.left_out | others).items() if each.num_chars]
    found.sort(key=lambda item: -item[1].num_chars)
    lost = sum(each.num_chars for _, each in found)
    much = "warning: " if lost > MOST_LEFT_OUT * total else ""
    print(f"{much}left out: {lost / total:.1%} of {total:,} characters")
    for name, each in found:
        first = f", first in {each.file}" if each.file else ""
        print(f"  {name}: {each.num_chars:,} characters{first}; {REMEDIES[name]}")
    reasons = {name: asdict(each) for name, each in found}
    return {"of_the_text": total, "left_out": lost, "reasons": reasons}
