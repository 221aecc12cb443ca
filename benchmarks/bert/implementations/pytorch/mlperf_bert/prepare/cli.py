"""The sub-command `prepare`: which source is asked for, and that its options go with it.

Every source is a module of its own. Heavy imports wait until one runs.
"""

import argparse
from pathlib import Path
from typing import Protocol

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.prepare import (
    corpus_cli,
    embedded_cli,
    import_cli,
    mlcommons_cli,
    source_options,
    text_cli,
)


class SourceModule(Protocol):
    """What a module must have to be a source of `prepare`."""

    def add_arguments(
        self, parser: argparse.ArgumentParser, source: argparse._ActionsContainer
    ) -> None:
        """Add what chooses the source to `source`, and options of its own to `parser`.

        An option that is not given must be None, False or [], so that `run` sees it.
        """

    def run(self, args: argparse.Namespace) -> int:
        """Prepare; the exit status."""


# The argument that chooses a source -> its module, and the options that go with it.
_SOURCES: dict[str, tuple[SourceModule, tuple[str, ...]]] = {
    "text": (
        text_cli,
        (*source_options.OF_EXAMPLES, "workers", "pick_eval", "split_sentences"),
    ),
    "corpus": (
        corpus_cli,
        (*source_options.OF_EXAMPLES, "workers", *corpus_cli.OPTIONS),
    ),
    "mlcommons": (mlcommons_cli, mlcommons_cli.OPTIONS),
    "tfrecord": (import_cli, import_cli.OPTIONS),
    "hdf5": (import_cli, import_cli.OPTIONS),
    "embedded": (embedded_cli, ("config", "set", "seed")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prepare`."""
    source = parser.add_mutually_exclusive_group(required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    source_options.add_arguments(parser)
    for module in dict.fromkeys(module for module, _ in _SOURCES.values()):
        module.add_arguments(parser, source)


def run(args: argparse.Namespace) -> int:
    """Run `prepare`. Raises ConfigError or DataError for what the user can mend."""
    name = next(name for name in _SOURCES if _is_given(args, name))
    module, takes = _SOURCES[name]
    for option in sorted({option for _, options in _SOURCES.values() for option in options}):
        if option not in takes and _is_given(args, option):
            problem = f"does not go with {_spelled(name)}"
            raise ConfigError(_spelled(option), problem, "leave it out")
    return module.run(args)


def _is_given(args: argparse.Namespace, name: str) -> bool:
    value = getattr(args, name)
    return not (value is None or value is False or value == [])


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
