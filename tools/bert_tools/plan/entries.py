"""MLPerf results as the scale-out law sees them: the published table, and `--filter`."""

import csv
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from mlperf_bert.errors import ConfigError

KEYS = (
    *("round", "submitter", "division", "accelerator", "system"),
    *("accelerators", "global_batch_size", "time_min", "samples"),
)
FILTER_HELP = (
    "keep entries that meet it, such as round=2.1, submitter=NVIDIA, accelerator~A100 or "
    f"accelerators>=64; may be repeated, all must hold. KEY: {', '.join(KEYS)}; = compares (case "
    "is ignored), ~ looks for the text, >= and <= compare numbers, rounds too"
)
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(>=|<=|=|~)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One system's result; None or empty text where its source does not give a value.

    `time_min` is the olympic mean of its runs in minutes, `samples` the mean number of sequences
    a run trained on, `seq_per_s` the mean of samples over time of a run, evaluation included.
    """

    system: str
    accelerators: int | None
    time_min: float | None
    samples: float | None
    seq_per_s: float | None
    round: str = ""
    submitter: str = ""
    division: str = ""
    accelerator: str = ""
    global_batch_size: int | None = None

    @property
    def name(self) -> str:
        """The entry's name in tables and messages."""
        return " ".join(filter(None, (self.round, self.submitter, self.system)))


def published_entries() -> list[Entry]:
    """The shipped table: MLPerf Training BERT, v0.7 to v5.0, 348 entries."""
    text = resources.files(__package__).joinpath("published_results.csv").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [_published(row) for row in csv.DictReader(lines)]


def _published(row: Mapping[str, str]) -> Entry:
    millions = _number(row["samples_million"])
    return Entry(
        system=row["system"],
        accelerators=int(row["accelerators"]) if row["accelerators"] else None,
        time_min=_number(row["time_min"]),
        samples=None if millions is None else millions * 1e6,
        seq_per_s=_number(row["seq_per_s"]),
        round=row["round"],
        submitter=row["submitter"],
        division=row["division"],
        accelerator=row["accelerator"],
        global_batch_size=int(row["global_batch"]) if row["global_batch"] else None,
    )


def chosen(entries: Sequence[Entry], conditions: Sequence[str]) -> list[Entry]:
    """The entries that meet all conditions. Raises ConfigError for one that cannot be read."""
    tests = [_test(condition) for condition in conditions]
    return [entry for entry in entries if all(test(entry) for test in tests)]


def _test(condition: str) -> Callable[[Entry], bool]:
    match = _CONDITION.fullmatch(condition)
    if match is None or match[1] not in KEYS:
        remedy = f"write it as accelerator~A100, with one of {', '.join(KEYS)}"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)
    key, sign, wanted = match.groups()
    text, limit = wanted.casefold(), _number(wanted)
    if sign in (">=", "<=") and limit is None:
        remedy = f"give a number after {sign}, as {key}{sign}64"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)

    def meets(entry: Entry) -> bool:
        value = str(getattr(entry, key)).casefold()
        if sign == "~":
            return text in value
        number = _number(value)
        if number is None or limit is None:
            return sign == "=" and value == text
        return _COMPARE[sign](number, limit)

    return meets


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
