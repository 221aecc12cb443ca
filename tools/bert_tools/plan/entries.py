"""One MLPerf result as the scale-out law sees it, and the words that `--filter` chooses by."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlperf_bert.common.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One system's result. None, or empty text, where its source does not say.

    `time_min` is the olympic mean of its runs in minutes, `samples` the mean of the sequences that
    a run trained on, `seq_per_s` the mean of a run's samples over its time, evaluation included.
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
    failed_runs: int = 0
    runs: int | None = None

    @property
    def name(self) -> str:
        """As the tables and messages call it."""
        return " ".join(filter(None, (self.round, self.submitter, self.system)))


@dataclass(frozen=True, slots=True)
class Skipped:
    """What could not be used, and why."""

    name: str
    problem: str


TEXT_KEYS = ("round", "submitter", "division", "accelerator", "system")
NUMBER_KEYS = ("accelerators", "global_batch_size", "time_min", "samples", "failed_runs")
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(>=|<=|!=|=|~|>|<)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}
FILTER_HELP = (
    "keep entries that meet it, as round=2.1, submitter=NVIDIA, accelerator~A100 or "
    "accelerators>=64; may be repeated, all must hold. KEY: "
    f"{', '.join((*TEXT_KEYS, *NUMBER_KEYS))}; = and != compare (letters' case does not matter), "
    "~ looks for the text, >= <= > < compare numbers, rounds too"
)


def chosen(entries: Sequence[Entry], conditions: Sequence[str]) -> list[Entry]:
    """The entries that meet all conditions. Raises ConfigError for one that cannot be read."""
    tests = [_test(condition) for condition in conditions]
    return [entry for entry in entries if all(test(entry) for test in tests)]


def _test(condition: str) -> Callable[[Entry], bool]:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        remedy = "write it as round=2.1, accelerator~A100 or accelerators>=64"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)
    key, sign, wanted = match.groups()
    if key not in (*TEXT_KEYS, *NUMBER_KEYS):
        known = ", ".join((*TEXT_KEYS, *NUMBER_KEYS))
        raise ConfigError("--filter", f"{key!r} is no key", f"use one of {known}")
    by_number = key in NUMBER_KEYS or (key == "round" and sign in (">=", "<=", ">", "<"))
    if by_number:
        return _number_test(condition, key, sign, wanted)
    return _text_test(condition, key, sign, wanted)


def _number_test(condition: str, key: str, sign: str, wanted: str) -> Callable[[Entry], bool]:
    limit, compare = _number(wanted), _COMPARE.get(sign)
    if limit is None or compare is None:
        remedy = f"give a number after =, !=, >=, <=, > or <, as {key}>=64"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)

    def meets(entry: Entry) -> bool:
        value = getattr(entry, key)
        number = _number(value) if isinstance(value, str) else value
        return number is not None and compare(number, limit)

    return meets


def _text_test(condition: str, key: str, sign: str, wanted: str) -> Callable[[Entry], bool]:
    text = wanted.casefold()
    if sign == "~":
        return lambda entry: text in getattr(entry, key).casefold()
    if sign == "=":
        return lambda entry: getattr(entry, key).casefold() == text
    if sign == "!=":
        return lambda entry: getattr(entry, key).casefold() != text
    problem = f"{condition!r} compares {key}, which is no number"
    raise ConfigError("--filter", problem, "use =, != or ~ with it")


def _number(text: str) -> float | None:
    """A plain number of at most 15 digits, else None."""
    return float(text) if re.fullmatch(r"\d{1,15}(\.\d{1,15})?", text, re.ASCII) else None
