"""Every command that writes, on a real disk that is too small: how it ends, and what it leaves.

A disk is a small tmpfs. A command first runs on a large one, which says how much it writes and how
each file looks; then on disks from none free to just too small.
"""

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forked_starts import start_each
from import_cases import SMALL, VOCAB, make_foreign, make_from_text
from submissions import OPEN, write_repository
from support import make_tiny_inputs

LARGE = 256 * 2**20
# Suffixes of files that are not the same in every run: a whole one is told by its end.
VARYING = {"", ".json", ".jsonl", ".toml", ".log", ".txt", ".md", ".html", ".png"}
ENDS = b"\n", b"}", b"</html>", b"IEND\xaeB`\x82"
PAGE = os.sysconf("SC_PAGE_SIZE")
MISTAKE, MISSED = 2, 3  # exit statuses


@dataclass(frozen=True)
class Inputs:
    """Inputs of the commands, on another disk."""

    root: Path

    @property
    def run(self):
        """A run that has ended, with a checkpoint."""
        return self.root / "run" / "run_0"

    @property
    def checkpoint(self):
        return self.run / "checkpoints" / "step_00000020"


def make_inputs(root):
    """Data, a config, a run, its weights as another program's, a submission, texts."""
    inputs = Inputs(root)
    make_tiny_inputs(root)
    (root / "foreign").mkdir()
    make_foreign(make_from_text(root / "foreign"), root / "foreign")
    write_repository(root / "submission", {OPEN: "open"})
    (root / "space.toml").write_text(SPACE)
    done(*train(inputs, root / "run"), expected=MISSED)
    done("export", "--to", "huggingface", inputs.checkpoint, "--out", root / "huggingface")
    return inputs


def done(*words, expected=0):
    (ended,) = start_each([words])
    assert ended.status == expected, ended.printed


SMALL_MODEL = (
    *("--set", "model.num_layers=1", "--set", "model.hidden_size=16", "--set", "model.num_heads=2"),
    *("--set", "model.vocab_size=100", "--set", "data.max_seq_length=32"),
    *("--set", "parallel.local_batch_size=2"),
)
SPACE = '[[parameter]]\nkey = "optim.learning_rate"\nlow = 1e-4\nhigh = 1e-1\nscale = "log"\n'


def train(inputs, out):
    paths = ("--config", inputs.root / "tiny.toml", "--data", inputs.root, "--run-dir", out)
    checkpoints = ("--set", "checkpoint.interval_steps=5", "--set", "checkpoint.keep_last=9")
    return ("train", *paths, *checkpoints)


def prepare_text(inputs, out, workers):
    texts = ("--text", inputs.root / "train.txt", inputs.root / "eval.txt")
    lengths = ("--max-seq-length", 32, "--max-predictions", 5)
    where = ("--vocab", inputs.root / "words.txt", "--out", out / "set", "--workers", workers)
    return ("prepare", *texts, *where, *lengths)


# Name -> the command's words, of what it reads and the disk to write to.
COMMANDS = {
    "prepare --text": lambda i, d: prepare_text(i, d, workers=1),
    "prepare --text, 2 workers": lambda i, d: prepare_text(i, d, workers=2),
    "prepare --hdf5": lambda i, d: (
        *("prepare", "--hdf5", *sorted((i.root / "foreign").glob("*.fixed.hdf5"))),
        *("--vocab", VOCAB, "--out", d / "set", "--workers", 2, *limits()),
    ),
    "convert": lambda i, d: (
        *("convert", "--from", "huggingface", i.root / "huggingface", "--out", d / "checkpoint"),
    ),
    "export": lambda i, d: ("export", "--to", "huggingface", i.checkpoint, "--out", d / "exported"),
    "train": lambda i, d: train(i, d / "run"),
    "train, 2 ranks": lambda i, d: (
        *train(i, d / "run"),
        *("--set", "parallel.ranks_per_node=2", "--set", "parallel.local_batch_size=8"),
    ),
    "report page": lambda i, d: ("report", "page", i.run, "--out", d / "page.html"),
    "report tensorboard": lambda i, d: ("report", "tensorboard", i.run, "--out", d / "scalars"),
    "package": lambda i, d: (
        *("package", i.root / "submission/results", "--root", i.root / "submission"),
        *("--out", d / "package", "--ruleset", "5.0.0"),
    ),
    "tune": lambda i, d: (
        *("tune", "--config", i.root / "tiny.toml", "--space", i.root / "space.toml"),
        *("--data", i.root, "--out", d / "study", "--trials", 1),
        *("--set", "eval.target_accuracy=0.01"),
    ),
    "squad train": lambda i, d: (
        *("squad", "train", "--layers", 1, "--hidden", 16, "--max-length", 64, "--stride", 24),
        *("--device", "cpu", "--updates", 2, "--microbatches", 4, "--run-dir", d / "run"),
    ),
    "plan suggest": lambda i, d: (
        *("plan", "suggest", "--nodes", 1, "--gpus-per-node", 8),
        *("--out", d / "suggested_1x8x16x1.toml"),
    ),
    "bench train": lambda i, d: (
        *("bench", "train", *SMALL_MODEL, "--steps", 2, "--profile"),
        *("--out", d / "profile.json.gz"),
    ),
}


