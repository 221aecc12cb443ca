"""Measure how many of N random faults in the program the tests find (mutation testing).

    python tools/mutate.py [--count N] [--seed HEX] [--journal FILE] [--jobs N] [--root DIR]

A fault is one small change of one expression or statement: a comparison, a sum, an `and`, a number,
a condition, or a removed call. Faults are drawn at random. The default seed is the first eight hex
digits of the committed tree, so that nobody can choose it.

The command plants each fault in a copy of the tree. It first runs the tests of the changed file's
folder. Then it runs the other tests for a few minutes, beginning with those that import the file
most directly. A test finds the fault if it fails, passes without the fault, and fails again with
it. A fault survives if no test finds it within the time limit, even if it has no visible effect.

Before the first fault, the command runs one test file on the unchanged copy. If it does not pass,
or if pytest cannot run, the command stops with an error, because the results would be meaningless.

The journal records each fault in one line, so that a stopped run can be resumed. The last line
printed is the percentage of faults that were found.
"""

import argparse
import ast
import contextlib
import copy
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NoReturn

from scipy.stats import binomtest

PACKAGES = {
    "benchmarks/bert/implementations/pytorch/mlperf_bert": "tests/unit",
    "tools/bert_tools": "tests/tools",
}
TEST_SECONDS = 100  # a test that takes longer fails
FOLDER_SECONDS = 400  # time limit for all tests of a folder
WIDER_SECONDS = 240  # time limit for the other tests, of which those not reached count as passed
FILES_AT_ONCE = 8  # test files per pytest run among the other tests, before time is checked again
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
GREATEST_NUMBER = 1000  # greater numbers are limits and sizes whose exact value does not matter
NOT_MUTATED = ("annotation", "returns", "decorator_list", "bases")
# Exit statuses of pytest: all tests passed, some failed, none was selected.
PASSED, FAILED, NONE_SELECTED = 0, 1, 5
Outcome = Literal["passed", "failed", "out of time"]


class Stopped(Exception):  # noqa: N818, not an error
    """The request to a worker to stop, because the whole run stops."""


class HarnessError(Exception):
    """The tests cannot run on the unchanged tree, so no result would be valid."""


@dataclass(frozen=True)
class Fault:
    """One change of one file, which replaces the bytes from `start` to `end` with `after`."""

    path: str  # relative to the root of the tree
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """Text that identifies the fault in the journal."""
        return f"{self.path}:{self.start}:{self.end}:{self.kind}"


# Faults -------------------------------------------------------------------------------------------


