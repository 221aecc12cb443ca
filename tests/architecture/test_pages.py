"""Pages for readers: every link, path, make target, test and commit on them is there."""

import re
import subprocess

import pytest

from support import REPOSITORY

DOCS = REPOSITORY / "docs"
PACKAGES = [REPOSITORY / "benchmarks/bert/implementations/pytorch", REPOSITORY / "tools"]
FRONT = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    PACKAGES[0] / "README.md",
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FILE = re.compile(r"`([\w/.]+/[\w.]+\.(?:py|sh|toml|md))`")

KINDS = ("guides", "concepts", "reference")
TESTS = REPOSITORY / "tests"
DOCUMENTS = sorted([*(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("*.md")])
FOLDERS = sorted(path.name for path in TESTS.iterdir() if path.is_dir())
# `unit/test_x.py`, `test_x.py`, `tests/unit`, `unit/package`; a bare `unit` is a plain word.
NAMED = re.compile(rf"(?:tests/)?((?:[\w/]+/)?test_\w+\.py|(?:{'|'.join(FOLDERS)})/[\w/]+)")


def pages():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=REPOSITORY, capture_output=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (REPOSITORY / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.exists()]


def anchors(page):
    """Heading names as a web view of the repository makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", each)).lower() for each in headings
    )
    return {each.replace(" ", "-") for each in plain}


def test_every_link_leads_somewhere():
    wrong = []
    for page in pages():
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            place = (page.parent / target).resolve() if target else page
            if not place.exists():
                wrong.append(f"{page}: {target}")
            elif anchor and place.suffix == ".md" and anchor not in anchors(place):
                wrong.append(f"{page}: {target}#{anchor}")
    assert wrong == []


def test_lines_of_the_program_that_the_reviewers_page_shows_are_its_lines():
    page = (PACKAGES[0] / "README.md").read_text("utf-8")
    (table,) = re.findall(r"^\| question \| answer \| line \|\n\|---.*\n((?:\|.*\n)+)", page, re.M)
    shown = [row.rsplit("|", 2)[1].strip().strip("`") for row in table.splitlines()]
    program = (PACKAGES[0] / "mlperf_bert/train.py").read_text("utf-8")
    assert len(shown) == 8
    assert [line for line in shown if program.count(f" {line}") != 1] == []


def test_every_page_is_found_from_the_index():
    index = DOCS / "index.md"
    linked = {(DOCS / target).resolve() for target, _ in LINK.findall(index.read_text("utf-8"))}
    pages = [page for kind in KINDS for page in DOCS.glob(f"{kind}/*.md")]
    assert {page.parent.name for page in pages} == set(KINDS)
    assert [page for page in pages if page.resolve() not in linked] == []


def test_files_and_make_targets_that_front_pages_name_are_there():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    roots = [REPOSITORY, *PACKAGES, *(root / "mlperf_bert" for root in PACKAGES[:1])]
    found = 0
    for page in FRONT:
        text = page.read_text(encoding="utf-8")
        for name in FILE.findall(text):
            found += 1
            assert any((root / name).exists() for root in roots), f"{page.name}: {name}"
        for target in re.findall(r"\bmake ([a-z][\w-]+)", text):
            found += 1
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
    assert found > 30


def named_tests(document):
    """Paths below `tests` that stand in backticks, in a command or alone."""
    for quoted in re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8")):
        for word in quoted.split():
            if match := NAMED.fullmatch(word):
                yield match[1]


def is_there(name):
    return (TESTS / name).exists() if "/" in name else any(TESTS.rglob(name))


def test_every_test_that_a_document_names_exists():
    found = set()
    for document in DOCUMENTS:
        names = list(named_tests(document))
        assert [name for name in names if not is_there(name)] == [], document
        found.update(names)
    assert {"reliability/test_kills.py", "unit/checkpoint/test_resume.py"} <= found
    assert {"test_files.py", "test_readme.py"} <= found and len(found) > 20


def test_commits_that_pages_and_logs_name_exist():
    def git(*words, text=""):
        command = ["git", "-C", str(REPOSITORY), *words]
        return subprocess.run(command, input=text, capture_output=True, text=True).stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no history, or a part of it")
    pages = git("grep", "-hoE", r"\b[0-9a-f]{7}\b", "--", "*.md").split()
    logs = re.findall(
        r'"commit": "([0-9a-f]{7,40})\+?"', git("grep", "-h", '"commit"', "--", "*.json*")
    )
    named = {name for name in (*pages, *logs) if not name.isdigit() and not name.isalpha()}
    found = git("cat-file", "--batch-check", text="\n".join(sorted(named))).splitlines()
    assert len(found) == len(named) > 20
    assert [line for line in found if " commit " not in line] == []
