#!/usr/bin/env python3
"""Print the options for sbatch that a config needs, on one line.

    export NEXP=10
    sbatch $(benchmarks/bert/implementations/pytorch/launch/slurm_options.py FILE) run_and_time.sh

FILE is a TOML file or the name of a shipped config. The options request one task per rank, the GPUs
of each node if SLURM manages GPUs, and the time of NEXP runs. They pass FILE to the job as CONFIG.
Pass --set SECTION.KEY=VALUE to the job too, after `run_and_time.sh --`. The script reads these
environment variables. Export them on a line of their own, because the shell runs this script before
it sets variables that precede sbatch on the same line:

    NEXP     number of runs                                            [1]
    CONT     container image, so that the job does not need .venv      [the job uses .venv]
    PYTHON   interpreter of the job, so that it does not need .venv    [the job uses .venv]
    SHARP    1 requests switches that add up gradients (--network=sharp)  [0]

A login node may have neither .venv nor Python 3.11, so this script needs only Python 3.6 and its
standard library. It therefore reads the config with a small parser of its own, which accepts only
lines of the form `[section]` and `key = value`.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

PYTORCH = Path(os.path.abspath(__file__)).parents[1]  # without resolving links, as nodes see it
REPOSITORY = PYTORCH.parents[3]
SHIPPED = PYTORCH / "mlperf_bert" / "configs"
START_MINUTES = 5  # to unpack the image, test the network and copy data, once per job
# Ranks that cannot meet give up after run.hang_timeout_s, ten minutes. SLURM must not end the job
# before they have said so.
LEAST_MINUTES = 15
# The settings that matter to SLURM: their defaults and the words they allow, as in the package's
# config/sections.py. A number is an integer of at least 1.
SETTINGS: "dict[str, tuple[int | str, tuple[str, ...]]]" = {
    "parallel.nodes": (1, ()),
    "parallel.ranks_per_node": (1, ()),
    "run.slurm_minutes": (240, ()),
    "run.device": ("auto", ("auto", "cpu", "cuda")),
    "data.loader": ("thread", ("thread", "dali", "mpi_readers")),
}
_VALUE = r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|true|false|[+-]?(?:\d[\w.+-]*|inf|nan)"
_LINE = re.compile(rf"\s*(?:\[\s*([\w-]+)\s*\]|([\w-]+)\s*=\s*({_VALUE}))?\s*(?:#.*)?")
# A character that the shell splits at or expands, or at which sbatch's --export splits.
_MISREAD = re.compile(r"[^\w./@%+=:~-]")


def main() -> None:
    """Print the options, or one line that says why they cannot be printed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("config", metavar="FILE", help="TOML file, or name of a shipped config")
    text = "override a setting of the config (can be repeated)"
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text
    )
    args = parser.parse_args()
    path = find_config(args.config)
    settings = read_settings(path, args.set)
    if settings["run.device"] == "cuda" and not (given("CONT") or given("PYTHON")):
        check_environment(path.stem)
    print(" ".join(sbatch_options(path, settings)))


def refuse(message: str) -> NoReturn:
    """Print a message and exit with status 2.

    The shell runs sbatch even if this script fails. Without options, sbatch would submit a job with
    another config. The option on stdout prevents this, because sbatch does not know it.
    """
    print("--not-submitted")
    print(f"slurm_options.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def given(name: str) -> str:
    """Return the value of an environment variable, or an empty text."""
    return os.environ.get(name, "")  # noqa: TID251, this launches


def find_config(text: str) -> Path:
    """Return the path of a config, given that path or the name of a shipped config."""
    path = Path(text)
    if path.suffix or path.name != text or path.exists():
        return path
    shipped = SHIPPED / f"{text}.toml"
    if not shipped.exists():
        names = [each.stem for each in SHIPPED.glob("*.toml")]
        near = difflib.get_close_matches(text, names, 1)
        remedy = f"did you mean {near[0]}?" if near else f"the shipped configs are in {SHIPPED}"
        refuse(f"{text}: no such file or shipped config; {remedy}")
    return shipped


def read_settings(path: Path, overrides: "list[str]") -> "dict[str, int | str]":
    """Return the values of SETTINGS in a config, after the overrides of --set."""
    found = {name: default for name, (default, _) in SETTINGS.items()}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        refuse(
            f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}; pass a TOML file"
        )
    section = ""
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            refuse(f"{path}: cannot read line {number}; write it as [section] or key = value")
        section = match[1] or section
        if match[2]:
            put(found, f"{section}.{match[2]}", match[3], str(path))
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or "." not in name:
            refuse(f"--set: cannot read '{override}'; use the form SECTION.KEY=VALUE")
        put(found, name.strip(), value.strip(), "--set")
    return found


