"""What a parser brings along to be fuzzed: a valid world, what of it is hostile, how it is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fuzz_mutations import Mutation


def nothing(_directory: Path, _target: str) -> None:
    """Leave the world as it was mutated."""


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
    repair: Callable[[Path, str], None] = nothing
    optional: tuple[str, ...] = ()
    inputs: int = 100_000