def faults_of(path: str, source: bytes) -> list[Fault]:
    """List every fault that can be planted in the functions of a file, in source order."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for kind, node, changed in _changes(ast.parse(source), in_function=False):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        after = ast.unparse(changed)
        if isinstance(changed, ast.expr):
            after = f"({after})"
        before = source[start:end].decode()
        found.append(Fault(path, node.lineno, kind, start, end, before, after))
    return sorted(found, key=lambda fault: (fault.start, fault.kind))


Change = tuple[str, ast.expr | ast.stmt, ast.expr | ast.stmt]


def _changes(node: ast.AST, *, in_function: bool) -> Iterator[Change]:
    """Yield the kind, the node to replace, and the replacement of each fault below `node`."""
    in_function |= isinstance(node, ast.FunctionDef)
    for field, value in ast.iter_fields(node):
        if field in NOT_MUTATED:
            continue
        for child in value if isinstance(value, list) else [value]:
            # Python 3.11 has wrong positions for the expressions in an f-string.
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if in_function:
                yield from _changes_here(child)
            yield from _changes(child, in_function=in_function)


def _changes_here(node: ast.AST) -> Iterator[Change]:
    """Yield the faults that change the syntax node `node` itself."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[first, *_]) if type(first) in COMPARISONS:
            changed.ops[0] = COMPARISONS[type(first)]()
            yield "comparison", node, changed
        case ast.BinOp(left=left, op=op) if type(op) in OPERATORS and not _is_text(left):
            changed.op = OPERATORS[type(op)]()
            yield "arithmetic", node, changed
        case ast.BoolOp(op=op):
            changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "boolean", node, changed
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", node, ast.Call(ast.Name("bool"), [operand], [])
        case ast.Constant(value=int(number)) if type(number) is int and number < GREATEST_NUMBER:
            yield "number", node, ast.Constant(number + 1)
        case ast.If() if isinstance(node, ast.If):
            yield "condition", node.test, ast.Constant(False)
        case ast.Expr(value=ast.Call()):
            yield "call left out", node, ast.Pass()
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            changed.op = OPERATORS[type(op)]()
            yield "arithmetic", node, changed


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def draw(root: Path, count: int, seed: str) -> list[Fault]:
    """Draw `count` faults of the program below `root`, uniformly and without replacement."""
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    found = [
        fault
        for path in paths
        for fault in faults_of(str(path.relative_to(root)), path.read_bytes())
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


# Tests --------------------------------------------------------------------------------------------


def tests_of(path: str, root: Path) -> tuple[list[str], list[str]]:
    """List the test files of the folder that contains `path`, and all other test files.

    `path` is a file of the program. Both lists begin with the tests that import it most directly.
    Tests that do not import it come last, for example because they run commands.
    """
    package = next(package for package in PACKAGES if path.startswith(package))
    below = Path(path).relative_to(package)
    folder = f"{PACKAGES[package]}/{below.parts[0].removesuffix('.py')}/"
    steps = _steps_to(_module_name(path), root)
    tests = sorted(
        (str(test.relative_to(root)) for test in (root / "tests").rglob("test_*.py")),
        key=lambda test: (steps.get(_module_name(test), len(steps)), test),
    )
    own = [test for test in tests if test.startswith(folder)]
    return own, [test for test in tests if not test.startswith(folder)]


def _steps_to(module: str, root: Path) -> dict[str, int]:
    """Map each module to the length of its shortest chain of imports that leads to `module`."""
    importers: dict[str, set[str]] = {}
    for folder in (*PACKAGES, "tests"):
        for path in (root / folder).rglob("*.py"):
            importer = _module_name(str(path.relative_to(root)))
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
                elif isinstance(node, ast.Import):
                    names = [name.name for name in node.names]
                else:
                    continue
                for name in names:
                    importers.setdefault(name, set()).add(importer)
    steps, reached = {module: 0}, [module]
    for name in reached:  # the list grows in this loop
        for importer in sorted(importers.get(name, set()) - steps.keys()):
            steps[importer] = steps[name] + 1
            reached.append(importer)
    return steps


def _module_name(path: str) -> str:
    """Return the name by which a file is imported. For a test, this is its file name."""
    parts = list(Path(path).with_suffix("").parts)
    for package in PACKAGES:
        if path.startswith(package):
            parts = parts[len(Path(package).parts) - 1 :]
    if parts[0] == "tests":
        parts = parts[-1:]
    return ".".join(parts).removesuffix(".__init__")


class Copy:
    """A copy of a commit, in which a worker plants faults and runs tests."""

    def __init__(self, root: Path, commit: str, directory: Path) -> None:
        """Check out `commit` of the repository `root` into a new `directory`."""
        clone = ["git", "clone", "-q", "--no-checkout", str(root), str(directory)]
        subprocess.run(clone, check=True)
        self.root = directory
        self._git("checkout", "-q", "--detach", commit)
        if (root / ".venv").exists():
            (directory / ".venv").symlink_to(root / ".venv")
        self._caches = directory.with_name(f"{directory.name}-caches")  # of compiled code
        self._has_fault = False
        self._is_stopped = False
        self._running: tuple[subprocess.Popen[bytes], Path] | None = None

    def check(self) -> None:
        """Run the shortest test file without a fault. Raises HarnessError if a test fails."""
        tests = [
            path for each in PACKAGES.values() for path in (self.root / each).rglob("test_*.py")
        ]
        shortest = min(tests, key=lambda path: (path.stat().st_size, path))
        test = str(shortest.relative_to(self.root))
        outcome, failed = self._run([test], 2 * TEST_SECONDS)
        if outcome != "passed":
            problem = f"the outcome of {failed or test} on the unchanged tree is {outcome!r}"
            raise HarnessError(f"{problem}; make the tests pass before you measure them")

    def find(self, fault: Fault) -> dict[str, str | None]:
        """Plant a fault, and search for a test that finds it.

        In the result, `found_by` is the test. `among` is "folder" if the test belongs to the folder
        of the fault, and otherwise "others". Both are None if no test finds the fault. Raises
        Stopped after `stop`, and HarnessError if pytest cannot run.
        """
        own, others = tests_of(fault.path, self.root)
        try:
            failed = self._first_failure(own, FOLDER_SECONDS, fault) if own else None
            if failed is not None:
                return {"found_by": failed, "among": "folder"}
            end = time.monotonic() + WIDER_SECONDS
            for at in range(0, len(others), FILES_AT_ONCE):
                left = end - time.monotonic()
                if left < TEST_SECONDS / 2:
                    break
                failed = self._first_failure(others[at : at + FILES_AT_ONCE], left, fault)
                if failed is not None:
                    return {"found_by": failed, "among": "others"}
        finally:
            self._restore()
        return {"found_by": None, "among": None}

    def stop(self) -> None:
        """Kill the running tests, and prevent further ones from starting."""
        self._is_stopped = True
        if self._running is not None:
            _kill_all(*self._running)

    def _first_failure(self, tests: Sequence[str], seconds: float, fault: Fault) -> str | None:
        """Return the first test that fails with the fault twice, and passes without it, or None."""
        deselected: list[str] = []
        while True:
            self._plant(fault)
            arguments = [*tests, *(f"--deselect={name}" for name in deselected)]
            outcome, failed = self._run(arguments, seconds)
            if outcome != "failed":
                return None  # a fault for which the time runs out has survived
            suspects = [failed] if failed else tests  # no test is named if Python itself crashed
            self._restore()
            passes = self._run(suspects, 2 * TEST_SECONDS)[0] == "passed"
            self._plant(fault)
            if passes and self._run(suspects, 2 * TEST_SECONDS)[0] == "failed":
                return failed or "crash of Python"
            if failed is None or failed in deselected:
                return None
            deselected.append(failed)  # it also fails without the fault, at least sometimes

    def _plant(self, fault: Fault) -> None:
        self._restore()
        path = self.root / fault.path
        source = path.read_bytes()
        path.write_bytes(source[: fault.start] + fault.after.encode() + source[fault.end :])
        self._has_fault = True

    def _restore(self) -> None:
        self._git("checkout", "-q", ".")
        self._git("clean", "-fdxq", "-e", ".venv")
        self._has_fault = False

    def _git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.root, check=True)

    def _run(self, arguments: Sequence[str], seconds: float) -> tuple[Outcome, str | None]:
        """Run tests until one fails, for at most `seconds` seconds.

        Returns the outcome, and the name of the test or file that failed. Raises Stopped after
        `stop`, and HarnessError if pytest cannot run on the unchanged tree.
        """
        if self._is_stopped:
            raise Stopped
        with tempfile.TemporaryDirectory(dir=self.root.parent, ignore_cleanup_errors=True) as name:
            directory = Path(name)
            output = directory / "output.txt"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    self._command(arguments, directory),
                    cwd=self.root,
                    env=self._environment(directory),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._running = process, directory
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return "out of time", None
            finally:
                _kill_all(process, directory)
                self._running = None
            if self._is_stopped:
                raise Stopped
            status = process.returncode
            if status in (PASSED, NONE_SELECTED):
                return "passed", None
            # A fault may crash Python or break an import. The unchanged tree must not.
            if status > FAILED and not self._has_fault:
                said = _reason(output.read_text("utf-8", errors="replace"))
                problem = f"pytest cannot run {arguments[0]} on the unchanged tree"
                raise HarnessError(f"{problem} (exit status {status}: {said}); fix that first")
            return "failed", _last_failed(directory / "cache")

    def _command(self, arguments: Sequence[str], directory: Path) -> list[str]:
        options = ["-x", "-q", "--tb=no", "-o", f"cache_dir={directory}/cache"]
        options.append(f"--timeout={TEST_SECONDS}")
        return [sys.executable, "-m", "pytest", *options, *arguments]

    def _environment(self, directory: Path) -> dict[str, str]:
        """Return environment variables that make tests write temporary files into `directory`."""
        packages = (str(self.root / package.rpartition("/")[0]) for package in PACKAGES)
        return os.environ | {  # noqa: TID251, this launches
            "PYTHONPATH": os.pathsep.join(packages),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(directory),
            "XDG_CACHE_HOME": str(self._caches),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }


