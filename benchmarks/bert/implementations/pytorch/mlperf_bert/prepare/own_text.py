"""A user's own text to a training and a held-out set, with a vocabulary: the steps in order.

    files -> cleaned parts, split by document -> held-out text without near-duplicates
          -> vocabulary of the training parts -> the two prepared sets -> corpus.json

What is wanted of which text (`OwnText`) is checked before the text is read, and compared with what
is there. Every step's results are files, each written whole or not at all, so that a stopped run
goes on where it was; DIR/text holds those of the first steps.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.data.index import Manifest, ShardSettings
from mlperf_bert.prepare.build import check_settings, prepare_pair
from mlperf_bert.prepare.own_files import DocumentRule, TextFile, digests, find_files
from mlperf_bert.prepare.own_parts import (
    REMEDY,
    Cleaned,
    CleanJob,
    HeldOut,
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
from mlperf_bert.prepare.verify.check import verify
from mlperf_bert.vocabulary.any_vocabulary import file_name, load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES, load_vocabulary

RECORD_VERSION = 1

RECIPE = "own-1"
LEAST_DOCUMENTS = 2  # of a part: the reference pairs a document with another one


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnText:
    """What to make of which text.

    `vocab_path` is a given vocabulary or tokenizer; without it one of `vocab_size` tokens is made.
    `held_out_share` of the documents are held out; None: `default_share`.
    """

    source: Path
    documents: DocumentRule
    text_field: str
    held_out_share: float | None
    vocab_path: Path | None
    vocab_size: int
    settings: ShardSettings


def text_digest(source: Path, vocab_path: Path | None) -> str:
    """A digest of the text in `source`; a vocabulary that lies there is no text.

    Raises DataError where there is no text, or it cannot be read.
    """
    contents = digests(find_files(source, vocab_path), quiet=True)
    return hashlib.sha256(" ".join(contents).encode()).hexdigest()


def check_options(wanted: OwnText, out_dir: Path, workers: int) -> None:
    """Before the text is read, which may take hours. Raises ConfigError."""
    if wanted.vocab_path is None:
        check_vocab_size(wanted.vocab_size)
    check_settings(wanted.settings, workers, num_texts=1)
    source, out = wanted.source.resolve(), out_dir.resolve()
    is_read = out.is_relative_to(source) and not any(
        name.startswith(".") for name in out.relative_to(source).parts
    )
    if is_read or source.is_relative_to(out / "text"):
        problem = f"is {out_dir}, whose files would be read as text of --corpus {wanted.source}"
        raise ConfigError("--out", problem, "name a directory outside of the text")


def rules_of(wanted: OwnText, files: Sequence[TextFile]) -> Rules:
    """How the text becomes parts. Raises ConfigError for the share held out."""
    share = default_share(files) if wanted.held_out_share is None else wanted.held_out_share
    if not 0 < share <= 0.5:
        raise ConfigError("--held-out", f"is {share}", "set it above 0, to 0.5 at most")
    return Rules(documents=wanted.documents, text_field=wanted.text_field, held_out_share=share)


def settings_of(wanted: OwnText, text: str) -> dict[str, str]:
    """What must be the same for a directory to be the one that is asked for."""
    given = None if wanted.vocab_path is None else load_any_vocabulary(wanted.vocab_path).sha256
    names = ("max_seq_length", "max_predictions", "dupe_factor", "seed", "segments")
    return {
        "text": text,
        "vocabulary": given or f"own, {wanted.vocab_size} tokens",
        **{name: str(getattr(wanted.settings, name)) for name in names},
    }


def is_ready(out_dir: Path, settings: dict[str, str]) -> bool:
    """Whether all is there and whole; raises DataError where it is of something else."""
    path = out_dir / "corpus.json"
    if not path.exists():
        return False
    record = read_record(path, missing="is missing", remedy=REMEDY)
    record.check_version(RECORD_VERSION)
    before = record.record("settings")
    for name, value in settings.items():
        found = before.text(name)
        if found != value:
            was = f"{name} = {found}, now it is {value}"
            problem = "was made with " + ("other text, or rules for it" if name == "text" else was)
            raise DataError(str(out_dir), problem, REMEDY)
    if not any((out_dir / name).exists() for name in VOCABULARY_FILES):
        return False
    return not verify(out_dir, full=False, workers=1, quiet=True).problems()


def begin_sets(out_dir: Path, wanted: OwnText, text: str) -> None:
    """Note which text vocabulary and sets are of: of text as it was before, they do not go on."""
    path = out_dir / "text" / "sets.json"
    if path.exists():
        record = read_record(path, missing="is missing", remedy=REMEDY)
        record.check_version(RECORD_VERSION)
        if record.text("text") == text:
            return
        if any((out_dir / name).exists() for name in ("train", "eval")):
            problem = "has sets begun with other text, or rules for it"
            raise DataError(str(out_dir), problem, REMEDY)
        if wanted.vocab_path is None:
            (out_dir / "vocab.txt").unlink(missing_ok=True)
    write_file(path, write_json({"format_version": RECORD_VERSION, "text": text}))


def prepare_own_text(wanted: OwnText, out_dir: Path, *, workers: int, quiet: bool = False) -> bool:
    """Make, or finish making, `out_dir`/train, /eval, /vocab.txt and /corpus.json.

    Returns whether anything had to be made. Raises ConfigError and DataError for what the user can
    mend, and where `out_dir` was made of other text or with other settings.
    """
    check_options(wanted, out_dir, workers)
    files = find_files(wanted.source, wanted.vocab_path)
    rules = rules_of(wanted, files)
    contents = digests(files, quiet=quiet)
    settings = settings_of(wanted, fingerprint(files, contents, rules))
    if is_ready(out_dir, settings):
        return False
    text_dir = out_dir / "text"
    make_directory(text_dir)
    jobs = plan_jobs(files, contents, text_dir, rules)
    cleaned = _clean_all(jobs, text_bytes(files), workers, quiet)
    begin_sets(out_dir, wanted, settings["text"])
    train = _training_parts(cleaned, text_dir, wanted)
    held_out = choose_held_out(
        [text_dir / part.file for part in cleaned.held_out], train, workers, quiet=quiet
    )
    eval_path = _eval_text(held_out, cleaned, text_dir, wanted)
    vocab_path = _vocabulary(wanted, out_dir, train, workers, quiet)
    corpus = _provenance(files, cleaned, held_out)
    texts = {"train": train, "eval": [eval_path]}
    manifests = prepare_pair(
        texts, vocab_path, out_dir, wanted.settings, workers=workers, corpus=corpus, quiet=quiet
    )
    _finish(wanted, out_dir, settings, rules, cleaned, held_out, manifests)
    return True


def _clean_all(jobs: Sequence[CleanJob], num_text_bytes: int, workers: int, quiet: bool) -> Cleaned:
    made: dict[int, Cleaned] = {}
    for job, cleaned in finished_in_sight(
        clean,
        jobs,
        workers,
        sizes=[num_text_bytes // len(jobs)] * len(jobs),
        label=lambda job: job.pieces[0].path.name,
        words=("cleaned", "pieces"),
        quiet=quiet,
    ):
        made[job.number] = cleaned
    left_out: Counter[str] = Counter()
    for cleaned in made.values():
        left_out.update(cleaned.left_out)
    ordered = [made[job.number] for job in jobs]
    return Cleaned(
        tuple(part for cleaned in ordered for part in cleaned.train),
        tuple(part for cleaned in ordered for part in cleaned.held_out),
        dict(left_out),
    )


def _training_parts(cleaned: Cleaned, text_dir: Path, wanted: OwnText) -> list[Path]:
    """Parts with documents enough; those of the others, together, are one more."""
    large = [part for part in cleaned.train if part.documents >= LEAST_DOCUMENTS]
    small = [part for part in cleaned.train if part.documents < LEAST_DOCUMENTS]
    if small and len(small) < LEAST_DOCUMENTS and large:
        small.append(large.pop())
    if sum(part.documents for part in [*large, *small]) < LEAST_DOCUMENTS:
        raise _too_few(wanted, "training", sum(part.documents for part in cleaned.train), cleaned)
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
        reasons = (f"{count:,} {reason}" for reason, count in sorted(cleaned.left_out.items()))
        problem += f" (left out: {', '.join(reasons)})"
    ends = {"empty-line": "an empty line", "line": "a line end", "file": "a file's end"}
    remedy = f"a document ends at {ends[wanted.documents]}: see --documents, or give more text"
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
        "documents": str(sum(part.documents for part in cleaned.train)),
        "held_out_documents": str(len(held_out.documents)),
    }


def _finish(
    wanted: OwnText,
    out_dir: Path,
    settings: dict[str, str],
    rules: Rules,
    cleaned: Cleaned,
    held_out: HeldOut,
    manifests: dict[str, Manifest],
) -> None:
    if wanted.vocab_path is not None:
        vocabulary = load_any_vocabulary(wanted.vocab_path)
        write_file(out_dir / file_name(vocabulary), vocabulary.contents)
    documents = {
        "train": sum(part.documents for part in cleaned.train),
        "eval": len(held_out.documents),
        "held out, but repeated by training text": held_out.near_duplicates,
        "held out, but not needed": held_out.not_needed,
        **{f"left out, {reason}": count for reason, count in sorted(cleaned.left_out.items())},
    }
    values = {
        "format_version": RECORD_VERSION,
        "settings": settings,
        "rules": asdict(rules),
        "documents": documents,
        "examples": {name: manifest.num_samples for name, manifest in manifests.items()},
        "corpus": manifests["train"].corpus,
    }
    write_file(out_dir / "corpus.json", write_json(values))
    print("documents: " + "; ".join(f"{name} {count:,}" for name, count in documents.items()))
