"""A made-up prepared set with real lengths, larger than the caches of a processor.

Written with the parts that training reads with, so neither text nor HDF5 is needed: a shard file
here is its arrays one after the other, which is all that its sidecar speaks of.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_tools.bench.synthetic import synthetic_samples
from mlperf_bert.common.atomic import make_directory, replaced_file, write_file
from mlperf_bert.common.untrusted import file_sha256
from mlperf_bert.config.sections import MAX_PREDICTIONS
from mlperf_bert.data.index import (
    DatasetPlace,
    LengthIndex,
    Manifest,
    ShardEntry,
    ShardSettings,
    Sidecar,
    sidecar_path,
    write_index,
)
from mlperf_bert.data.length_histogram import SHORTEST, wikipedia_lengths
from mlperf_bert.data.shards import Samples

DISTINCT_SAMPLES = 4096  # drawing more takes long; further ones repeat them at other places
VOCAB_SIZE = 30522
ALIGNMENT_BYTES = 64
DIGEST = "0" * 64  # of the vocabulary and the text, which do not exist


def open_or_make_set(set_dir: Path, *, num_bytes: int, seed: int) -> LengthIndex:
    """The set in `set_dir`, made there where none is: one shard of at least `num_bytes`.

    Raises DataError when what is there cannot be read, or a file cannot be written.
    """
    if not os.path.exists(set_dir / "index" / "dataset.json"):
        histogram = wikipedia_lengths()
        lengths = np.maximum(histogram.draw_evenly(DISTINCT_SAMPLES, seed), SHORTEST)
        samples = synthetic_samples(
            lengths, vocab_size=VOCAB_SIZE, max_predictions=MAX_PREDICTIONS, seed=seed
        )
        bytes_once = sum(values.nbytes for values in _arrays(samples, 1).values())
        settings = ShardSettings(
            vocabulary_sha256=DIGEST,
            max_seq_length=histogram.max_length,
            max_predictions=MAX_PREDICTIONS,
            seed=seed,
            dupe_factor=-(-num_bytes // bytes_once),
            split_sentences=False,
            pick_eval=None,
        )
        write_set(set_dir, samples, settings, VOCAB_SIZE)
    return LengthIndex.open(set_dir)


def write_set(set_dir: Path, samples: Samples, settings: ShardSettings, vocab_size: int) -> None:
    """A set of one shard, which holds the samples `settings.dupe_factor` times."""
    repeats = settings.dupe_factor
    make_directory(set_dir / "shards")
    path = set_dir / "shards" / "made-up.bin"
    _write_shard(path, _arrays(samples, repeats), settings)
    entry = ShardEntry.of(path)
    manifest = Manifest(
        num_samples=entry.num_samples,
        vocab_size=vocab_size,
        vocabulary_sha256=DIGEST,
        pad_id=0,
        unk_id=1,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        max_seq_length=settings.max_seq_length,
        max_predictions=settings.max_predictions,
        seed=settings.seed,
        dupe_factor=repeats,
        shards=(entry,),
    )
    write_index(
        set_dir,
        manifest,
        np.tile(samples.lengths.astype(np.uint16), repeats),
        np.tile(samples.masked_counts.astype(np.uint8), repeats),
    )


def _arrays(samples: Samples, repeats: int) -> dict[str, NDArray[Any]]:
    """The arrays of a shard that holds the samples `repeats` times."""
    return {
        "input_ids": np.tile(samples.input_ids.astype("<u2"), repeats),
        "offsets": _offsets(np.tile(samples.lengths, repeats)),
        "segment_b_start": np.tile(samples.segment_b_start.astype("<u2"), repeats),
        "masked_lm_positions": np.tile(samples.masked_positions.astype("<u2"), repeats),
        "masked_lm_ids": np.tile(samples.masked_ids.astype("<u2"), repeats),
        "masked_lm_offsets": _offsets(np.tile(samples.masked_counts, repeats)),
        "next_sentence_label": np.tile(samples.next_sentence_label.astype("|u1"), repeats),
    }


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts))).astype("<i8")


def _write_shard(path: Path, arrays: dict[str, NDArray[Any]], settings: ShardSettings) -> None:
    places = {}
    with replaced_file(path) as temporary:
        with temporary.open("wb") as file:
            for name, values in arrays.items():
                file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
                places[name] = DatasetPlace(values.dtype.str, values.size, file.tell())
                file.write(values.data)
        digest = file_sha256(temporary)
        size = temporary.stat().st_size
    sidecar = Sidecar(
        shard_bytes=size,
        shard_sha256=digest,
        num_samples=len(arrays["next_sentence_label"]),
        source_name=path.name,
        source_sha256=DIGEST,
        settings=settings,
        datasets=places,
    )
    write_file(sidecar_path(path), sidecar.to_json())
