"""The mutation test finds what the tests find, and no more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mutate

REPOSITORY = Path(__file__).parents[2]
PROGRAM = '''"""Two functions."""


def less(number: int) -> int:
    """The number before; prints what it got."""
    print(number)
    return number - 1


def square(number: int) -> int:
    """The number times itself."""
    return number * number
'''
FOLDER_TEST = """import subprocess
from pathlib import Path

import pytest

from mlperf_bert.data.numbers import less


@pytest.mark.parametrize("name", ["a - b"])
def test_first_run(name):
    turn = Path(__file__).parents[4] / f"turn of {name}"
    has_run = turn.exists()
    turn.touch()
    assert has_run


def test_that_always_fails():
    assert False


def test_less():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)  # which nobody ends
    assert less(4) == 3
"""
SHORTEST_TEST = "def test_nothing():\n    pass\n"
OTHER_TEST = """from mlperf_bert.data.numbers import square


def test_square():
    assert square(4) == 16
"""


@pytest.fixture
def tree(tmp_path):
    """A committed tree with one module of the program, a test of its folder, and another."""
    root = tmp_path / "tree"
    files = {
        "benchmarks/bert/implementations/pytorch/mlperf_bert/__init__.py": "",
        "benchmarks/bert/implementations/pytorch/mlperf_bert/data/__init__.py": "",
        "benchmarks/bert/implementations/pytorch/mlperf_bert/data/numbers.py": PROGRAM,
        "tests/unit/data/test_numbers.py": FOLDER_TEST,
        "tests/unit/data/test_shortest.py": SHORTEST_TEST,
        "tests/distributed/test_square.py": OTHER_TEST,
        ".gitignore": ".cache\n__pycache__\n",
    }
    root.mkdir()
    subprocess.run(["git", "-C", str(root), "init", "-q"], check=True)
    commit(root, files)
    return root


def commit(root, files):
    """Write these files below `root` and commit them."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    run = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["add", "."], ["commit", "-q", "-m", "A tree"]):
        subprocess.run([*run, *words], check=True)


def score(root, *options):
    command = [sys.executable, str(REPOSITORY / "tools/mutate.py"), "--root", str(root), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_every_fault_can_be_planted():
    found = mutate.faults_of("numbers.py", PROGRAM.encode())
    planted = {
        (PROGRAM.encode()[: fault.start] + fault.after.encode() + PROGRAM.encode()[fault.end :])
        for fault in found
    }
    assert len(planted) == len(found) == len({fault.key for fault in found}) == 4
    for text in planted:
        compile(text, "numbers.py", "exec")
    assert [(fault.kind, fault.before, fault.after) for fault in found] == [
        ("call left out", "print(number)", "pass"),
        ("arithmetic", "number - 1", "(number + 1)"),
        ("number", "1", "(2)"),
        ("arithmetic", "number * number", "(number / number)"),
    ]


def test_the_draw_follows_its_seed(tree):
    assert mutate.draw(tree, 2, "a") == mutate.draw(tree, 2, "a")
    assert any(mutate.draw(tree, 2, "a") != mutate.draw(tree, 2, seed) for seed in "bcd")
    assert len(mutate.draw(tree, 100, "a")) == 4


@pytest.mark.longest
def test_faults_are_found_by_the_folder_and_by_others(tree):
    # Tests that always fail, or fail once, find nothing; what a test leaves running is ended.
    journal = tree / ".cache/journal.jsonl"
    printed = score(tree, "--journal", str(journal))
    records = {record["before"]: record for record in map(json.loads, journal.open())}
    assert records["number - 1"]["found_by"] == "tests/unit/data/test_numbers.py::test_less"
    assert {before: record["among"] for before, record in records.items()} == {
        "print(number)": None,
        "number - 1": "folder",
        "1": "folder",
        "number * number": "others",
    }
    assert "numbers.py:6 call left out: 'print(number)'" in printed[-3]
    assert printed[-1] == "75.0"
    # What is done is not done again, and a line that a stop cut off is.
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]) + lines[-1][:20], encoding="utf-8")
    again = score(tree, "--journal", str(journal))
    assert again[0].startswith("1/1, ")
    assert again[1:] == printed[-3:]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"tests/conftest.py": "import no_such_module\n"},
            "pytest cannot run tests/unit/data/test_shortest.py on the unchanged tree (exit status "
            "4: E   ModuleNotFoundError: No module named 'no_such_module'); fix that first",
        ),
        (
            {"tests/unit/data/test_shortest.py": SHORTEST_TEST.replace("pass", "1 / 0")},
            "the outcome of tests/unit/data/test_shortest.py::test_nothing on the unchanged tree",
        ),
    ],
    ids=["broken conftest", "a test that fails"],
)
def test_no_fault_is_tried_if_the_tests_cannot_run(tree, monkeypatch, capsys, files, words):
    commit(tree, files)
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--root", str(tree), "--jobs", "1"])
    assert mutate.main() == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"mutate.py: error: {words}")
    assert printed.err.count("\n") == 1 and printed.out == ""


def copy_with(tree, directory, folder_test):
    """A copy of the tree with another test of the folder, and a fault of that folder."""
    commit(tree, {"tests/unit/data/test_numbers.py": folder_test})
    path = "benchmarks/bert/implementations/pytorch/mlperf_bert/data/numbers.py"
    faults = {each.before: each for each in mutate.faults_of(path, PROGRAM.encode())}
    return mutate.Copy(tree, "HEAD", directory), faults["number - 1"]


def test_a_test_file_that_cannot_be_imported_is_an_error(tree, tmp_path):
    copy, fault = copy_with(tree, tmp_path / "copy", "import no_such_module\n")
    with pytest.raises(mutate.HarnessError, match=r"test_numbers\.py .*exit status 2: ERROR"):
        copy.find(fault)


@pytest.mark.longest
def test_a_fault_that_crashes_python_is_found(tree, tmp_path):
    test = "import os\nfrom mlperf_bert.data.numbers import less\n\ndef test_less():\n"
    copy, fault = copy_with(tree, tmp_path / "copy", test + "    less(4) == 3 or os.abort()\n")
    assert copy.find(fault) == {"found_by": "crash of Python", "among": "folder"}


def test_what_cannot_be_scored_is_refused(tree, monkeypatch, capsys):
    journal = tree / ".cache/journal.jsonl"
    journal.parent.mkdir()
    journal.write_text('{"key": "a", "tree": "b"}\n', encoding="utf-8")
    words = ["mutate.py", "--root", str(tree), "--journal", str(journal)]
    monkeypatch.setattr(sys, "argv", words)
    assert mutate.main() == 2
    assert "journal.jsonl: belongs to another tree; pass another" in capsys.readouterr().err
    (tree / "tests/unit/data/test_numbers.py").write_text("", encoding="utf-8")
    assert mutate.main() == 2
    assert f"{tree}: has uncommitted changes; commit them first" in capsys.readouterr().err
