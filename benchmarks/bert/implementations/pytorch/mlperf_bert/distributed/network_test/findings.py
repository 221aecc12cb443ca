"""What a check is asked, and what it found: one line, or one JSON object, each."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mlperf_bert.common.errors import ConfigError, UserError
from mlperf_bert.config.run_config import RunConfig

SCHEMA_VERSION = 1
EXIT_REFUSED = 1  # something fails: for schedulers
Status = Literal["ok", "warn", "fail"]
DeviceName = Literal["auto", "cpu", "cuda"]
_NAME_WIDTH = 23
NETWORK = "network"  # the check that all ranks make together


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """`config` and `data` are those of the run to come, where they were given.

    `timeout_s`: for one check, and for a rank to come. `command`: the words that say the same to
    another process of this command. Raises ConfigError for a `timeout_s` that is no time.
    """

    config: RunConfig | None = None
    data: Path | None = None
    device: DeviceName = "auto"
    timeout_s: float = 60.0
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= 3600:  # nor nan
            raise ConfigError("--timeout", f"is {self.timeout_s:g}", "give seconds, up to 3600")

    @property
    def wanted_device(self) -> DeviceName:
        """The config's device unless --device says otherwise."""
        if self.device == "auto" and self.config is not None:
            return self.config.run.device
        return self.device

    @property
    def share_gpu(self) -> Literal["refuse", "allow"]:
        """Whether ranks may share GPUs: as the config says.

        Without one nobody knows what is to run, and half of `mpi_readers`' processes use none.
        """
        if self.config is None or self.config.data.loader == "mpi_readers":
            return "allow"
        return self.config.parallel.share_gpu


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `name` is the check's, or `<check>.<part>`.

    `remedy` is empty where the status is `ok`.
    """

    status: Status
    name: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """For people."""
        text = f"{self.status:<4}  {self.name:<{_NAME_WIDTH}}  {_one_line(self.found)}"
        return text + (f"; {_one_line(self.remedy)}" if self.remedy else "")


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding("ok", name, found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """Training runs, slower or with less than there could be."""
    return Finding("warn", name, found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    """Training does not run, or not rightly."""
    return Finding("fail", name, found, remedy)


def examined(name: str, check: Callable[[], Sequence[Finding]], limit_s: float) -> list[Finding]:
    """What `check` finds; where it raises, or does not end within `limit_s`, that is what it found.

    It runs in a thread of its own, which is left behind when it hangs: a file system that does not
    answer must not keep the other checks from being made.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(check())
        except UserError as error:
            where, problem, remedy = error.args
            found.append(fail(name, f"{where}: {problem}", remedy))
        except Exception as error:
            found.append(fail(name, in_short(error), "mend that, or leave the check out (--only)"))

    thread = threading.Thread(target=run, name=f"check {name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        remedy = "look for a device, disk or network that hangs, or allow more by --timeout"
        return [fail(name, f"did not end within {limit_s:g} s", remedy)]
    return found


def in_short(error: BaseException) -> str:
    """An exception as one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


def exit_status(findings: Iterable[Finding]) -> int:
    """0, or EXIT_REFUSED where something fails."""
    return EXIT_REFUSED if any(finding.status == "fail" for finding in findings) else 0


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The object of `--json`."""
    return {"schema_version": SCHEMA_VERSION, "checks": [asdict(finding) for finding in findings]}


def from_json(rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Findings of another process, from its `checks`."""
    return [Finding(row["status"], row["name"], row["found"], row["remedy"]) for row in rows]


def merged(by_host: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """The findings of many hosts as those of one.

    What is `ok` on several hosts is one line with the first one's facts; the others are a line for
    each text, which opens with the hosts that have it.
    """
    names = list(dict.fromkeys(f.name for findings in by_host.values() for f in findings))
    lines: list[Finding] = []
    for name in names:
        groups: dict[tuple[str, ...], list[str]] = {}
        facts: dict[tuple[str, ...], Finding] = {}
        for host, findings in by_host.items():
            for finding in findings:
                if finding.name == name:
                    text = finding.found, finding.remedy
                    key: tuple[str, ...] = ("ok",) if finding.status == "ok" else text
                    groups.setdefault(key, []).append(host)
                    facts.setdefault(key, finding)
        for key, hosts in groups.items():
            where = in_words(hosts) if key != ("ok",) else _first_and_count(hosts)
            found = f"{where}: {facts[key].found}"
            lines.append(Finding(facts[key].status, name, found, facts[key].remedy))
    return lines


def in_words(names: Sequence[str], most: int = 8) -> str:
    """`a, b, c`, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _first_and_count(hosts: Sequence[str]) -> str:
    unique = list(dict.fromkeys(hosts))
    return unique[0] if len(unique) == 1 else f"{len(unique)} hosts, {unique[0]}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
