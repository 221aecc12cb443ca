"""A parser and its world: tries one hostile input after the other, and knows what may happen."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz_mutations import Mutation

from mlperf_bert.common.errors import UserError

MOST_OF_A_MESSAGE = 4000  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Parser:
    """One reader of files that anybody may have written.

    Args:
        make: writes a valid world into a directory.
        targets: file of that world -> how it is mutated.
        parse: reads the world; only UserErrors may come out.
        repair: makes digests right again after a file was changed, so that what is behind their
            check is reached; called for half of the inputs.
        optional: targets that need not be there.
        inputs: how many `make test-slow` tries.
    """

    make: Callable[[Path], None]
    targets: Mapping[str, Mutation]
    parse: Callable[[Path], object]
    repair: Callable[[Path, str], None] = lambda directory, target: None
    optional: tuple[str, ...] = ()
    inputs: int = 100_000


def files(contents: Mapping[str, str | bytes]) -> Callable[[Path], None]:
    """A `make` that writes these."""

    def make(directory: Path) -> None:
        for name, text in contents.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode() if isinstance(text, str) else text)

    return make


class World:
    """A parser's valid files in a directory; after every input they are as they were."""

    def __init__(self, parser: Parser, directory: Path) -> None:
        self.parser = parser
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        parser.make(directory)
        self.valid = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        parser.parse(directory)  # what is valid must be accepted

    def try_input(self, batch: int, drawn: int | bytes) -> bool:
        """Whether what Hypothesis drew is accepted: the seed of a mutation, or a whole file."""
        if isinstance(drawn, int):
            return self.mutated((batch, drawn))
        targets = list(self.parser.targets)
        return self.accepts(targets[len(drawn) % len(targets)], drawn)

    def mutated(self, seed: object) -> bool:
        """Try the input that a seed stands for; whether it was accepted."""
        rng = Random(repr(seed))
        target = rng.choice(list(self.parser.targets))
        contents = self.valid[self.directory / target]
        changed = self.parser.targets[target](rng, contents)
        return self.accepts(target, changed, repaired=rng.random() < 0.5)

    def accepts(self, target: str, contents: bytes, *, repaired: bool = False) -> bool:
        """Whether the parser accepts these contents of a file; raises where it fails otherwise."""
        path = self.directory / target
        path.write_bytes(contents)
        try:
            if repaired:
                self.parser.repair(self.directory, target)
            return self.is_accepted()
        finally:
            self._restore(path, repaired)

    def is_accepted(self) -> bool:
        """Whether the parser accepts the world as it is now. A refusal must be one clean line."""
        try:
            self.parser.parse(self.directory)
        except UserError as error:
            message = str(error)
            assert message.isprintable(), ascii(message)
            assert len(message) <= MOST_OF_A_MESSAGE, len(message)
            return False
        return True

    def replaced(self, target: str, kind: str) -> bool:
        """As `accepts`, with something that is no file, or none at all, in the file's place."""
        path = self.directory / target
        path.unlink()
        try:
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "directory":
                path.mkdir()
            elif kind == "device":
                path.symlink_to("/dev/zero")
            elif kind == "loop":
                path.symlink_to(path)
            return self.is_accepted()
        finally:
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            path.write_bytes(self.valid[path])

    def _restore(self, path: Path, repaired: bool) -> None:
        for changed in self.valid if repaired else (path,):
            changed.write_bytes(self.valid[changed])
