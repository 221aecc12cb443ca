"""Mutation test: how many of N random faults in the program its tests find.

    python tools/mutate.py [--count N] [--seed HEX] [--journal FILE] [--jobs N] [--root DIR]

A fault is one small change of one expression or statement: a comparison, a sum, an `and`, a number,
a condition, a call left out. The seed draws the places; by default it is the first eight hex digits
of the committed tree, so that nobody chooses it. Each fault is planted in a copy of the tree, where
the tests of its folder run first, then for some minutes the other tests, nearest in imports first.
A test that fails counts if it passes without the fault and fails with it once more. A fault that
changes nothing anybody could see counts as a survivor, and so does one for which time is too short.

The journal gets a line for each fault and lets a stopped run go on. The last line printed is the
share of faults that were found, in percent.
"""

import argparse
import ast
import contextlib
import copy
import fcntl
import json
import os
import random
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
FOLDER_SECONDS = 400  # for the tests of a folder
WIDER_SECONDS = 240  # for the other tests; those that are not reached count as passed
FILES_AT_ONCE = 8  # of the other tests, so that the time is looked at between them
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
GREATEST_NUMBER = 1000  # greater ones are limits and sizes that nothing depends on exactly
NOT_MUTATED = ("annotation", "returns", "decorator_list", "bases")
Outcome = Literal["passed", "failed", "out of time"]


class Stopped(Exception):  # noqa: N818, no error
    """Somebody asked for the end."""


@dataclass(frozen=True)
class Fault:
    """One change of one file: the bytes `start` to `end` become `after`."""

    path: str  # below the top of the tree
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """What the journal knows it by."""
        return f"{self.path}:{self.start}:{self.end}:{self.kind}"


# Faults -------------------------------------------------------------------------------------------


def faults_of(path: str, source: bytes) -> list[Fault]:
    """Every fault that can be planted in functions of the file, in the order of its text."""
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
    """Kind, node and changed node of each fault below `node`."""
    in_function |= isinstance(node, ast.FunctionDef)
    for field, value in ast.iter_fields(node):
        if field in NOT_MUTATED:
            continue
        for child in value if isinstance(value, list) else [value]:
            # Python 3.11 does not know the places of what is formatted into a text.
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if in_function:
                yield from _changes_here(child)
            yield from _changes(child, in_function=in_function)


