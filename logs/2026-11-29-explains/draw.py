"""Draw sixty sentences, docstrings and messages of the project: `draw.py SEED > drawn.md`.

SEED is a commit's hash, so that nobody chooses what is judged. Sentences are those of the pages for
readers, without code, generated blocks and table heads. Messages are literals of at least four
words that an error, a printed line or a help text consists of.
"""

import ast
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COUNT = 60
PAGES = ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/guides", "docs/concepts")
PAGES += ("docs/reference", "benchmarks/bert", "systems/README.md")
SPEAKERS = {"ConfigError", "DataError", "CheckpointError", "UserError", "LostRanksError", "print"}
SPEAKERS |= {"say", "line", "add_argument", "describe", "add_command"}
NAMES = ("problem", "remedy", "text", "words")


def tracked(*patterns: str) -> list[Path]:
    """Paths that git knows."""
    command = ["git", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return [REPOSITORY / name for name in listed.stdout.split("\0") if name]


def sentences() -> Iterator[tuple[str, str]]:
    """Sentences and table cells of the pages for readers, of at least four words."""
    for page in tracked(*PAGES):
        if page.suffix != ".md":
            continue
        text = page.read_text()
        text = re.sub(r"(?s)```.*?```|<!-- made.*?<!-- end -->|<!--.*?-->", "\n\n", text)
        text = re.sub(r"(?m)^\|.*\n(?=\|[-:| ]+\|$)|^\|[-:| ]+\|$", "", text)
        for block in re.split(r"\n\s*\n|\n(?=[-|#!]|\d+\. )", text):
            cells = block.strip().strip("|").split(" | ") if block.startswith("|") else [block]
            for cell in cells:
                flat = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", " ".join(cell.split()))
                flat = re.sub(r"^[-#\d. ]+", "", flat)
                for each in re.split(r"(?<=[.!?])\s+(?=[A-Z`*])", flat):
                    if len(re.findall(r"[A-Za-z]{2,}", each)) >= 4:
                        yield str(page.relative_to(REPOSITORY)), each


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the program."""
    for path in tracked("benchmarks/*.py", "tools/*.py"):
        yield str(path.relative_to(REPOSITORY)), ast.parse(path.read_text())


def docstrings() -> Iterator[tuple[str, str]]:
    """Docstrings of modules, classes and functions, private ones too."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{path}: {getattr(node, 'name', 'module')}", text


def messages() -> Iterator[tuple[str, str]]:
    """Literals that a user sees."""
    for path, tree in trees():
        for node in ast.walk(tree):
            values: list[ast.expr] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in SPEAKERS:
                    values = [*node.args, *(each.value for each in node.keywords)]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in NAMES:
                values = [node.value]
            for value in values:
                text = literal(value)
                if len(re.findall(r"[A-Za-z]{2,}", text)) >= 4:
                    yield f"{path}:{value.lineno}", text


def literal(value: ast.expr) -> str:
    """The text of a string or an f-string, with `{}` for each value."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else ""
    if isinstance(value, ast.JoinedStr):
        return "".join(
            literal(each) if isinstance(each, ast.Constant) else "{}" for each in value.values
        )
    return ""


def main(seed: str) -> None:
    """Print the draws."""
    for name, source in (
        ("Sentences", sentences),
        ("Docstrings", docstrings),
        ("Messages", messages),
    ):
        every = sorted(set(source()))
        print(f"## {name}\n\n{COUNT} of {len(every):,}, drawn by {seed}.\n")
        for number, (where, text) in enumerate(
            random.Random(f"{seed} {name}").sample(every, COUNT), 1
        ):
            print(f"{number}. `{where}`: {' '.join(text.split())}")
        print()


if __name__ == "__main__":
    main(sys.argv[1])
