"""What the official set costs: `prepare` on parts of official size, and a plain way beside it.

    python bench_prepare_scale.py [--part-bytes N] [--parts-each N] [--workers 1 2]
        [--repeats N] [--json FILE] [--report FILE]

Every run is the whole command, in a process of its own: start, text, examples, shards, index. The
text is the documentation of the running Python, repeated, with one word in 20 replaced by one that
occurs nowhere else (a word that is met again costs next to nothing). Every worker gets the same
number of parts. In turn with them the first part is prepared in a process of its own by the plain
way: the reference's procedure line by line in Python, tokenizer and examples, without compiled
code, by us, as the reference's own code is not here. All runs must give the same examples. Rates
are given a second of time, and a second of processor time, which other programs on the machine do
not change much.
"""

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]
PART_BYTES = 27_000_000
OFFICIAL_PARTS = 500
OFFICIAL_EXAMPLES = 156_726_829
PLAIN = "plain"  # in the place of a number of workers
NEW_WORDS = 0.05
CORES = (1, 2, 8, 64)


@dataclass(frozen=True, slots=True)
class Run:
    """One whole command: seconds, of all processes together too, and the largest one's memory."""

    workers: int | str
    examples: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    shard_bytes: int
    examples_sha256: list[str]


def write_parts(directory: Path, num_parts: int, part_bytes: int) -> tuple[list[Path], Path]:
    """Parts of about `part_bytes`, and a vocabulary."""
    from bench_prepare import write_corpus

    vocab_path, sample = directory / "vocab.txt", directory / "sample.txt"
    write_corpus(sample, vocab_path, 20_000)
    per_sentence = sample.stat().st_size / 20_000
    write_corpus(sample, vocab_path, round(part_bytes / per_sentence))
    lines = sample.read_text(encoding="utf-8").split("\n")
    sample.unlink()
    paths = []
    for number in range(num_parts):
        rng = random.Random(number)
        path = directory / f"part-{number:05d}.txt"
        path.write_text("\n".join(with_new_words(line, rng) for line in lines), encoding="utf-8")
        paths.append(path)
    return paths, vocab_path


def with_new_words(line: str, rng: random.Random) -> str:
    """The line, with one word in 20 made up."""
    words = line.split(" ")
    for place in range(len(words)):
        if words[place] and rng.random() < NEW_WORDS:
            words[place] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 11)))
    return " ".join(words)


def prepare_plainly(part: Path, vocab_path: Path, out: Path) -> None:
    """One part with the official settings, by the plain way but for the writing of the shard."""
    from bench_prepare import official_settings
    from mlperf_bert.prepare.build import write_shard
    from mlperf_bert.prepare.documents import read_text
    from mlperf_bert.vocabulary.word_pieces import PlainTokenizer, load_vocabulary
    from plain_examples import as_documents, plain_examples

    vocabulary, source = load_vocabulary(vocab_path), read_text(part)
    tokenizer = PlainTokenizer(vocabulary)
    documents: list[list[list[int]]] = [[]]
    for line in source.text.split("\n"):
        ids = tokenizer.encode(line.strip())
        if ids:
            documents[-1].append(ids)
        elif not line.strip() and documents[-1]:
            documents.append([])
    settings = official_settings(vocabulary.sha256)
    nested = [document for document in documents if document]
    examples = plain_examples(as_documents(nested, len(vocabulary)), vocabulary, settings)
    shard = out / "shards" / f"{part.stem}.hdf5"
    shard.parent.mkdir(parents=True)
    write_shard(
        shard, examples, source_name=part.name, source_sha256=source.sha256, settings=settings
    )
    print(f"{len(examples.next_sentence_label)} examples in 1 shards")


