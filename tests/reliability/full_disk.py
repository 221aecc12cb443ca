"""Every command that writes, on a real disk that is too small: how it ends, and what it leaves.

A disk is a small tmpfs. A command first runs on a large one, which says how much it writes and how
each file looks; then on disks from none free to just too small.

    PYTHONPATH=benchmarks/bert/implementations/pytorch:tools:tests:tests/reliability \
      python tests/reliability/full_disk.py SIZES [NAME ...]

prints a line a disk, for SIZES disks a command.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from disk_commands import COMMANDS, MISSED, Inputs, make_inputs

from support import run_cli

LARGE = 256 * 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")
MISTAKE = 2  # exit status
LARGEST_LEFT = 12  # names in a line


@contextmanager
def disk(at: Path, free_bytes: int) -> Iterator[Path]:
    """A file system with so much room, in whole pages."""
    at.mkdir(exist_ok=True)
    size = f"size={free_bytes + PAGE}"  # tmpfs takes 0 for no limit
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(at)], check=True)
    try:
        (at / ".filler").write_bytes(bytes(PAGE))
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def used_bytes(at: Path) -> int:
    status = os.statvfs(at)
    return (status.f_blocks - status.f_bfree) * status.f_frsize - PAGE


@dataclass(frozen=True)
class Ended:
    """How a command ended on a disk, and what is there."""

    status: int
    stderr: str
    stdout: str
    left: tuple[str, ...]
    faults: tuple[str, ...]  # what must not be
    seconds: float


def run_on(name: str, inputs: Inputs, at: Path, whole: dict[str, bytes]) -> Ended:
    """Run a command that writes to the disk `at`; `whole` are the files of a good run."""
    began = time.monotonic()
    ended = run_cli(*COMMANDS[name](inputs, at))
    seconds = time.monotonic() - began
    left = files_of(at)
    faults = [f"half-written {path}" for path in left if is_half(at / path, path, whole)]
    faults += line_faults(ended)
    return Ended(ended.returncode, ended.stderr, ended.stdout, tuple(left), tuple(faults), seconds)


def files_of(at: Path) -> dict[str, None]:
    """Names of the files below, and of empty directories."""
    found = {}
    for path in sorted(at.rglob("*")):
        if path.name != ".filler" and (path.is_file() or not any(path.iterdir())):
            found[path.relative_to(at).as_posix()] = None
    return found


def line_faults(ended: "subprocess.CompletedProcess[str]") -> list[str]:
    """An end that says why, in one line, with a status that the docs name."""
    faults = []
    # Every rank says it.
    errors = {line for line in ended.stderr.splitlines() if ": error: " in line}
    if ended.returncode not in (0, MISTAKE, MISSED):
        faults.append(f"status {ended.returncode}")
    if ended.returncode == MISTAKE and len(errors) != 1:
        faults.append(f"{len(errors)} lines of errors")
    for words in ("Traceback", "Exception ignored", "Segmentation", "Fatal Python"):
        if words in ended.stderr + ended.stdout:
            faults.append(words)
    return faults


def is_half(path: Path, name: str, whole: dict[str, bytes]) -> bool:
    """Whether a file was not written to its end, or stands under a name of before that."""
    if name.endswith((".tmp", ".partial")) or ".partial/" in name:
        return True
    contents = b"" if path.is_dir() else path.read_bytes()
    if not whole or whole.get(name, b"") == contents:
        return False
    suffix = "tfevents" if "tfevents" in name else path.suffix
    return not READS.get(suffix, lambda contents: False)(contents)


def reads(parse: Callable[[str], object]) -> Callable[[bytes], bool]:
    """Whether `parse` takes a file."""

    def takes(contents: bytes) -> bool:
        try:
            parse(contents.decode())
        except ValueError:
            return False
        return True

    return takes


def lines(text: str) -> None:
    if text and not text.endswith("\n"):
        raise ValueError


def json_lines(text: str) -> None:
    lines(text)
    for line in text.splitlines():
        json.loads(line)


def frames(contents: bytes) -> bool:
    """Whether a file of TensorBoard ends with the end of a record."""
    start = 0
    while start < len(contents):
        start += 16 + int.from_bytes(contents[start : start + 8], "little")
    return start == len(contents)


# Of files that are not the same in every run: how a whole one is told.
READS: dict[str, Callable[[bytes], bool]] = {
    "": reads(lines),  # LATEST; and files whose time alone counts
    "tfevents": frames,
    ".json": reads(json.loads),
    ".jsonl": reads(json_lines),
    ".toml": reads(tomllib.loads),
    ".log": reads(lines),
    ".txt": reads(lines),
    ".md": reads(lines),
    ".html": lambda contents: contents.rstrip().endswith(b"</html>"),
    ".png": lambda contents: b"IEND" in contents[-12:],
}


def sizes(needed: int, count: int) -> list[int]:
    """Free bytes of so many disks, from none to just too small for `needed`."""
    pages, edge = needed // PAGE, count // 4
    evenly = {round(number * (pages - 1) / max(1, count - 1)) for number in range(count)}
    # What comes first and what comes last are often small files.
    wanted = {*evenly, *range(edge), *range(pages - edge, pages)}
    return [PAGE * number for number in sorted(wanted) if 0 <= number < pages]


def sweep(name: str, inputs: Inputs, scratch: Path, count: int) -> Iterator[tuple[int, Ended]]:
    """The good run, with the bytes that it leaves, then those on disks that are too small."""
    at = scratch / "disk"
    with disk(at, LARGE):
        good = run_on(name, inputs, at, {})
        whole = {path: (at / path).read_bytes() for path in good.left if (at / path).is_file()}
        needed = used_bytes(at)
    yield needed, good
    for free in sizes(needed, count):
        with disk(at, free):
            yield free, run_on(name, inputs, at, whole)


def main() -> None:
    count, names = int(sys.argv[1]), sys.argv[2:] or list(COMMANDS)
    scratch = Path(tempfile.mkdtemp(prefix="full-disk-"))
    try:
        kept = os.environ.get("FULL_DISK_INPUTS")
        inputs = Inputs(Path(kept)) if kept else make_inputs(scratch)
        for name in names:
            for free, ended in sweep(name, inputs, scratch, count):
                last = ended.stderr.rstrip().rpartition("\n")[2].replace(str(scratch), "")
                print(f"{name} | {free:,} | {ended.status} | {ended.seconds:.1f} s | {last}")
                print(f"    left: {' '.join(ended.left[:LARGEST_LEFT])}")
                for fault in ended.faults:
                    print(f"    FAULT {fault}")
                sys.stdout.flush()
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
