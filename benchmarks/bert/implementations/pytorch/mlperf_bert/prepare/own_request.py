"""What is wanted of which own text: checked before it is read, compared with what is there."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.data.index import Segments, ShardSettings
from mlperf_bert.prepare.build import check_settings
from mlperf_bert.prepare.own_documents import DocumentRule
from mlperf_bert.prepare.own_files import TextFile, digests, find_files
from mlperf_bert.prepare.own_parts import REMEDY, Rules, default_share
from mlperf_bert.prepare.own_vocabulary import check_vocab_size
from mlperf_bert.prepare.verify.check import verify
from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES

RECORD_VERSION = 1


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
    max_seq_length: int
    max_predictions: int
    dupe_factor: int
    seed: int
    segments: Segments = "pair"


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
    settings = ShardSettings(
        vocabulary_sha256="",  # not known yet
        max_seq_length=wanted.max_seq_length,
        max_predictions=wanted.max_predictions,
        seed=wanted.seed,
        dupe_factor=wanted.dupe_factor,
        split_sentences=False,
        pick_eval=None,
        segments=wanted.segments,
    )
    check_settings(settings, workers, num_texts=1)
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
    return {
        "text": text,
        "vocabulary": given or f"own, {wanted.vocab_size} tokens",
        "max_seq_length": str(wanted.max_seq_length),
        "max_predictions": str(wanted.max_predictions),
        "dupe_factor": str(wanted.dupe_factor),
        "seed": str(wanted.seed),
        "segments": wanted.segments,
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