def put(found: "dict[str, int | str]", name: str, text: str, origin: str) -> None:
    """Store the value of a setting in `found`, if the setting is one of SETTINGS."""
    if name not in found:
        return
    _, words = SETTINGS[name]
    if words and text.strip("\"'") in words:
        found[name] = text.strip("\"'")
    elif not words and is_count(text):
        found[name] = int(text)
    else:
        allowed = " or ".join(map(repr, words)) or "a positive integer"
        refuse(f"{origin}: {name} must be {allowed}, not {text}")


def is_count(text: str) -> bool:
    """Return True if a text is a positive integer."""
    return re.fullmatch(r"[1-9]\d*", text, re.ASCII) is not None


def check_environment(name: str) -> None:
    """Refuse a job for GPUs if .venv is missing, or has a torch without CUDA.

    The job would otherwise install gigabytes while all its nodes wait, or start without a GPU.
    """
    versions = sorted(REPOSITORY.glob(".venv/lib/python*/site-packages/torch/version.py"))
    found = versions[0].read_text(encoding="utf-8") if versions else ""
    if not versions:
        problem, remedy = "has no torch", "TORCH=cuda tools/venv.sh"
    elif re.search(r"(?m)^cuda\b.*= None$", found):
        problem, remedy = "has torch for CPUs", "rm -r .venv && TORCH=cuda tools/venv.sh"
    else:
        return
    container = "or for a container, export CONT=IMAGE"
    refuse(f"{REPOSITORY}/.venv: {problem}, but {name} needs GPUs; type: {remedy} ({container})")


def sbatch_options(path: Path, settings: "dict[str, int | str]") -> "list[str]":
    """Return the options for a job with the size and the time limit of a config."""
    runs = given("NEXP") or "1"
    if not is_count(runs):
        refuse(f"NEXP: '{runs}' is not a positive integer; set it to the number of runs")
    if given("SHARP") not in ("", "0", "1"):
        refuse(f"SHARP: '{given('SHARP')}' is neither 1 nor 0; set it to 1 or 0, or unset it")
    ranks = int(settings["parallel.ranks_per_node"])
    tasks = ranks * (2 if settings["data.loader"] == "mpi_readers" else 1)
    minutes = int(runs) * int(settings["run.slurm_minutes"]) + START_MINUTES
    minutes = max(minutes, LEAST_MINUTES)
    options = [
        f"--job-name={path.stem}",
        f"--nodes={settings['parallel.nodes']}",
        f"--ntasks-per-node={tasks}",
        f"--time={minutes}",
    ]
    if settings["run.device"] == "cuda" and not slurm_counts_no_gpus():
        options.append(f"--gpus-per-node={ranks}")
    if given("SHARP") == "1":
        options.append("--network=sharp")
    return [*options, f"--export=ALL,CONFIG={exported(path)},TIMED_NEXP={runs}"]


def exported(path: Path) -> str:
    """Return the config as a text that the shell and sbatch leave as it is.

    This is its absolute path, or the name of a shipped config in a repository with another path.
    """
    file = os.path.abspath(path)
    if path.parent == SHIPPED and _MISREAD.search(file):
        file = path.stem
    bad = _MISREAD.search(file)
    if bad:
        remedy = "use only letters, digits and / . _ - + @ % = : ~ in the path"
        refuse(f"{file!r}: has {bad[0]!r} in its path, which sbatch misreads; {remedy}")
    return file


def slurm_counts_no_gpus() -> bool:
    """Return True if SLURM answers and no node has the generic resource `gpu`.

    sbatch then rejects requests for GPUs, and a job gets the GPUs of a node together with the node.
    Returns False if SLURM is missing or does not answer.
    """
    command = ["sinfo", "--noheader", "--format=%G"]
    try:
        done = subprocess.run(  # as in Python 3.6, which has no capture_output
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and not re.search(r"\bgpu\b", done.stdout)


if __name__ == "__main__":
    main()
