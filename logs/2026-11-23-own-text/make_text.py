"""Write a real text of 142 Markdown files, about 1.5 MB: `python make_text.py DIR`.

Each file is one module of this Python's standard library: a heading for the module and for each
documented class and function, and below each heading its docstring as it stands, with its lists,
tables and examples. The 142 modules are those with the most of it. One Python version gives one
text; the last line is its digest.
"""

import ast
import hashlib
import os
import sys
import sysconfig
import warnings
from pathlib import Path

NUM_FILES = 142
# Other people's packages, and programs and data that document nothing.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
SKIPPED |= {"pydoc_data", "_bundled", "encodings", "__pycache__"}

Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def page(path: Path, name: str) -> str:
    """A module's headings and docstrings; empty where it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old docstrings
        tree = ast.parse(path.read_bytes())
    parts = [f"# {name}", ast.get_docstring(tree) or ""]

    def add(node: ast.AST, prefix: str, marks: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Documented):
                text = ast.get_docstring(child)
                parts.extend([f"{marks} {prefix}{child.name}", text] if text else [])
                add(child, f"{prefix}{child.name}.", marks + "#")

    add(tree, "", "##")
    text = "\n\n".join(part for part in parts if part) + "\n"
    return text if len(parts) > 2 or parts[1] else ""


def pages(root: Path) -> dict[str, str]:
    """The page of every module below `root` that can be read, by the module's name."""
    found = {}
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED]
        for path in (Path(directory) / name for name in names if name.endswith(".py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            try:
                found[module] = page(path, module.removesuffix(".__init__"))
            except (SyntaxError, ValueError):
                continue  # no module of this Python
    return found


def main() -> None:
    """Write the files and print what they are."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True)
    found = pages(Path(sysconfig.get_paths()["stdlib"]))
    # By length, and of one length by name.
    chosen = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))[:NUM_FILES]
    digest, num_bytes = hashlib.sha256(), 0
    for module, text in sorted(chosen):
        contents = text.encode("utf-8", "backslashreplace")
        (out / f"{module.removesuffix('.__init__')}.md").write_bytes(contents)
        digest.update(contents)
        num_bytes += len(contents)
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"{len(chosen)} files, {num_bytes:,} bytes of Python {version}: {digest.hexdigest()[:16]}"
    )


if __name__ == "__main__":
    main()