def _reason(output: str) -> str:
    """Return the last line of pytest's output that reports an error, or otherwise its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error\b|ERROR|error:", line)]
    return (errors or lines or ["no output"])[-1]


def _last_failed(cache: Path) -> str | None:
    """Return the test that failed, or the file that failed to import, from pytest's cache."""
    names = cache / "v/cache/lastfailed"
    return next(iter(json.loads(names.read_text())), None) if names.exists() else None


def _kill_all(process: subprocess.Popen[bytes], temporary: Path) -> None:
    """Kill pytest and the processes of its tests, whose TMPDIR is the directory `temporary`."""
    process.kill()
    process.wait()
    mark = f"TMPDIR={temporary}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


# Run ----------------------------------------------------------------------------------------------


def main() -> int:
    """Try the faults that are not yet in the journal, then print the score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--count", type=_positive, default=150, help="number of faults to try (default: 150)"
    )
    parser.add_argument(
        "--seed", help="seed for drawing faults (default: start of the tree's hash)"
    )
    parser.add_argument(
        "--journal",
        type=Path,
        help="file for the results, which a stopped run needs to resume "
        "(default: .cache/mutants-SEED.jsonl)",
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=os.cpu_count(),
        help="number of faults to try at the same time (default: one per core)",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).parents[1],
        help="root of the git repository to test (default: the repository of this script)",
    )
    options = parser.parse_args()
    root: Path = options.root.resolve()
    tree = _git(root, "rev-parse", "HEAD^{tree}")
    seed = options.seed or tree[:8]
    if _git(root, "status", "--porcelain", "--untracked-files=no"):
        return _error(f"{root}: has uncommitted changes; commit them first")
    journal: Path = options.journal or root / f".cache/mutants-{seed}.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    faults = draw(root, options.count, seed)
    with journal.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _error(f"{journal}: in use by another run; pass another file with --journal")
        done = _read(journal)
        if any(record["tree"] != tree for record in done.values()):
            return _error(f"{journal}: belongs to another tree; pass another file with --journal")
        # Remove an incomplete last line.
        file.truncate(sum(len(_line(record)) for record in done.values()))
        missing = [each for each in faults if each.key not in done]
        try:
            for record in run_faults(missing, root, options.jobs):
                done[str(record["key"])] = record | {"tree": tree}
                file.write(_line(done[str(record["key"])]))
                file.flush()
        except HarnessError as error:
            return _error(str(error))
    print_score(faults, done)
    return 0


def _error(line: str) -> int:
    """Print why the command stops, in one line, and return its exit status."""
    print(f"mutate.py: error: {line}", file=sys.stderr)
    return 2


def run_faults(faults: Sequence[Fault], root: Path, jobs: int) -> Iterator[dict[str, object]]:
    """Try all faults in `jobs` copies of the commit, and yield each result when it is known.

    Raises HarnessError if the tests cannot run.
    """
    if not faults:
        return
    commit = _git(root, "rev-parse", "HEAD")
    signal.signal(signal.SIGTERM, _exit)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as directory:
        copies = [Copy(root, commit, Path(directory) / str(number)) for number in range(jobs)]
        copies[0].check()
        begin = time.monotonic()
        free: SimpleQueue[Copy] = SimpleQueue()
        for each in copies:
            free.put(each)

        def tried(fault: Fault) -> dict[str, object]:
            mine = free.get()
            start = time.monotonic()
            try:
                outcome = mine.find(fault)
            finally:
                free.put(mine)
            seconds = round(time.monotonic() - start, 1)
            return {"key": fault.key, **asdict(fault), **outcome, "seconds": seconds}

        with ThreadPoolExecutor(jobs) as pool:
            try:
                waiting = [pool.submit(tried, fault) for fault in faults]
                for number, future in enumerate(as_completed(waiting), 1):
                    record = future.result()
                    yield record
                    minutes = (time.monotonic() - begin) / 60
                    left = minutes / number * (len(faults) - number)
                    print(
                        f"{number}/{len(faults)}, {left:.0f} min left: {record['path']}:"
                        f"{record['line']} {record['kind']}: {record['found_by'] or 'survived'}",
                        flush=True,
                    )
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for each in copies:
                    each.stop()


def _exit(number: int, _: object) -> NoReturn:
    """Exit on a signal, so that the `finally` blocks kill the running tests."""
    raise SystemExit(128 + number)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


def print_score(faults: Sequence[Fault], records: dict[str, dict[str, object]]) -> None:
    """Print the faults that survived, and the fraction of faults that the tests found.

    The fraction is printed with its 95% confidence interval, and the last line contains only the
    percentage.
    """
    for fault in faults:
        if records[fault.key]["found_by"] is None:
            change = f"{fault.before!r} -> {fault.after!r}"
            print(f"survived: {fault.path}:{fault.line} {fault.kind}: {change}")
    among = [records[fault.key]["among"] for fault in faults]
    num_found = sum(each is not None for each in among)
    interval = binomtest(num_found, len(faults)).proportion_ci(method="wilson")
    print(
        f"The tests found {num_found} of {len(faults)} faults "
        f"(95% interval: {interval.low:.0%} to {interval.high:.0%}). "
        f"The tests of the fault's own folder found {among.count('folder')} of them."
    )
    print(f"{100 * num_found / len(faults):.1f}")


def _read(journal: Path) -> dict[str, dict[str, object]]:
    """Return a journal's records by the key of the fault, without an incomplete last line."""
    lines = journal.read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return {record["key"]: record for record in records}


def _line(record: dict[str, object]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _git(root: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
