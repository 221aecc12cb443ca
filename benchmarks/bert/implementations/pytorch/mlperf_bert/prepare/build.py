"""Text files to a prepared set: one shard a text file, in parallel, resumable, then the index.

With the set stands its baseline: what a guess without context reaches, the floor that a trained
model must beat. Two guesses over all masked positions: where the input still shows a token (kept
or replaced by a random one), the context-free guess is that token; where it is [MASK], it is the
most frequent label among the set's [MASK] inputs.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlperf_bert.common.atomic import make_directory, remove_temporaries, write_file
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.file_progress import progress_of
from mlperf_bert.data.index import (
    INDEX_ARRAYS,
    Baseline,
    Manifest,
    Segments,
    ShardEntry,
    ShardSettings,
    sidecar_path,
    write_index,
)
from mlperf_bert.data.shards import SampleReader, Shard
from mlperf_bert.prepare.pool import finished
from mlperf_bert.prepare.shard_job import ShardJob, compile_maker, is_finished, make_shard
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, file_name, load_any_vocabulary

MAX_STEM_BYTES = 200  # a file name has 255: enough for what is put around the stem
WORKER_DIED = "a worker process died, most often for want of memory"

SAMPLES_AT_A_TIME = 1024


def prepare_text(
    texts: Sequence[Path],
    vocab_path: Path,
    out_dir: Path,
    *,
    max_seq_length: int,
    max_predictions: int,
    dupe_factor: int,
    seed: int,
    workers: int,
    pick_eval: int | None,
    split_sentences: bool,
    segments: Segments = "pair",
    with_baseline: bool = False,
    corpus: dict[str, str] | None = None,
    quiet: bool = False,
) -> Manifest:
    """Make, or finish making, the prepared set `out_dir`. Shards are ordered by file stem.

    Args:
        texts: one shard is made of each; see documents.py for the two layouts.
        vocab_path: the vocabulary, or a tokenizer.json; its copy goes into the set.
        out_dir: created; a shard already finished with the same text and settings is kept.
        max_seq_length: tokens of an example at most, 8 .. 65,535.
        max_predictions: masked positions of an example at most, 1 .. 255.
        dupe_factor: passes over the documents.
        seed: of the random stream of every text file.
        pick_eval: take this many examples evenly out of all of the only text file.
        split_sentences: the text is paragraphs, not one sentence a line.
        segments: "single" makes sequences without pairs, `dupe_factor` times with other masks.
        with_baseline: store the context-free baseline; always done with `pick_eval`.
        workers, corpus, quiet: as of `make_set`.

    Raises:
        ConfigError: an option out of range, or numba's cache cannot be used.
        DataError: a text, the vocabulary, or a shard that was finished with other settings.
    """
    vocabulary = load_any_vocabulary(vocab_path)
    settings = ShardSettings(
        vocabulary_sha256=vocabulary.sha256,
        max_seq_length=max_seq_length,
        max_predictions=max_predictions,
        seed=seed,
        dupe_factor=dupe_factor,
        split_sentences=split_sentences,
        pick_eval=pick_eval,
        segments=segments,
    )
    check_settings(settings, workers, len(texts))
    jobs = shard_jobs(texts, vocab_path, out_dir, settings)
    compile_maker(segments, vocabulary)
    return make_set(
        jobs,
        make_shard,
        vocabulary,
        workers=workers,
        with_baseline=with_baseline or pick_eval is not None,
        corpus=corpus,
        quiet=quiet,
    )


def make_set(
    jobs: list[ShardJob],
    make: Callable[[ShardJob], object],
    vocabulary: AnyVocabulary,
    *,
    workers: int,
    with_baseline: bool,
    corpus: dict[str, str] | None,
    quiet: bool,
    words: tuple[str, str] = ("prepared", "texts"),
) -> Manifest:
    """Make what is not finished of these shards of one set, then its index.

    Args:
        jobs: of `shard_jobs`; `make` does one of them, and nothing where it is finished.
        make: runs in worker processes, so it must be a function of a module, or a partial of one.
        vocabulary: that of the jobs.
        workers: processes; 1 works in this process.
        with_baseline: store the context-free baseline.
        corpus: provenance to store in the manifest.
        quiet: show no progress.
        words: of the progress, as `progress_of` takes them.

    Raises:
        DataError: as `make` does; a shard that was finished with other settings, or is of no job.
    """
    check_left_overs(jobs)
    make_shards(jobs, make, vocabulary, workers=workers, quiet=quiet, words=words)
    return index_set(jobs, vocabulary, with_baseline=with_baseline, corpus=corpus)


def make_shards(
    jobs: list[ShardJob],
    make: Callable[[ShardJob], object],
    vocabulary: AnyVocabulary,
    *,
    workers: int,
    quiet: bool,
    words: tuple[str, str] = ("prepared", "texts"),
) -> None:
    """The first half of `make_set`; several machines may make shards of one set at a time."""
    out_dir = jobs[0].shard_path.parents[1]
    sizes = {job.text_path: _source_bytes(job.text_path) for job in jobs}
    _store_vocabulary(out_dir, vocabulary)
    # Before hours of work, not after: the settings of every shard already there are looked at.
    for job in jobs:
        is_finished(job, source_sha256=None)
    remove_temporaries(out_dir / "shards", _file_names(jobs), of="this machine")
    with progress_of(len(jobs), sum(sizes.values()), quiet=quiet, words=words) as advance:
        for done, _ in finished(make, jobs, workers, died=WORKER_DIED):
            advance(done.text_path.name, sizes[done.text_path])


def index_set(
    jobs: list[ShardJob],
    vocabulary: AnyVocabulary,
    *,
    with_baseline: bool,
    corpus: dict[str, str] | None,
) -> Manifest:
    """The second half of `make_set`: what completes a set, whose shards are all there."""
    out_dir, settings = jobs[0].shard_path.parents[1], jobs[0].settings
    _store_vocabulary(out_dir, vocabulary)
    check_left_overs(jobs)
    remove_temporaries(out_dir / "shards", _file_names(jobs))
    remove_temporaries(out_dir, {file_name(vocabulary)})
    remove_temporaries(out_dir / "index", {"dataset.json", *(name for name, _ in INDEX_ARRAYS)})
    manifest = _manifest_without_index(vocabulary, settings, jobs, corpus)
    return _write_set_index(out_dir, manifest, with_baseline)


def check_left_overs(jobs: list[ShardJob]) -> None:
    """Raise DataError where the set has shards of other files: they would not be in its index."""
    shards = jobs[0].shard_path.parent
    ours = {job.shard_path.name for job in jobs}
    for path in sorted(shards.glob("*.hdf5")):
        if path.name not in ours:
            remedy = "give that one too, or name a new directory"
            raise DataError(str(path), "is the shard of a file that is not given now", remedy)


def check_settings(settings: ShardSettings, workers: int, num_texts: int) -> None:
    """Raise ConfigError for what is out of range, or does not go with so many files."""
    ranges = {
        "max_seq_length": (settings.max_seq_length, 8, 65_535),
        "max_predictions": (settings.max_predictions, 1, 255),
        "dupe_factor": (settings.dupe_factor, 1, 10_000),
        "seed": (settings.seed, 0, 2**63 - 1),
        "workers": (workers, 1, 4096),
        "pick_eval": (1 if settings.pick_eval is None else settings.pick_eval, 1, 2**31),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ConfigError(name, f"is {value}", f"set it within {low} .. {high}")
    if num_texts == 0:
        raise ConfigError("text", "no text file given", "name one at least")
    if settings.pick_eval is not None and num_texts != 1:
        problem = f"picks out of one text file, {num_texts} given"
        raise ConfigError("pick_eval", problem, "give exactly one")


def shard_jobs(
    texts: Sequence[Path], vocab_path: Path, out_dir: Path, settings: ShardSettings
) -> list[ShardJob]:
    """One job a file, ordered by stem. Raises DataError where two names would give one shard."""
    found: dict[str, Path] = {}
    for path in texts:
        if path.stem in found:
            problem = f"has the same stem as {found[path.stem]}, so both would be one shard"
            raise DataError(str(path), problem, "rename one of them")
        if len(os.fsencode(path.stem)) > MAX_STEM_BYTES:
            remedy = f"rename it to at most {MAX_STEM_BYTES} bytes"
            raise DataError(str(path), "has too long a name for a shard", remedy)
        found[path.stem] = path
    return [
        ShardJob(found[stem], out_dir / "shards" / f"{stem}.hdf5", vocab_path, settings)
        for stem in sorted(found)
    ]


def _file_names(jobs: list[ShardJob]) -> set[str]:
    shards = [job.shard_path for job in jobs]
    return {path.name for shard in shards for path in (shard, sidecar_path(shard))}


def _source_bytes(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        problem = error.strerror or "is missing"
        raise DataError(str(path), problem, "give a readable file") from None
    if not path.is_file() or size == 0:
        problem = "is empty" if path.is_file() else "is not a file"
        raise DataError(str(path), problem, "give a file that holds something")
    return size


def _store_vocabulary(out_dir: Path, vocabulary: AnyVocabulary) -> None:
    make_directory(out_dir / "shards")
    copy = out_dir / file_name(vocabulary)
    if not copy.exists():
        write_file(copy, vocabulary.contents)
    elif copy.read_bytes() != vocabulary.contents:
        problem = "is another vocabulary than the one given"
        raise DataError(str(copy), problem, "name a new directory or delete this one")


def _manifest_without_index(
    vocabulary: AnyVocabulary,
    settings: ShardSettings,
    jobs: list[ShardJob],
    corpus: dict[str, str] | None,
) -> Manifest:
    entries = [ShardEntry.of(job.shard_path) for job in jobs]
    return Manifest(
        num_samples=sum(entry.num_samples for entry in entries),
        vocab_size=len(vocabulary),
        vocabulary_sha256=vocabulary.sha256,
        pad_id=vocabulary.pad_id,
        unk_id=vocabulary.unk_id,
        cls_id=vocabulary.cls_id,
        sep_id=vocabulary.sep_id,
        mask_id=vocabulary.mask_id,
        max_seq_length=settings.max_seq_length,
        max_predictions=settings.max_predictions,
        seed=settings.seed,
        dupe_factor=settings.dupe_factor,
        shards=tuple(entries),
        corpus=corpus,
        segments=settings.segments,
        vocabulary_file=file_name(vocabulary),
    )


def _write_set_index(out_dir: Path, manifest: Manifest, with_baseline: bool) -> Manifest:
    lengths, masked_counts = [], []
    for entry in manifest.shards:
        shard = Shard(out_dir / "shards" / entry.file)
        lengths.append(shard.lengths().astype(np.uint16))
        masked_counts.append(shard.masked_counts().astype(np.uint8))
    if with_baseline:
        baseline = measure_baseline(SampleReader(out_dir, manifest), manifest)
        manifest = replace(manifest, baseline=baseline)
    return write_index(out_dir, manifest, np.concatenate(lengths), np.concatenate(masked_counts))


def measure_baseline(reader: SampleReader, manifest: Manifest) -> Baseline:
    """Both accuracies over the whole set; `mask_only_accuracy` is over the [MASK] inputs alone."""
    label_counts = np.zeros(manifest.vocab_size, dtype=np.int64)
    masked_tokens = 0
    visible_right = 0
    for first in range(0, manifest.num_samples, SAMPLES_AT_A_TIME):
        last = min(first + SAMPLES_AT_A_TIME, manifest.num_samples)
        samples = reader.read(np.arange(first, last, dtype=np.int64))
        starts = np.cumsum(samples.lengths) - samples.lengths
        rows = np.repeat(starts, samples.masked_counts) + samples.masked_positions
        inputs = samples.input_ids[rows]
        is_mask = inputs == manifest.mask_id
        labels_at_mask = samples.masked_ids[is_mask]
        label_counts += np.bincount(labels_at_mask, minlength=manifest.vocab_size)
        visible_right += int((~is_mask & (inputs == samples.masked_ids)).sum())
        masked_tokens += len(inputs)
    mask_inputs = int(label_counts.sum())
    most_frequent = int(label_counts.max())
    return Baseline(
        context_free_accuracy=(visible_right + most_frequent) / masked_tokens,
        mask_only_accuracy=most_frequent / max(1, mask_inputs),
        masked_tokens=masked_tokens,
        mask_inputs=mask_inputs,
    )