def run_command(parts: list[Path], vocab_path: Path, out: Path, workers: int | str) -> Run:
    """`mlperf_bert prepare --text` with the official settings; or the first part plainly."""
    command = [sys.executable, "-m", "mlperf_bert", "prepare", "--text", *map(str, parts)]
    command += ["--vocab", str(vocab_path), "--out", str(out), "--workers", str(workers)]
    if workers == PLAIN:
        command = [sys.executable, __file__, "--plain", *map(str, (parts[0], vocab_path, out))]
    start_s = time.perf_counter()
    with (out.parent / "printed").open("w+") as printed:
        process = subprocess.Popen(command, stdout=printed)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"prepare ended with status {process.returncode}")
        printed.seek(0)
        words = re.search(r"(\d+) examples in \d+ shards", printed.read())
    assert words is not None
    sidecars = [json.loads(path.read_text()) for path in sorted(out.glob("shards/*.json"))]
    return Run(
        workers=workers,
        examples=int(words.group(1)),
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,  # of the largest process, workers included
        shard_bytes=sum(sidecar["shard_bytes"] for sidecar in sidecars),
        examples_sha256=[sidecar["examples_sha256"] for sidecar in sidecars],
    )


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All runs, in turn; medians."""
    parts, vocab_path = write_parts(directory, args.parts_each * max(args.workers), args.part_bytes)
    run_command(parts[:1], vocab_path, directory / "warm", 1)  # compiles, and reads all files once
    runs: list[Run] = []
    for repeat in range(args.repeats):
        for workers in (*args.workers, PLAIN):
            out = directory / f"out-{workers}-{repeat}"
            num_parts = 1 if workers == PLAIN else args.parts_each * workers
            runs.append(run_command(parts[:num_parts], vocab_path, out, workers))
            for path in sorted(out.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    fewest = min(len(run.examples_sha256) for run in runs)
    if len({tuple(run.examples_sha256[:fewest]) for run in runs}) != 1:
        raise SystemExit("two runs made different examples of the same text")
    result: dict[str, Any] = {
        "schema_version": 1,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "commit": commit(),
        "part_bytes": parts[0].stat().st_size,
        "runs": [asdict(run) for run in runs],
    }
    for workers in (*args.workers, PLAIN):
        same = [run for run in runs if run.workers == workers]
        result[f"workers_{workers}"] = {
            "examples_per_s_per_core": statistics.median(
                run.examples / run.seconds / (1 if workers == PLAIN else workers) for run in same
            ),
            "examples_per_cpu_s": statistics.median(run.examples / run.cpu_seconds for run in same),
            "peak_bytes": max(run.peak_bytes for run in same),
            "bytes_per_example": same[0].shard_bytes / same[0].examples,
        }
    return result


def commit() -> str:
    """The commit that ran, with a plus where files had changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def report(result: dict[str, Any]) -> None:
    """Print the tables of this log."""
    measured = {key[8:]: value for key, value in result.items() if key.startswith("workers_")}
    plain = measured.get(PLAIN)
    header = ["processes", "examples/s a core", "a processor second", "peak memory"]
    _row(*header, *(["over the plain way"] if plain else []))
    _row(*["---"] * (5 if plain else 4))
    for workers, one in measured.items():
        rates = (one["examples_per_s_per_core"], one["examples_per_cpu_s"])
        cells = [workers, *(f"{rate:,.0f}" for rate in rates), f"{one['peak_bytes'] / 1e9:.2f} GB"]
        _row(*cells, *([f"{rates[0] / plain['examples_per_s_per_core']:.1f} x"] if plain else []))
    most = measured[max(measured.keys() - {PLAIN}, key=int)]
    rates = [most["examples_per_s_per_core"], most["examples_per_cpu_s"]]
    print()
    header = ["cores", "hours for the official set", "by processor seconds"]
    _row(*header, *(["of the plain way"] if plain else []))
    _row(*["---"] * (4 if plain else 3))
    for cores in CORES:
        # No more processes work at a time than there are parts, and the last ones work alone.
        examples = OFFICIAL_EXAMPLES * -(-OFFICIAL_PARTS // cores) / OFFICIAL_PARTS
        every = [*rates, plain["examples_per_s_per_core"]] if plain else rates
        _row(str(cores), *(f"{examples / rate / 3600:,.2f}" for rate in every))
    on_disk = most["bytes_per_example"] * OFFICIAL_EXAMPLES
    print(f"\n{most['bytes_per_example']:.0f} bytes an example: {on_disk / 1e9:.0f} GB for all")


def _row(*cells: str) -> None:
    edge = "" if cells[0] == "---" else " "
    print(f"|{edge}{f'{edge}|{edge}'.join(cells)}{edge}|")


def main() -> None:
    """Parse the arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part-bytes", type=int, default=PART_BYTES)
    parser.add_argument("--parts-each", type=int, default=3, help="of each worker (3)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print a --json file's tables")
    parser.add_argument("--plain", type=Path, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        prepare_plainly(*args.plain)
        return
    if args.report:
        report(json.loads(args.report.read_text()))
        return
    with tempfile.TemporaryDirectory() as directory:
        result = measure(args, Path(directory))
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
