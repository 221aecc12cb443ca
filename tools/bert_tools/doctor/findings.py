"""What a check of `doctor` found."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
_NAME_WIDTH = 23


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `name` is the check's, or `<check>.<part>`.

    `remedy` is empty where the status is `ok`.
    """

    status: Status
    name: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """The finding as a line for people."""
        text = f"{self.status:<4}  {self.name:<{_NAME_WIDTH}}  {' '.join(self.found.split())}"
        return text + (f"; {self.remedy}" if self.remedy else "")


def ok(name: str, found: str) -> Finding:
    """A finding that all is well."""
    return Finding("ok", name, found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """A finding with which training runs, but slower or with less."""
    return Finding("warn", name, found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    """A finding with which training does not run, or not correctly."""
    return Finding("fail", name, found, remedy)
