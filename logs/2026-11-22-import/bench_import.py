"""Examples a second and peak memory of `prepare --tfrecord` and `--hdf5`, format by format.

    python bench_import.py [--sentences N] [--repeats N] [--json FILE]

The examples are those that `prepare --text` makes of the documentation of the running Python (512
tokens at most); every import must give its shard byte for byte. One worker; each import is a fresh
process, and its clock runs from the file to the verified set. Compilation is done before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlperf_bert.data.index import ShardSettings
from mlperf_bert.prepare.build import prepare_text
from mlperf_bert.prepare.import_examples import compile_reading, import_set

# The text is that of tools/bench_prepare.py; the writers belong to the tests. Both are no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from bench_prepare import high_water_bytes, write_corpus
from foreign_files import WRITERS, examples_of

WIDTH, ROOM = 512, 76
SETTINGS = ShardSettings(max_seq_length=WIDTH, max_predictions=ROOM, seed=0, dupe_factor=1)


def measure_one(path: Path, vocab_path: Path, out: Path) -> None:
    """Import one file and print what that took."""
    compile_reading()
    before_bytes = high_water_bytes()
    start_s, processor_start_s = time.perf_counter(), time.process_time()
    manifest = import_set(
        [path],
        vocab_path,
        out,
        SETTINGS,
        format_name="hdf5" if path.suffix == ".hdf5" else "tfrecord",
        workers=1,
        quiet=True,
    )
    result = {
        "examples": manifest.num_samples,
        "seconds": time.perf_counter() - start_s,
        # Of this process: the child that reads HDF5 has its own.
        "processor_seconds": time.process_time() - processor_start_s,
        "start_peak_bytes": before_bytes,
        "peak_bytes": high_water_bytes(),
    }
    print(json.dumps(result))


def measure(directory: Path, num_sentences: int, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` imports of each format, taken in turn."""
    text_path, vocab_path = directory / "part.txt", directory / "vocab.txt"
    write_corpus(text_path, vocab_path, num_sentences)
    made = replace(SETTINGS, seed=12345, dupe_factor=10)
    prepare_text([text_path], vocab_path, directory / "set", made, workers=1, quiet=True)
    shard = directory / "set" / "shards" / "part.hdf5"
    examples = examples_of(shard)
    for ending, write in WRITERS.items():
        write(directory / f"part.{ending}", examples, WIDTH, ROOM)
    runs: dict[str, list[dict[str, float]]] = {ending: [] for ending in WRITERS}
    for number in range(repeats):
        for ending in WRITERS:
            path, out = directory / f"part.{ending}", directory / f"{number}_{ending}"
            words = [sys.executable, __file__, "--one", path, vocab_path, out]
            done = subprocess.run(
                [str(word) for word in words], check=True, capture_output=True, text=True
            )
            runs[ending].append(json.loads(done.stdout))
            if (out / "shards" / f"{path.stem}.hdf5").read_bytes() != shard.read_bytes():
                raise SystemExit(f"the shard of {ending} differs")
    result: dict[str, Any] = {
        "schema_version": 1,
        "examples": len(examples),
        "mean_length": sum(len(one["input_ids"]) for one in examples) / len(examples),
        "shard_bytes": shard.stat().st_size,
        "repeats": repeats,
    }
    for ending, found in runs.items():
        medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
        size = (directory / f"part.{ending}").stat().st_size
        result[ending] = {**medians, "file_bytes": size}
    return result


def report(result: dict[str, Any]) -> None:
    """Print the result for people."""
    print(
        f"{result['examples']:,} examples, mean length {result['mean_length']:.1f}, a shard of "
        f"{result['shard_bytes'] / 1e6:,.1f} MB, equal; medians of {result['repeats']}"
    )
    for ending in WRITERS:
        one = result[ending]
        print(
            f"{ending:>15}: {one['file_bytes'] / 1e6:7,.1f} MB, "
            f"{one['examples'] / one['seconds']:8,.0f} examples/s, "
            f"{one['examples'] / one['processor_seconds']:8,.0f} a second of this process, "
            f"peak {one['peak_bytes'] / 1e6:,.0f} MB, {one['start_peak_bytes'] / 1e6:,.0f} before"
        )


def main() -> None:
    """Parse the arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", nargs=3, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure_one(*args.one)
        return
    with tempfile.TemporaryDirectory() as directory:
        result = measure(Path(directory), args.sentences, args.repeats)
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
