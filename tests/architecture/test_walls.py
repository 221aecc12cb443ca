"""Walls that `lint-imports` and ruff keep by pyproject.toml, where they could stand for nothing."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from support import PACKAGE, REPOSITORY

RUFF = Path(sys.executable).with_name("ruff")
IMPORTS = "import os, subprocess, numpy as np, torch, torch.distributed as dist"
REFUSED = [
    "import pickle",
    "from pickle import loads",
    "from torch import load",
    "from os import environ",
    "from .index import open_index",
    'eval("1")',
    'exec("1")',
    "torch.load(path, weights_only=True)",
    "np.load(path)",
    "subprocess.run(line, shell=True)",
    "os.system(line)",
    'os.getenv("HOME")',
    "dist.all_gather_object(values, value)",
]
HARMLESS = ["model.eval()", "json.load(f)", "subprocess.run(x, shell=False)", "dist.all_reduce(x)"]


def refused(code):
    """The lines that ruff refuses in the package because of their use of data."""
    command = [RUFF, "check", "--output-format=json", f"--stdin-filename={PACKAGE}/x.py", "-"]
    text = "\n".join([IMPORTS, *code])
    done = subprocess.run(command, cwd=REPOSITORY, input=text, capture_output=True, text=True)
    found = [each for each in json.loads(done.stdout) if each["code"].startswith(("S", "TID"))]
    rows = {each["location"]["row"] for each in found}
    return [line for row, line in enumerate(code, start=2) if row in rows]


def test_what_is_refused_and_what_is_harmless():
    assert refused([*HARMLESS, *REFUSED]) == REFUSED


def test_files_that_may_more_are_there():
    lint = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    assert [name for name in lint["per-file-ignores"] if not any(REPOSITORY.glob(name))] == []
