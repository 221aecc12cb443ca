"""Examples per second of `prepare`, text to finished shard, beside plain-Python example making.

    .venv/bin/python tools/bench_prepare.py [--sentences N] [--repeats N] [--json FILE]

One process, one thread. Both ways use the same tokenizer and the same writer, and their shards
must be equal byte for byte; compilation is done before the clock starts. The text is the
documentation of the running Python, cut into documents of widely spread lengths.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlperf_bert.data.index import ShardSettings
from mlperf_bert.prepare.build import compile_maker, write_shard
from mlperf_bert.prepare.corpus import collect_documents
from mlperf_bert.prepare.documents import read_text, tokenize_documents
from mlperf_bert.prepare.examples import make_examples
from mlperf_bert.prepare.train_vocabulary import train_vocabulary
from mlperf_bert.vocabulary.word_pieces import Tokenizer, load_vocabulary

# The plain version belongs to the tests, which are no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from plain_examples import plain_examples

VOCAB_SIZE = 8192
SENTENCES_A_DOCUMENT = 12  # of the median document; the mean is about twice that
MAKERS = {"plain": plain_examples, "compiled": make_examples}


def write_corpus(text_path: Path, vocab_path: Path, num_sentences: int) -> None:
    """Write the text, with repeated sentences if there are too few, and a vocabulary for it."""
    sentences = [sentence for document in collect_documents() for sentence in document]
    vocab_path.write_text("\n".join(train_vocabulary(sentences, VOCAB_SIZE)) + "\n")
    rng = random.Random(1)
    lines: list[str] = []
    left = 0
    for number in range(num_sentences):
        if left == 0:
            lines.append("")
            left = max(1, round(SENTENCES_A_DOCUMENT * rng.lognormvariate(0, 1.2)))
        lines.append(sentences[number % len(sentences)])
        left -= 1
    text_path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def official_settings(vocabulary_sha256: str) -> ShardSettings:
    """Settings of MLPerf's set, for a vocabulary."""
    return ShardSettings(
        vocabulary_sha256=vocabulary_sha256,
        max_seq_length=512,
        max_predictions=76,
        seed=12345,
        dupe_factor=10,
    )


def make_shard(
    way: str, text_path: Path, vocab_path: Path, shard_path: Path
) -> tuple[dict[str, float], int]:
    """Turn a text into its shard; seconds of each part and in all, and the examples."""
    start_s = time.perf_counter()
    vocabulary = load_vocabulary(vocab_path)
    settings = official_settings(vocabulary.sha256)
    source = read_text(text_path)
    documents = tokenize_documents(source.text, Tokenizer(vocabulary), split=False)
    tokenized_s = time.perf_counter()
    examples = MAKERS[way](documents, vocabulary, settings)
    made_s = time.perf_counter()
    write_shard(
        shard_path,
        examples,
        source_name=text_path.name,
        source_sha256=source.sha256,
        settings=settings,
    )
    written_s = time.perf_counter()
    seconds = {
        "tokenize_s": tokenized_s - start_s,
        "make_s": made_s - tokenized_s,  # including ordering
        "write_s": written_s - made_s,
        "total_s": written_s - start_s,
    }
    return seconds, len(examples.next_sentence_label)


def peaks_of(way: str, *paths: Path) -> dict[str, int]:
    """Peak resident bytes of a fresh process, before and after it makes the shard."""
    command = [sys.executable, __file__, "--peaks-of", way, *map(str, paths)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def print_peaks(way: str, text_path: Path, vocab_path: Path, shard_path: Path) -> None:
    """Print the values that `peaks_of` reads."""
    compile_maker("pair", load_vocabulary(vocab_path))
    start = high_water_bytes()
    make_shard(way, text_path, vocab_path, shard_path)
    print(json.dumps({"start_peak_bytes": start, "peak_bytes": high_water_bytes()}))


def high_water_bytes() -> int:
    """Peak by Linux's own count, as that of `getrusage` starts with the parent's peak."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def measure(directory: Path, num_sentences: int, repeats: int) -> dict[str, Any]:
    """Run both ways in turn, `repeats` times; medians."""
    text_path, vocab_path = directory / "text.txt", directory / "vocab.txt"
    write_corpus(text_path, vocab_path, num_sentences)
    compile_maker("pair", load_vocabulary(vocab_path))
    shards = {way: directory / f"{way}.hdf5" for way in MAKERS}
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in MAKERS}
    count = 0
    for _ in range(repeats):
        for way in MAKERS:
            times, count = make_shard(way, text_path, vocab_path, shards[way])
            runs[way].append(times)
        if shards["plain"].read_bytes() != shards["compiled"].read_bytes():
            raise SystemExit("the two shards differ")
    result: dict[str, Any] = {
        "schema_version": 1,
        "python": platform.python_version(),
        "text_bytes": text_path.stat().st_size,
        "shard_bytes": shards["compiled"].stat().st_size,
        "sentences": num_sentences,
        "examples": count,
        "repeats": repeats,
    }
    for way, times in runs.items():
        parts = {name: statistics.median(run[name] for run in times) for name in times[0]}
        peaks = peaks_of(way, text_path, vocab_path, shards[way])
        result[way] = {"examples_per_s": count / parts["total_s"], **parts, **peaks}
    return result


def report(result: dict[str, Any]) -> None:
    """Print the result for people."""
    print(
        f"{result['examples']:,} examples of {result['text_bytes']:,} bytes of text, "
        f"shards of {result['shard_bytes']:,} bytes, equal; medians of {result['repeats']}"
    )
    for way in MAKERS:
        one = result[way]
        seconds = " ".join(
            f"{name} {one[f'{name}_s']:.3f}" for name in ("tokenize", "make", "write")
        )
        megabytes = [one[key] / 1e6 for key in ("peak_bytes", "start_peak_bytes")]
        print(
            f"{way:>8}: {one['examples_per_s']:8,.0f} examples/s; seconds: {seconds}; "
            f"peak {megabytes[0]:,.0f} MB, {megabytes[1]:,.0f} MB of it before the text"
        )
    plain, ours = result["plain"], result["compiled"]
    print(
        f"compiled over plain: whole {plain['total_s'] / ours['total_s']:.1f} x, "
        f"example making {plain['make_s'] / ours['make_s']:.1f} x"
    )


def main() -> None:
    """Parse the arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peaks-of", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peaks_of:
        way, *paths = args.peaks_of
        print_peaks(way, *map(Path, paths))
        return
    with tempfile.TemporaryDirectory() as directory:
        result = measure(Path(directory), args.sentences, args.repeats)
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
