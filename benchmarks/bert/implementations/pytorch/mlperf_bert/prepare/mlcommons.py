"""MLCommons' official text to the official sets: checked, made in ranges, joined.

The examples equal the reference's: 512 tokens, 76 predictions, ten passes, seed 12345. For
evaluation, 10,000 are picked evenly out of all of `eval.txt`.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlperf_bert.data.index import Manifest, ShardSettings, Sidecar, read_sidecar
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import (
    file_digest,
    open_regular_file,
)
from mlperf_bert.prepare.build import (
    ShardJob,
    check_settings,
    compile_maker,
    index_set,
    is_finished,
    make_shard,
    make_shards,
    shard_jobs,
)
from mlperf_bert.vocabulary.word_pieces import Vocabulary, load_vocabulary

FETCH = "fetch it again with download_dataset.sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class Official:
    """Published facts of the text and of the sets made of it; the defaults are MLCommons'.

    `files` has size and md5 of the files for which they are published. For the other parts only the
    approximate size is known. The reference makes `num_samples` examples of all parts.
    """

    parts: int = 500
    part_bytes: tuple[int, int] = (20_000_000, 35_000_000)
    files: dict[str, tuple[int, str]] = field(
        default_factory=lambda: {
            "eval.txt": (32_851_144, "2a220f790517261547b1b45ed3ada07a"),
            "vocab.txt": (231_508, "64800d5d8528ce344256daf115d4965e"),
            "part-00000-of-00500": (27_150_902, "a64a7c31eff5cd38ae6d94f7a6229dab"),
            "part-00001-of-00500": (27_198_569, "549a9ed4f805257245bec936563abfd0"),
            "part-00002-of-00500": (27_395_616, "1a1366ddfc03aef9d41ce552ee247abf"),
            "part-00497-of-00500": (24_775_043, "66835aa75d4855f2e678e8f3d73812e9"),
            "part-00498-of-00500": (24_575_505, "e6d68a7632e9f4aa1a94128cce556dc9"),
            "part-00499-of-00500": (21_873_644, "b3b087ad24e3770d879a351664cebc5a"),
        }
    )
    num_samples: int = 156_726_829
    eval_samples: int = 10_000

    def part(self, number: int) -> str:
        """The name of a part."""
        return f"part-{number:05d}-of-{self.parts:05d}"


OFFICIAL = Official()


@dataclass(frozen=True, slots=True)
class Places:
    """Where the text and its vocabulary are, and the directory of both sets."""

    text: Path
    vocab: Path
    out: Path


def prepare_parts(places: Places, numbers: Sequence[int], workers: int) -> list[Sidecar]:
    """Make the shards of some parts without an index: one machine's share of the work.

    Raises DataError for text that is not the official one, ConfigError for `workers`.
    """
    names = [OFFICIAL.part(number) for number in numbers]
    _check_files(places, [*names, "vocab.txt"])
    jobs, vocabulary = _jobs(places, "train", names, None)
    check_settings(jobs[0].settings, workers, len(jobs))
    compile_maker("pair", vocabulary)
    make_shards(jobs, make_shard, vocabulary, workers=workers, quiet=False)
    return [read_sidecar(job.shard_path) for job in jobs]


def check_text(places: Places) -> None:
    """Check that all of the text is there. Raises DataError for text that is not the official."""
    parts = [OFFICIAL.part(number) for number in range(OFFICIAL.parts)]
    _check_files(places, [*parts, "eval.txt", "vocab.txt"])


def prepare_eval(places: Places) -> Manifest:
    """Make the evaluation set. Raises DataError for text that is not the official one."""
    _check_files(places, ["eval.txt", "vocab.txt"])
    jobs, vocabulary = _jobs(places, "eval", ["eval.txt"], OFFICIAL.eval_samples)
    compile_maker("pair", vocabulary)
    make_shards(jobs, make_shard, vocabulary, workers=1, quiet=False)
    return index_set(jobs, vocabulary, with_baseline=True, corpus=None)


def join_parts(places: Places) -> Manifest:
    """Make one training set of the shards that lie in the output directory.

    Raises DataError if a shard is missing, or was made of other text than its part, as far as the
    parts are here.
    """
    _check_files(places, ["vocab.txt"])
    names = [OFFICIAL.part(number) for number in range(OFFICIAL.parts)]
    jobs, vocabulary = _jobs(places, "train", names, None)
    missing = [number for number, job in enumerate(jobs) if not is_finished(job, None)]
    if missing:
        problem = f"has no shard of part {missing[0]}, and of {len(missing) - 1} other parts"
        remedy = "make them with --parts or copy them here, then join again"
        raise DataError(str(places.out / "train"), problem, remedy)
    for job in jobs:
        if job.text_path.exists():
            is_finished(job, file_digest(job.text_path, FETCH))
    return index_set(jobs, vocabulary, with_baseline=False, corpus=None)


def parse_parts(words: str) -> range:
    """`A-B`, both included, or `A`. Raises ConfigError."""
    first, dash, last = words.partition("-")
    numbers = [first, last] if dash else [first, first]
    if all(each.isascii() and each.isdecimal() and len(each) < 9 for each in numbers):
        low, high = map(int, numbers)
        if low <= high < OFFICIAL.parts:
            return range(low, high + 1)
    remedy = f"give A-B, from 0 to {OFFICIAL.parts - 1}"
    raise ConfigError("--parts", f"is {words!a:.40}", remedy)


def _jobs(
    places: Places, name: str, texts: Sequence[str], pick_eval: int | None
) -> tuple[list[ShardJob], Vocabulary]:
    vocabulary = load_vocabulary(places.vocab)
    settings = ShardSettings(
        vocabulary_sha256=vocabulary.sha256,
        max_seq_length=512,
        max_predictions=76,
        seed=12345,
        dupe_factor=10,
        pick_eval=pick_eval,
    )
    paths = [places.text / text for text in texts]
    return shard_jobs(paths, places.vocab, places.out / name, settings), vocabulary


def _check_files(places: Places, names: Sequence[str]) -> None:
    """Check before hours of work that all files are there and look like the official ones."""
    for name in names:
        path = places.vocab if name == "vocab.txt" else places.text / name
        try:
            with open_regular_file(path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                known = OFFICIAL.files.get(name)
                if known is None:
                    low, high = OFFICIAL.part_bytes
                    if not low <= num_bytes <= high:
                        problem = f"has {num_bytes:,} bytes, official parts {low:,} to {high:,}"
                        raise DataError(str(path), problem, FETCH)
                elif num_bytes != known[0]:
                    raise DataError(str(path), f"has {num_bytes:,} bytes, not {known[0]:,}", FETCH)
                elif (md5 := hashlib.file_digest(file, "md5").hexdigest()) != known[1]:
                    raise DataError(str(path), f"has md5 {md5}, not {known[1]}", FETCH)
        except OSError as error:
            problem = error.strerror or "cannot be read"
            raise DataError(str(path), problem, FETCH.replace(" again", "")) from None