def limits():
    return (
        *("--max-seq-length", SMALL["max_seq_length"]),
        *("--max-predictions", SMALL["max_predictions"]),
    )


@contextmanager
def mounted(*options, at):
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@contextmanager
def disk(at, free_bytes):
    """A file system with so much room, in whole pages."""
    size = f"size={free_bytes + PAGE}"  # tmpfs takes 0 for no limit
    with mounted("-t", "tmpfs", "-o", size, "tmpfs", at=at):
        (at / ".filler").write_bytes(bytes(PAGE))
        yield at


def used_bytes(at):
    status = os.statvfs(at)
    return (status.f_blocks - status.f_bfree) * status.f_frsize - PAGE


@dataclass(frozen=True)
class Ended:
    """The outcome of a command on a disk, and its files there."""

    status: int
    printed: str
    left: tuple[str, ...]
    faults: tuple[str, ...]  # what must not be


def run_on(name, inputs, at, whole):
    """Run a command that writes to the disk `at`; `whole` are the files of a good run."""
    (ended,) = start_each([COMMANDS[name](inputs, at)])
    left = files_of(at)
    faults = [f"half-written {path}" for path in left if is_half(at / path, path, whole)]
    faults += line_faults(ended)
    return Ended(ended.status, ended.printed, tuple(left), tuple(faults))


def files_of(at):
    """Names of the files below, and of empty directories."""
    found = {}
    for path in sorted(at.rglob("*")):
        if path.name != ".filler" and (path.is_file() or not any(path.iterdir())):
            found[path.relative_to(at).as_posix()] = None
    return found


def line_faults(ended):
    """An end that says why, in one line, with a status that the docs name."""
    faults = []
    # Every rank says it.
    errors = {line for line in ended.printed.splitlines() if ": error: " in line}
    if ended.status not in (0, MISTAKE, MISSED):
        faults.append(f"status {ended.status}")
    if ended.status == MISTAKE and len(errors) != 1:
        faults.append(f"{len(errors)} lines of errors")
    for words in ("Traceback", "Exception ignored", "Segmentation", "Fatal Python"):
        if words in ended.printed:
            faults.append(words)
    return faults


def is_half(path, name, whole):
    """Whether a file was not written to its end, or stands under a name of before that."""
    if name.endswith((".tmp", ".partial")) or ".partial/" in name:
        return True
    contents = b"" if path.is_dir() else path.read_bytes()
    if not whole or whole.get(name, b"") == contents:
        return False
    if "tfevents" in name:
        return not is_of_whole_records(contents)
    is_whole = contents.endswith(ENDS) or (contents == b"" and path.suffix != ".json")
    return path.suffix not in VARYING or not is_whole


def is_of_whole_records(contents):
    """Whether a file of TensorBoard ends with the end of a record."""
    start = 0
    while start < len(contents):
        start += 16 + int.from_bytes(contents[start : start + 8], "little")
    return start == len(contents)


def sizes(needed, count):
    """Free bytes of so many disks, from none to just too small for `needed`."""
    pages, edge = needed // PAGE, count // 4
    evenly = {round(number * (pages - 1) / max(1, count - 1)) for number in range(count)}
    # What comes first and what comes last are often small files.
    wanted = {*evenly, *range(edge), *range(pages - edge, pages)}
    return [PAGE * number for number in sorted(wanted) if 0 <= number < pages]


def sweep(name, inputs, scratch, count):
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
