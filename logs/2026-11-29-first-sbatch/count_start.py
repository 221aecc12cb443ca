"""Count what one rank asks of the file systems from its start until its clock starts.

python count_start.py PREPARED_DATA

It trains cpu_tiny on one rank twice, the second time under strace. The first start writes the
byte code that a later start reads, and tells how much of the mapped files is in memory. Programs
that rank 0 alone starts, such as git, are not counted. Prints tables, see README.md.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
RANKS_PER_NODE, RANKS = 8, 1024
NODES = RANKS // RANKS_PER_NODE
OPENS = ("open", "openat")
LOOKUPS = ("stat", "lstat", "newfstatat", "statx", "access", "faccessat2", "readlink")
READS = ("read", "pread64", "mmap")
STARTS = ("clone", "clone3", "fork", "vfork")
TRACED = (*OPENS, *LOOKUPS, *READS, *STARTS, "getdents64", "execve", "write")
# `123 openat(AT_FDCWD</work>, "/a/b", O_RDONLY) = 3</a/b>`, of strace -f -y.
CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\w+)(?:<(.*?)>)?")
CUT = re.compile(r"(\d+) +(.*) <unfinished \.\.\.>$")
REST = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)$")
FILE_OF = re.compile(r"\d+<(/.*?)>, ")
PATH = re.compile(r'"(.*?)"')
CLOCK_STARTS = '\\"key\\": \\"run_start\\"'


@dataclass
class Counts:
    """Calls by kind and success, paths asked about, and bytes of opened files by path."""

    calls: Counter = field(default_factory=Counter)
    asked: set = field(default_factory=set)
    sizes: dict = field(default_factory=dict)
    read: Counter = field(default_factory=Counter)
    mapped: dict = field(default_factory=dict)


def train(data, run_dir, *before):
    """Start one rank as run_and_time.sh does, for two steps.

    Returns the bytes of mapped files that were in its memory when its clock started.
    """
    settings = ("parallel.ranks_per_node=1", "run.max_steps=2", "eval.target_accuracy=0.9")
    settings += ("schedule.warmup_steps=1", "schedule.decay_steps=2")
    command = [sys.executable, "-P", "-m", "mlperf_bert", "train", "--config", "cpu_tiny"]
    command += ["--data", data, "--run-dir", run_dir]
    command += [word for setting in settings for word in ("--set", setting)]
    environ = os.environ | {"PYTHONSAFEPATH": "1"}
    log, resident = Path(run_dir) / "result_0.txt", 0
    with subprocess.Popen(
        [*before, *command], env=environ, cwd=ROOT, stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not (log.exists() and "run_start" in log.read_text()):
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            found = re.search(r"RssFile:\s+(\d+) kB", status)
            resident = int(found[1]) * 1024 if found else resident
            time.sleep(0.02)
    return resident


def whole_calls(lines):
    """Lines with calls that strace cut in two, because another thread's call came, joined."""
    cut = {}
    for line in lines:
        if match := CUT.match(line):
            cut[match[1]] = match[2]
        elif match := REST.match(line):
            yield f"{match[1]} {cut.pop(match[1], '')}{match[2]}"
        else:
            yield line


def calls_of_rank(lines):
    """Name, arguments, result and opened path of each call before the clock starts.

    Leaves out other programs, with all their threads and children.
    """
    first, others = None, set()
    for line in whole_calls(lines):
        if CLOCK_STARTS in line:
            return
        match = CALL.match(line)
        if match is None:
            continue
        process, name, words, result, opened = match.groups()
        first = first or process
        if name == "execve" and process != first:
            others.add(process)
        elif name in STARTS and process in others:
            others.add(result)
        elif process not in others:
            yield name, words, result, opened
    raise SystemExit("the clock did not start; look at the output of train")


def owner(path, data):
    """Who a file belongs to, as a row of the table."""
    owners = {
        "environment (.venv)": Path(sys.prefix).resolve(),
        "repository": ROOT,
        "Python itself": Path(sys.base_prefix).resolve(),
        "prepared data": Path(data).resolve(),
    }
    for name, directory in owners.items():
        if directory in Path(path).parents:
            return name
    return "system"