def _changes_here(node: ast.AST) -> Iterator[Change]:
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
    """`count` faults of the program below `root`, all places alike."""
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    found = [
        fault
        for path in paths
        for fault in faults_of(str(path.relative_to(root)), path.read_bytes())
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


# Tests --------------------------------------------------------------------------------------------


def tests_of(path: str, root: Path) -> tuple[list[str], list[str]]:
    """Test files of the folder of the program's file `path`, and the others, nearest first.

    Near is what imports the file in few steps; what reaches it in no way but by a command is last.
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
    """Steps of imports from each module of the program and of the tests to `module`."""
    importers: dict[str, set[str]] = {}
    for place in (*PACKAGES, "tests"):
        for path in (root / place).rglob("*.py"):
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
    for name in reached:  # which grows
        for importer in sorted(importers.get(name, set()) - steps.keys()):
            steps[importer] = steps[name] + 1
            reached.append(importer)
    return steps


def _module_name(path: str) -> str:
    """Name by which the file is imported; the tests' directory is on the path of Python."""
    parts = list(Path(path).with_suffix("").parts)
    for package in PACKAGES:
        if path.startswith(package):
            parts = parts[len(Path(package).parts) - 1 :]
    if parts[0] == "tests":
        parts = parts[-1:]
    return ".".join(parts).removesuffix(".__init__")


class Copy:
    """A copy of a commit in which faults are planted and tests run."""

    def __init__(self, root: Path, commit: str, place: Path) -> None:
        subprocess.run(["git", "clone", "-q", "--no-checkout", str(root), str(place)], check=True)
        self.root = place
        self._git("checkout", "-q", "--detach", commit)
        if (root / ".venv").exists():
            (place / ".venv").symlink_to(root / ".venv")
        self._caches = place.with_name(f"{place.name}-caches")  # of compiled code
        self._is_stopped = False
        self._running: tuple[subprocess.Popen[bytes], Path] | None = None

    def find(self, fault: Fault) -> dict[str, str | None]:
        """The test that finds the fault, and among which tests it is; both are None if none does.

        Raises Stopped after `stop`.
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
        """End the tests that run, and begin no more."""
        self._is_stopped = True
        if self._running is not None:
            _end_all(*self._running)

    def _first_failure(self, tests: Sequence[str], seconds: float, fault: Fault) -> str | None:
        """The first of the tests that fails with the fault each time, and passes without it."""
        left_out: list[str] = []
        while True:
            self._plant(fault)
            some = [*tests, *(f"--deselect={name}" for name in left_out)]
            outcome, failed = self._run(some, seconds)
            if outcome != "failed":
                return None  # a fault for which the time does not suffice has survived
            suspects = [failed] if failed else tests  # none is named if Python itself ended
            self._restore()
            passes = self._run(suspects, 2 * TEST_SECONDS)[0] == "passed"
            self._plant(fault)
            if passes and self._run(suspects, 2 * TEST_SECONDS)[0] == "failed":
                return failed or "the end of Python"
            if failed is None or failed in left_out:
                return None
            left_out.append(failed)  # it fails without the fault, or now and then

    def _plant(self, fault: Fault) -> None:
        self._restore()
        path = self.root / fault.path
        source = path.read_bytes()
        path.write_bytes(source[: fault.start] + fault.after.encode() + source[fault.end :])

    def _restore(self) -> None:
        self._git("checkout", "-q", ".")
        self._git("clean", "-fdxq", "-e", ".venv")

    def _git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.root, check=True)

    def _run(self, arguments: Sequence[str], seconds: float) -> tuple[Outcome, str | None]:
        """Run tests up to the first that fails; its name, or that of the file, if there is one."""
        if self._is_stopped:
            raise Stopped
        packages = (str(self.root / package.rpartition("/")[0]) for package in PACKAGES)
        with tempfile.TemporaryDirectory(dir=self.root.parent, ignore_cleanup_errors=True) as place:
            environment = os.environ | {  # noqa: TID251, this launches
                "PYTHONPATH": os.pathsep.join(packages),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": place,
                "XDG_CACHE_HOME": str(self._caches),
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
            }
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no"]
            command += ["-o", f"cache_dir={place}/cache", f"--timeout={TEST_SECONDS}", *arguments]
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._running = process, Path(place)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return "out of time", None
            finally:
                _end_all(process, Path(place))
                self._running = None
            if self._is_stopped:
                raise Stopped
            if process.returncode in (0, 5):  # 5: every test was left out
                return "passed", None
            names = Path(place) / "cache/v/cache/lastfailed"
            return "failed", next(
                iter(json.loads(names.read_text())), None
            ) if names.exists() else None


def _end_all(process: subprocess.Popen[bytes], temporary: Path) -> None:
    """End the tests and what they started, which all have this directory for temporary files."""
    process.kill()
    process.wait()
    mark = f"TMPDIR={temporary}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


# Run ----------------------------------------------------------------------------------------------


def main() -> int:
    """Plant the faults that the journal does not have yet, then print the score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=_positive, default=150, help="faults (default: 150)")
    parser.add_argument("--seed", help="of the draw (default: that of the committed tree)")
    parser.add_argument("--journal", type=Path, help="default: .cache/mutants-SEED.jsonl")
    parser.add_argument(
        "--jobs", type=_positive, default=os.cpu_count(), help="default: one a core"
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the tree")
    options = parser.parse_args()
    root: Path = options.root.resolve()
    tree = _git(root, "rev-parse", "HEAD^{tree}")
    seed = options.seed or tree[:8]
    if _git(root, "status", "--porcelain", "--untracked-files=no"):
        print("mutate.py: error: the tree has changes; commit them first", file=sys.stderr)
        return 2
    journal: Path = options.journal or root / f".cache/mutants-{seed}.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    faults = draw(root, options.count, seed)
    with journal.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"mutate.py: error: {journal}: is written by another run", file=sys.stderr)
            return 2
        done = _read(journal)
        if any(record["tree"] != tree for record in done.values()):
            print(f"mutate.py: error: {journal}: is of another tree; name another", file=sys.stderr)
            return 2
        file.truncate(sum(len(_line(record)) for record in done.values()))  # a line cut off
        for record in run_faults(
            [each for each in faults if each.key not in done], root, options.jobs
        ):
            done[str(record["key"])] = record | {"tree": tree}
            file.write(_line(done[str(record["key"])]))
            file.flush()
    print_score(faults, done)
    return 0


def run_faults(faults: Sequence[Fault], root: Path, jobs: int) -> Iterator[dict[str, object]]:
    """Try each fault in one of `jobs` copies of the commit; yield what was found as they end."""
    if not faults:
        return
    begin, commit = time.monotonic(), _git(root, "rev-parse", "HEAD")
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as place:
        copies = [Copy(root, commit, Path(place) / str(number)) for number in range(jobs)]
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


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"is {text!r}; give a number from 1")
    return int(text)


def print_score(faults: Sequence[Fault], records: dict[str, dict[str, object]]) -> None:
    """Print the survivors, then the share of faults that were found with its interval."""
    for fault in faults:
        if records[fault.key]["found_by"] is None:
            change = f"{fault.before!r} -> {fault.after!r}"
            print(f"survived: {fault.path}:{fault.line} {fault.kind}: {change}")
    among = [records[fault.key]["among"] for fault in faults]
    num_found = sum(place is not None for place in among)
    interval = binomtest(num_found, len(faults)).proportion_ci(method="wilson")
    print(
        f"{num_found} of {len(faults)} faults were found, {among.count('folder')} of them by tests "
        f"of their folder; 95% interval {interval.low:.0%} to {interval.high:.0%}"
    )
    print(f"{100 * num_found / len(faults):.1f}")


def _read(journal: Path) -> dict[str, dict[str, object]]:
    """Records of the journal by key; a last line that a stop cut off is left out."""
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
