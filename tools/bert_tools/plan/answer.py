"""What every question gives: facts for --json, lines for people, pictures; and how it is shown."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.common.figures import check_picture, new_figure, png
from mlperf_bert.common.errors import ConfigError, one_line, say

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


def asked_picture(args: argparse.Namespace, default: str) -> tuple[Path | None, str]:
    """Where --out or the default wants it, tried before minutes are spent; and what to say of it.

    Raises ConfigError or DataError where it cannot be written; one that nobody has asked for by
    --out is left out where matplotlib is missing.
    """
    if args.no_plot:
        return None, "no picture was asked for"
    try:
        new_figure(1, 1)
    except ConfigError as error:
        if args.out:
            raise
        where, _, remedy = error.args
        left_out = f"picture: left out, as {where} is not installed; {remedy}, or add --no-plot"
        if args.json:
            say(left_out)
        return None, left_out
    picture = check_picture(args.out or Path(default))
    return picture, f"picture: {picture}"


def check_least(option: str, value: int, least: int) -> None:
    """Raise ConfigError for a number below that."""
    if value < least:
        raise ConfigError(option, f"is {value}", f"set it to {least} at least")
