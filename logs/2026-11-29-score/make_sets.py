"""Write a text to train on and labelled sets to score with: `python make_sets.py DIR [EXAMPLES]`.

The text is the documentation in the library of this Python. Each docstring is either in DIR/text,
one file per module, or in the labelled sets, so that no encoder was trained on a labelled sentence.
Each set has at most EXAMPLES examples (default: 600). The same Python gives the same files.
"""

import ast
import json
import random
import sys
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mlperf_bert.files import make_directory, write_file
from mlperf_bert.prepare.corpus import SKIPPED_DIRECTORIES, prose_sentences
from mlperf_bert.prepare.documents import digest_of

LABELLED_SHARE = 0.4  # of the docstrings
FAMILIES = 6  # top-level packages that are told apart
LONGEST = 40  # words of a sentence in a set
Sentences = tuple[str, ...]


def docstrings(root: Path) -> Iterator[tuple[str, Sentences]]:
    """Yield the module and the sentences of each docstring below `root`, each text once."""
    seen = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_DIRECTORIES.intersection(parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old docstrings
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                sentences = prose_sentences(ast.get_docstring(node, clean=False) or "")
                if sentences and sentences not in seen:
                    seen.add(sentences)
                    yield ".".join(parts), sentences


def family_set(held_out: list[tuple[str, Sentences]], most: int) -> list[dict[str, object]]:
    """Return docstrings, labelled with their top-level package: which one does a text document?"""
    by_family = defaultdict(list)
    for module, sentences in held_out:
        by_family[module.partition(".")[0]].append(" ".join(sentences[:2]))
    largest = sorted(by_family, key=lambda name: (-len(by_family[name]), name))[:FAMILIES]
    each = most // FAMILIES
    return [{"text": text, "label": name} for name in largest for text in by_family[name][:each]]


def order_set(held_out: list[tuple[str, Sentences]], most: int) -> list[dict[str, object]]:
    """Return sentences, of which every second one has two neighbouring words swapped."""
    rng, rows = random.Random(1), []
    sentences = [each for _, found in held_out for each in found if len(each.split()) >= 8]
    for number, sentence in enumerate(rng.sample(sentences, min(most, len(sentences)))):
        words = sentence.split()[:LONGEST]
        if number % 2:
            place = rng.choice(
                [at for at in range(1, len(words) - 2) if words[at] != words[at + 1]]
            )
            words[place], words[place + 1] = words[place + 1], words[place]
        rows.append({"text": " ".join(words), "label": "swapped" if number % 2 else "as written"})
    return rows


def pair_set(held_out: list[tuple[str, Sentences]], most: int) -> list[dict[str, object]]:
    """Return pairs of sentences with a number.

    The number is 2 for neighbours in one docstring, 1 for sentences of two docstrings of one
    module, and 0 for sentences of two packages.
    """
    rng, rows = random.Random(2), []
    by_module = defaultdict(list)
    for module, sentences in held_out:
        by_module[module].append(sentences)
    several = [(module, each) for module, each in held_out if len(each) > 1]
    for number, (module, sentences) in enumerate(rng.sample(several, min(most, len(several)))):
        place, score = rng.randrange(len(sentences) - 1), 2 - number % 3
        second = sentences[place + 1]
        others = [each for each in by_module[module] if each != sentences]
        if score == 1 and others:
            second = rng.choice(rng.choice(others))
        elif score < 2:
            score, family = 0, module.partition(".")[0]
            far = [found for name, found in held_out if name.partition(".")[0] != family]
            second = rng.choice(rng.choice(far))
        rows.append({"text": sentences[place], "text_pair": second, "score": score})
    return rows


def main() -> None:
    """Write the files, and print what they contain."""
    out, most = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 600
    text, held_out = defaultdict(list), []
    for module, sentences in docstrings(Path(sysconfig.get_paths()["stdlib"])):
        if digest_of("\n".join(sentences)) < LABELLED_SHARE * 2**64:
            held_out.append((module, sentences))
        else:
            text[module].append("\n".join(sentences))
    make_directory(out / "text")
    for module, found in text.items():
        write_file(out / "text" / f"{module}.txt", ("\n".join(found) + "\n").encode())
    graded = pair_set(held_out, most)
    sets = {
        "family": family_set(held_out, most),
        "order": order_set(held_out, most),
        "same": [
            {**row, "label": "neighbours" if row["score"] == 2 else "strangers"}
            for row in graded
            if row["score"] != 1
        ],
        "graded": graded,
    }
    for name, rows in sets.items():
        write_file(out / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    num_bytes = sum(path.stat().st_size for path in (out / "text").iterdir())
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {version}: {len(text)} files of text with {num_bytes:,} bytes")
    print(*(f"{name}.jsonl: {len(rows)} examples" for name, rows in sets.items()), sep="\n")


if __name__ == "__main__":
    main()
