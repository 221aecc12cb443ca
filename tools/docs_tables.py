"""Generate the tables in the documentation from the data of the logs.

    python tools/docs_tables.py [--check] [--root DIR]

A generated table is between the lines `<!-- made by: COMMAND -->` and `<!-- end -->`. COMMAND
prints the table. The script runs it without a shell, in the root of the repository. In COMMAND,
`python` is this interpreter, and `mlperf_bert` is the program of that repository. After all
commands have run, the script rewrites the files whose tables have changed. With --check it writes
no files. Instead, it prints one line per difference, and exits with status 1 if there are any.
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

DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "logs/**/README.md",
    "benchmarks/bert/implementations/*/README.md",
)
PACKAGES = ("benchmarks/bert/implementations/pytorch", "tools")
OPENING = re.compile(r"<!-- made by: (.+) -->")
END = "<!-- end -->"


def main() -> int:
    """Update the tables in all documents, or check them with --check.

    Returns 0, or 1 if --check found a difference, or 2 if a document or a command has an error.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="print the differences instead of writing files"
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        default=Path(__file__).parents[1],
        help="root of the repository (default: the repository of this script)",
    )
    options = parser.parse_args()
    root: Path = options.root.resolve()
    documents = sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)})
    try:
        updated = {path: with_new_tables(path, root) for path in documents}
    except UserError as error:
        print(f"docs_tables.py: error: {error}", file=sys.stderr)
        return 2
    different = {path: text for path, (text, lines) in updated.items() if lines}
    for path in different:
        for line in updated[path][1]:
            print(f"{path.relative_to(root)}:{line}")
        if not options.check:
            write_file(path, different[path].encode())
    return 1 if options.check and different else 0


def with_new_tables(path: Path, root: Path) -> tuple[str, list[str]]:
    """Return the text of a document with new tables, and one line for each table that changed.

    Such a line is `line number: command`. Raises DataError if a table has no end, or if a command
    fails.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    updated, different, position = [], [], 0
    while position < len(lines):
        updated.append(lines[position])
        position += 1
        if found := OPENING.fullmatch(lines[position - 1].strip()):
            where = f"{path.relative_to(root)}:{position}"
            rest = [line.strip() for line in lines[position:]]
            if END not in rest:
                raise DataError(where, f"no line `{END}` follows", "add it below the table")
            last = position + rest.index(END)
            if any(OPENING.fullmatch(line) for line in rest[: last - position]):
                raise DataError(where, f"`{END}` is missing", "add it below this table")
            table, problem = run(found[1], root)
            if problem:
                raise DataError(where, f"{found[1]}: {problem}", "fix the command or its log")
            if table != "".join(lines[position:last]):
                different.append(f"{position}: {found[1]}")
            updated.append(table)
            position = last
    return "".join(updated), different


@cache
def run(command: str, root: Path) -> tuple[str, str]:
    """Run the command of a table in `root`, and return its output.

    Also returns a description of the problem if the command failed, otherwise "".
    """
    own = {"python": [sys.executable], "mlperf_bert": [sys.executable, "-P", "-m", "mlperf_bert"]}
    settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    settings["PYTHONPATH"] = ":".join(str(root / package) for package in PACKAGES)
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
        lines = done.stderr.strip().splitlines()
        return "", f"exit status {done.returncode}, {lines[-1] if lines else 'no error message'}"
    return done.stdout.strip("\n") + "\n", "" if done.stdout.strip() else "it printed nothing"


if __name__ == "__main__":
    sys.exit(main())
