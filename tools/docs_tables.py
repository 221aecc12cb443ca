"""Maker of the tables of figures in the documents, from the logs' data.

    python tools/docs_tables.py [--check] [--root DIR]

A table that a command prints stands between the lines `<!-- made by: COMMAND -->` and
`<!-- end -->`. COMMAND runs at the top of the tree, without a shell; `python` and `mlperf_bert` are
those of this interpreter and that tree. Every command runs once, then files with changed tables are
replaced. With --check nothing is written: each difference is a line, and the exit status is 1.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

from mlperf_bert.errors import DataError, UserError
from mlperf_bert.files import write_file

PLACES = (
    "*.md",
    "docs/**/*.md",
    "logs/**/README.md",
    "benchmarks/bert/implementations/*/README.md",
)
PACKAGES = ("benchmarks/bert/implementations/pytorch", "tools")
OPENING = re.compile(r"<!-- made by: (.+) -->")
END = "<!-- end -->"


def main() -> int:
    """Make the tables; 1 if --check found a difference, 2 if a document or a command is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="say what differs, write nothing")
    parser.add_argument("--root", type=Path, metavar="DIR", default=Path(__file__).parents[1])
    options = parser.parse_args()
    root: Path = options.root.resolve()
    documents = sorted({path for place in PLACES for path in root.glob(place)})
    try:
        made = {path: remade(path, root) for path in documents}
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    different = {path: text for path, (text, lines) in made.items() if lines}
    for path in different:
        for line in made[path][1]:
            print(f"{path.relative_to(root)}:{line}")
        if not options.check:
            write_file(path, different[path].encode())
    return 1 if options.check and different else 0


def remade(path: Path, root: Path) -> tuple[str, list[str]]:
    """The document with its tables made again, and `line: command` of each that differed."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    made, different, at = [], [], 0
    while at < len(lines):
        made.append(lines[at])
        at += 1
        if found := OPENING.fullmatch(lines[at - 1].strip()):
            where = f"{path.relative_to(root)}:{at}"
            rest = [line.strip() for line in lines[at:]]
            if END not in rest:
                raise DataError(where, f"no line `{END}` follows", "add it below the table")
            last = at + rest.index(END)
            if any(OPENING.fullmatch(line) for line in rest[: last - at]):
                raise DataError(where, f"no `{END}` before the next table", "add it below this one")
            table, wrong = run(found[1], root)
            if wrong:
                raise DataError(where, f"{found[1]}: {wrong}", "mend the command or its log")
            if table != "".join(lines[at:last]):
                different.append(f"{at}: {found[1]}")
            made.append(table)
            at = last
    return "".join(made), different


@cache
def run(command: str, root: Path) -> tuple[str, str]:
    """The output of the command at the top of the tree, and its error in a line."""
    own = {"python": [sys.executable], "mlperf_bert": [sys.executable, "-P", "-m", "mlperf_bert"]}
    settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    settings["PYTHONPATH"] = ":".join(str(root / place) for place in PACKAGES)
    environment = os.environ | settings  # noqa: TID251, this launches
    try:
        program, *arguments = shlex.split(command)
        words = [*own.get(program, [program]), *arguments]
        done = subprocess.run(
            words, cwd=root, env=environment, capture_output=True, text=True, timeout=120
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return "", f"status {done.returncode}, {said[-1] if said else 'without a word'}"
    return done.stdout.strip("\n") + "\n", "" if done.stdout.strip() else "it prints nothing"


if __name__ == "__main__":
    sys.exit(main())
