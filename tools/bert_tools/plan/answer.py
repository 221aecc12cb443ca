"""The answer to a `plan` question: facts for --json, lines for people, pictures."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.common.figures import check_picture, png
from mlperf_bert.errors import ConfigError, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pictures = Mapping[Path, "Callable[[], Figure]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """`facts` go to --json; `lines` are made only when printed; `end` is printed last."""

    facts: Mapping[str, Any]
    lines: Iterable[str]
    pictures: Pictures = field(default_factory=dict)
    end: str = ""


def show(answer: Answer, as_json: bool) -> None:
    """Print the answer, then draw it, so that a failing picture does not lose the results."""
    from mlperf_bert.files import write_file

    facts = {"schema_version": 1, **answer.facts}
    print(json.dumps(facts, allow_nan=False) if as_json else "\n".join(answer.lines), flush=True)
    for path, draw in answer.pictures.items():
        write_file(path, png(draw()))
    if answer.end and not as_json:
        print(one_line(answer.end))


def asked_picture(args: argparse.Namespace) -> tuple[Path | None, str]:
    """The picture of --out, whose path is tried before minutes are spent, and the line about it.

    Raises ConfigError or DataError if it cannot be written.
    """
    if args.out is None:
        return None, ""
    return check_picture(args.out), f"picture: {args.out}"


def check_least(option: str, value: int, least: int) -> None:
    """Raise ConfigError for a number below `least`."""
    if value < least:
        raise ConfigError(option, f"is {value}", f"set it to {least} at least")