def count(lines, run_dir):
    """Count the calls of a rank. Files in /proc and in its run directory are no files here."""
    counts = Counts()
    for name, words, result, opened in calls_of_rank(lines):
        succeeded = not result.startswith("-")
        outcome = "found" if succeeded else "not found"
        if name in READS:
            of = FILE_OF.search(words)
            if succeeded and of and of[1] in counts.sizes:
                note_bytes(counts, of[1], name, words, result)
        elif name == "getdents64":
            counts.calls["read a directory"] += 1
        elif name in OPENS:
            counts.calls[f"open a path: {outcome}"] += 1
            counts.asked.add(PATH.search(words)[1])
            ignored = ("/proc/", "/sys/", "/dev/", run_dir)
            if opened and not opened.startswith(ignored) and Path(opened).is_file():
                counts.sizes[opened] = Path(opened).stat().st_size
        elif name in LOOKUPS and '""' not in words:  # "" asks about an open file
            counts.calls[f"ask about a path: {outcome}"] += 1
            counts.asked.add(PATH.search(words)[1])
    return counts


def note_bytes(counts, path, name, words, result):
    """Add what a call reads of a file, or how far it maps the file."""
    if name != "mmap":
        counts.read[path] += int(result)
        return
    _, length, *_, offset = words.split(", ")
    end = min(int(length) + int(offset, 16), counts.sizes[path])
    counts.mapped[path] = max(end, counts.mapped.get(path, 0))


def print_calls(counts):
    """Print the calls of one rank, of a node and of all ranks."""
    total = sum(counts.calls.values())
    different = {"different paths": len(counts.asked)}
    print(f"{'':<34}{'one rank':>12}{f'{RANKS_PER_NODE} ranks':>12}{f'{RANKS:,} ranks':>14}")
    for name, number in {**dict(sorted(counts.calls.items())), "all calls": total}.items():
        print(f"{name:<34}{number:>12,}{number * RANKS_PER_NODE:>12,}{number * RANKS:>14,}")
    for name, number in different.items():
        print(f"{name:<34}{number:>12,}")


def print_files(counts, data):
    """Print how many files are opened, their sizes, and how much of them is read or mapped."""
    print(f"{'opened, in MB':<34}{'files':>8}{'size':>10}{'read':>10}{'mapped':>10}")
    by_owner = {}
    for path in counts.sizes:
        by_owner.setdefault(owner(path, data), []).append(path)
    for name, paths in sorted(by_owner.items(), key=lambda each: -len(each[1])):
        figures = [
            sum(of.get(path, 0) for path in paths) / 1e6
            for of in (counts.sizes, counts.read, counts.mapped)
        ]
        print(f"{name:<34}{len(paths):>8,}", *(f"{each:>9,.1f}" for each in figures))
    files, size = len(counts.sizes), sum(counts.sizes.values())
    print(f"{'all':<34}{files:>8,}{size / 1e6:>10,.1f}")
    print(f"{f'{NODES} nodes, once per node':<34}{files * NODES:>8,}{size * NODES / 1e6:>10,.1f}")


def main():
    """Trace a start and print its tables."""
    data = sys.argv[1]
    with tempfile.TemporaryDirectory() as directory:
        resident = train(data, f"{directory}/first")
        trace = Path(directory) / "trace"
        options = ("-f", "-y", "-qq", "-s", "400", "-e", f"trace={','.join(TRACED)}")
        train(data, f"{directory}/second", "strace", *options, "-o", trace)
        with trace.open(encoding="utf-8", errors="replace") as lines:
            counts = count(lines, directory)
    python = sys.version.split()[0]
    print(f"Python {python}, torch {torch.__version__}, {torch.cuda.device_count()} GPUs\n")
    print_calls(counts)
    print()
    print_files(counts, data)
    print(f"of the mapped files in memory when the clock starts: {resident / 1e6:,.1f} MB")
    touched = resident + sum(counts.read.values())
    print(f"that and what is read, on {NODES} nodes: {touched * NODES / 1e6:,.1f} MB")
    print("\nlargest files, in MB")
    for path in sorted(counts.sizes, key=counts.sizes.get, reverse=True)[:8]:
        print(f"{Path(path).name:<34}{counts.sizes[path] / 1e6:>18,.1f}")


if __name__ == "__main__":
    main()
