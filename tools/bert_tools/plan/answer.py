"""What every question gives: facts for --json, lines for people, pictures; and how it is shown."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.common.figures import check_picture, png
from mlperf_bert.common.errors import ConfigError, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pictures = Mapping[Path, "Callable[[], Figure]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """`facts` are those of --json; `lines` are made where they are printed; `end` goes last."""

    facts: Mapping[str, Any]
    lines: Iterable[str]
    pictures: Pictures = field(default_factory=dict)
    end: str = ""


def show(answer: Answer, as_json: bool) -> None:
    """Print it, then draw: where a picture fails, what was reckoned is not lost."""
    from mlperf_bert.common.atomic import write_file

    facts = {"schema_version": 1, **answer.facts}
    print(json.dumps(facts, allow_nan=False) if as_json else "\n".join(answer.lines), flush=True)
    for path, draw in answer.pictures.items():
        write_file(path, png(draw()))
    if answer.end and not as_json:
        print(one_line(answer.end))


def asked_picture(args: argparse.Namespace, default: str) -> Path | None:
    """Where --out wants it, tried before minutes are spent; None under --no-plot. ConfigError."""
    return None if args.no_plot else check_picture(args.out or Path(default))


def picture_line(picture: Path | None) -> str:
    """The last line of a question that draws unless told otherwise."""
    return f"picture: {picture}" if picture else "no picture was asked for"


def check_least(option: str, value: int, least: int) -> None:
    """Raise ConfigError for a number below that."""
    if value < least:
        raise ConfigError(option, f"is {value}", f"set it to {least} at least")
