"""The docs' evidence: tables made from the logs' data, and commands for a fresh clone."""

import importlib.util
import io
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from support import PACKAGE, REPOSITORY, contents, copy_checkout, mlperf_records, run_process

PAGES = {str(page): page.read_text() for page in sorted(REPOSITORY.glob("logs/**/README.md"))}
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TYPED = (  # heads of tables that no data of ours is behind
    "| block | reference | fused |",  # counted by hand
    "| optimizer | global batch | max_norm |",  # records that are lost
    "| seed 2 | 8,000 |",
    "| run | bucket / none, no hook",
)
# Now, or by a script of a finished study, at the commit that is named.
MADE_BY_A_COMMAND = r"(?s)<!-- made (?:by|at [0-9a-f]{7} by): .*?<!-- end -->"
MADE = "<!-- made by: python -c 'print(\"| a |\\n|---|\\n| 1 |\")' -->\n"
TABLE = "| a |\n|---|\n| 1 |\n"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what git knows or would take, so nothing that it ignores."""
    return copy_checkout(tmp_path_factory.mktemp("clone") / "tree")


@pytest.fixture
def script(clone, monkeypatch):
    """Runs one of the clone in this process, as its own would import NumPy once more."""
    monkeypatch.chdir(clone)

    def run(name, *words):
        """What it prints."""
        known = set(sys.modules)
        said = io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(said):
            patch.setattr(sys, "argv", [name, *words])
            patch.setattr(sys, "path", [str(Path(name).parent), *sys.path])
            try:
                runpy.run_path(name, run_name="__main__")
            except SystemExit as end:
                assert not end.code, (name, *words, end.code)
        for new in set(sys.modules) - known:  # other logs have files of the same name
            if "/logs/" in str(getattr(sys.modules[new], "__file__", "")):
                del sys.modules[new]
        return said.getvalue()

    return run


def docs_tables(tree, *words):
    command = [sys.executable, REPOSITORY / "tools" / "docs_tables.py", "--root", tree, *words]
    done = run_process(*command)
    return done.returncode, done.stdout, done.stderr


def test_docs_tables_changes_nothing(clone, script, monkeypatch, capsys):
    path = REPOSITORY / "tools" / "docs_tables.py"
    spec = importlib.util.spec_from_file_location("docs_tables", path)
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    asked, run_anew = [], maker.run

    def run(command, root):
        asked.append(command)
        if command.startswith("python -c "):  # no script of the clone
            return run_anew(command, root)
        python, *words = shlex.split(command)
        assert (python, root) == ("python", clone)
        return script(*words).strip("\n") + "\n", ""

    monkeypatch.setattr(maker, "run", run)
    monkeypatch.setattr(sys, "argv", ["docs_tables.py", "--check", "--root", str(clone)])
    assert (maker.main(), capsys.readouterr().out) == (0, "")
    assert len(asked) > 50


def test_a_table_is_made_again(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{MADE}| a |\n|---|\n| 2 |\n<!-- end -->\nafter\n")
    line = f"page.md:3: {MADE.partition(': ')[2].replace(' -->', '')}"
    assert docs_tables(tmp_path, "--check") == (1, line, "")
    assert "| 2 |" in page.read_text()
    assert docs_tables(tmp_path) == (0, line, "")
    assert page.read_text() == f"before\n\n{MADE}{TABLE}<!-- end -->\nafter\n"
    assert docs_tables(tmp_path, "--check") == (0, "", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MADE + TABLE, "b.md:1: no line `<!-- end -->` follows"),
        (MADE + MADE + TABLE + "<!-- end -->\n", "b.md:1: `<!-- end -->` is missing"),
        ("<!-- made by: python lost.py -->\n<!-- end -->\n", "No such file"),
        ("<!-- made by: true -->\n<!-- end -->\n", "it printed nothing"),
    ],
)
def test_what_cannot_be_made_changes_no_page(tmp_path, text, said):
    before = {"a.md": MADE + "<!-- end -->\n", "b.md": text}
    for name, each in before.items():
        (tmp_path / name).write_text(each)
    status, printed, error = docs_tables(tmp_path)
    assert (status, printed, error.count("\n")) == (2, "", 1) and said in error
    assert {name: (tmp_path / name).read_text() for name in before} == before


def typed_tables(page):
    """Heads of the tables most of whose cells are figures, and that no command makes."""
    text = re.sub(MADE_BY_A_COMMAND, "", page.read_text())
    for head, rows in re.findall(r"(?m)^(\|.*)\n\|[-:| ]+\|\n((?:\|.*\n?)+)", text):
        cells = [c for row in rows.splitlines() for c in row.strip("|").split("|")[1:]]
        figures = sum(bool(re.match(r"[ *~<(+-]*\d", cell)) for cell in cells)
        if figures > len(cells) / 2:
            yield head


def test_no_table_of_figures_is_typed():
    pages = {*REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("logs/**/README.md")}
    pages -= {REPOSITORY / "logs" / "2026-11-21-cpu-tiny" / "README.md"}  # read off the screen then
    typed = [f"{page}: {head}" for page in pages for head in typed_tables(page)]
    assert [each for each in typed if not each.partition(": ")[2].startswith(TYPED)] == []


def commands():
    """Lines of the logs' fenced blocks that read what is committed."""
    blocks = (
        block for page in PAGES.values() for found, block in BLOCK.findall(page) if found == "sh"
    )
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_every_command_of_a_log_says_whether_it_measures():
    """And stands in a fence: no block is made by four spaces."""
    for name, page in PAGES.items():
        kinds = {kind for kind, _ in BLOCK.findall(page)}
        indented = re.findall(r"^\n {4}(\S.*)", BLOCK.sub("", page), re.MULTILINE)
        assert (kinds - {"sh", "sh measured", "text"}, indented) == (set(), []), name


def test_commands_of_logs_work_on_committed_files(clone, script):
    """They fail without those files, and write again what is there; pictures are not compared."""
    before = written(clone)
    for command in commands():
        words, _, target = command.partition(" > ")
        program, *words = shlex.split(words)
        if program.endswith("mlperf_bert"):
            assert main(words) == 0, command
        else:
            said = script(*words)
            assert program.endswith("python") and said, command
            if target:
                Path(target).write_text(said, encoding="utf-8")
    changed = [name for name, each in written(clone).items() if before.get(name) != each]
    assert commands() and changed == []


def written(tree):
    files = contents(tree / "logs").items()
    return {name: each for name, each in files if not name.endswith((".png", ".pyc"))}


def test_results_were_made_by_files_that_are_still_there():
    """Each event of a log names the file of the program that wrote it."""
    logs = sorted(REPOSITORY.glob("results/*/*/result_*.txt"))
    named = {event["metadata"]["file"] for log in logs for event in mlperf_records(log)}
    gone = [name for name in sorted(named) if not (PACKAGE.parent / name).is_file()]
    assert len(logs) >= 10 and named
    assert gone == [], "make the runs again with the program as it is (docs/records.md)"


def test_git_takes_whatever_a_study_writes():
    """`runs/` without a slash before it once left out the records of two studies."""
    folders = ("runs", "build", "dist", "results", "checkpoints", "data", ".cache")
    names = [f"logs/2026-01-01-study/{folder}/record.json" for folder in folders]
    command = ["git", "check-ignore", "--", *names]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.stdout == ""
