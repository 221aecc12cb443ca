"""The checks `disk` and `data`: reading speed, free space, and prepared data."""

import os
import shlex
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.distributed.network_test.findings import Finding, Options, fail, info, ok, warn

_MIB, _GIB = 2**20, 2**30
# A node of the fastest accelerators reads 8 x 1,600 sequences a second, each at a random place:
# a page of 4 KiB or two of each is 50 to 100 MB/s.
LEAST_READ_BYTES_PER_S = 100e6
LEAST_FREE_BYTES, WANTED_FREE_BYTES = _GIB, 10 * _GIB  # a checkpoint of BERT-large has 4 GiB
_READ_BYTES = 256 * _MIB  # read at most
_OWN_BYTES = 128 * _MIB  # written at most, where there are no shards to read
_ENOUGH_BYTES = 16 * _MIB
_BLOCK = 4 * _MIB
_SECONDS = 3.0  # for writing and for reading, each
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class ReadRate:
    """A measured rate: bytes of `source` read from `where`, without the page cache."""

    where: Path
    source: str
    file_system: str
    bytes_read: int
    seconds: float


def check_disk(options: Options) -> list[Finding]:
    """Measure reading from the data's file system (else that of the runs), and its free space."""
    here = Path.cwd()  # runs/ will be here
    rate = measure_read(options.data if options.data else here)
    return [judge_read(rate), judge_free(here, shutil.disk_usage(here).free)]


def judge_read(rate: ReadRate | None) -> Finding:
    """The finding on a read rate for a node's ranks; None if there was nothing to read."""
    name = "disk.read"
    if rate is None:
        remedy = "give --data DIR of prepared data, or run it in a directory you can write to"
        return warn(name, "not measured: no shard to read and no file may be written", remedy)
    per_s = rate.bytes_read / max(rate.seconds, 1e-9)
    found = (
        f"{per_s / 1e6:,.0f} MB/s from {rate.where} ({rate.file_system}; "
        f"{rate.bytes_read / _MIB:.0f} MiB of {rate.source})"
    )
    if rate.file_system in _IN_MEMORY:
        return ok(name, found + ", which is memory")
    if per_s < LEAST_READ_BYTES_PER_S:
        remedy = "copy the data to local disk: mlperf_bert stage-data"
        return warn(name, f"{found}, below {LEAST_READ_BYTES_PER_S / 1e6:.0f}", remedy)
    return ok(name, found)


def judge_free(where: Path, free_bytes: int) -> Finding:
    """The finding on free space for logs and a checkpoint."""
    name, found = "disk.space", f"{free_bytes / _GIB:,.1f} GiB free in {where}"
    remedy = "make room, or give --run-dir on another file system"
    if free_bytes < LEAST_FREE_BYTES:
        return fail(name, found + ", where runs are written", remedy)
    if free_bytes < WANTED_FREE_BYTES:
        return warn(name, found + ": a checkpoint of BERT-large has 4", remedy)
    return ok(name, found)


def measure_read(directory: Path) -> ReadRate | None:
    """Read shards below `directory`, else our own file in it; None if neither is possible.

    Shards are preferred, because a new file may come from a file server's memory. Raises OSError if
    a file cannot be read.
    """
    if not directory.is_dir():
        return None
    shards = sorted(directory.glob("**/shards/*.hdf5"))
    if sum(path.stat().st_size for path in shards) < _ENOUGH_BYTES:
        try:
            # Without a name from the start, so that nothing is ever left behind.
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                _fill(file.fileno())
                read = _read_cold(file.fileno(), _READ_BYTES)
                return _rate(directory, "a file of its own", *read)
        except OSError:
            if not shards:
                return None
    count, seconds = 0, 0.0
    for path in shards:
        with path.open("rb", buffering=0) as file:
            more, taken = _read_cold(file.fileno(), _READ_BYTES - count)
        count, seconds = count + more, seconds + taken
        if count >= _READ_BYTES or seconds > _SECONDS:
            break
    return _rate(directory, "shards", count, seconds)


def _rate(directory: Path, source: str, count: int, seconds: float) -> ReadRate:
    mounts = ""
    with suppress(OSError):
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    return ReadRate(directory, source, file_system_of(directory, mounts), count, seconds)


def _fill(descriptor: int) -> None:
    block = os.urandom(_BLOCK)  # not zeros: file systems may compress those away
    start, written = time.perf_counter(), 0
    while written < _OWN_BYTES and time.perf_counter() - start < _SECONDS:
        written += os.write(descriptor, block)
    os.fsync(descriptor)


def _read_cold(descriptor: int, most: int) -> tuple[int, float]:
    """Read at most `most` bytes from the start; the bytes read, and the seconds it took."""
    if hasattr(os, "posix_fadvise"):  # otherwise (macOS) the page cache answers
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    start, count = time.perf_counter(), 0
    while count < most and time.perf_counter() - start < _SECONDS:
        block = os.read(descriptor, min(_BLOCK, most - count))
        if not block:
            break
        count += len(block)
    return count, time.perf_counter() - start


def file_system_of(directory: Path, mounts: str) -> str:
    """The type of the file system of `directory`, from the lines of /proc/mounts."""
    absolute = directory.resolve()
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        words = line.split()
        if len(words) > 2:
            # Spaces in mount points are written in octal.
            point = Path(words[1].replace("\\040", " "))
            if absolute.is_relative_to(point) and len(point.parts) >= best:
                best, kind = len(point.parts), words[2]
    return kind


def check_data(options: Options) -> list[Finding]:
    """Verify prepared data without reading a sample, and compare them with the config."""
    if options.data is None:
        return [info("data", "no --data given: nothing verified", "--data DIR verifies a set")]
    from mlperf_bert.prepare.verify.check import verify

    report = verify(options.data, full=False, workers=1, quiet=True)
    problems = report.problems()
    if problems:
        where, problem, remedy = problems[0].args
        found = f"{len(problems)} problems, the first: {where}: {problem}"
        verify_all = f"mlperf_bert verify {shlex.quote(str(options.data))}"
        return [fail("data", found, f"{remedy}; all are in: {verify_all}")]
    if options.config is None:
        return [ok("data", f"{options.data} verified (fast check)")]
    from mlperf_bert.data.set_checks import open_data

    opened = open_data(options.config, options.data, rank=0)
    found = (
        f"{options.data} verified (fast check) and fits the config: "
        f"{opened.train.manifest.num_samples:,} samples, {opened.target_in_words}"
    )
    return [ok("data", found)]
