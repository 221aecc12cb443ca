"""The network test on every rank of a job: who came, each node's own checks, then the network.

Ranks meet in a store of rank 0's, where each leaves what it has to say as JSON. No collective is
needed, so one that is missing can be named, and a device can be judged alone.
"""

import hashlib
import importlib
import json
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mlperf_bert
from mlperf_bert.common.errors import ConfigError, LostRanksError, UserError
from mlperf_bert.distributed.binding import choose_device
from mlperf_bert.distributed.launch import (
    RankInfo,
    backend_for,
    host_name,
    open_store,
    set_cpu_threads,
)
from mlperf_bert.distributed.network_test.findings import (
    NETWORK,
    Finding,
    Options,
    as_json,
    examined,
    exit_status,
    fail,
    from_json,
    in_short,
    merged,
)
from mlperf_bert.distributed.network_test.measure import (
    Here,
    judge,
    judge_failure,
    judge_presence,
    judge_versions,
    measure,
)

_FAREWELL_S = 5.0  # for the others to read the last word of rank 0, whose process serves it
_POLL_S = 0.05
_ASKED_PER_S = 4000  # by all ranks together, while they wait
_LAST_WORDS_S = 2.0  # for the reasons of other ranks, once rank 0's collectives failed
_MORE_S = 30.0  # over a limit that other ranks keep, and of patience with a request to the store

OwnChecks = Mapping[str, Callable[[], list[Finding]]]
"""What the first rank of each node looks at alone, by name; none of them raises."""


class MeetingError(UserError):
    """This rank cannot reach rank 0, or rank 0 has gone."""


class Meeting:
    """The ranks' common place. `send` is everyone's; `receive` and `announce` are rank 0's.

    `store` is a `torch.distributed.Store`, which torch's stubs lack.
    """

    def __init__(self, store: Any, info: RankInfo) -> None:
        self._info = info
        self.store = store

    def send(self, topic: str, value: Any) -> None:
        """Leave what rank 0 shall have."""
        self._guarded(lambda: self.store.set(f"{topic}/{self._info.rank}", json.dumps(value)))

    def receive(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """What these ranks sent within that time; one that did not is left out."""
        ranks = list(ranks)
        self._wait([f"{topic}/{rank}" for rank in ranks], seconds)
        there = {rank: f"{topic}/{rank}" for rank in ranks if self.store.check([f"{topic}/{rank}"])}
        texts = self.store.multi_get(list(there.values())) if there else []
        return {rank: json.loads(text) for rank, text in zip(there, texts, strict=True)}

    def announce(self, topic: str, value: Any) -> None:
        """Tell the others."""
        self.store.set(topic, json.dumps(value))

    def hear(self, topic: str, seconds: float) -> Any:
        """What rank 0 announces. Raises MeetingError where it does not within that time."""

        def heard() -> Any:
            if not self._wait([topic], seconds):
                raise RuntimeError("not announced")
            return json.loads(self.store.get(topic))

        return self._guarded(heard)

    def part(self, others: int = 0) -> None:
        """Rank 0 stays until the others that came, which call this too, heard its last word."""
        with suppress(RuntimeError):  # a rank that is gone needs nothing any more
            if self._info.rank != 0:
                self.store.add("parted", 1)
                return
            _until(lambda: self.store.add("parted", 0) >= others, _FAREWELL_S, _POLL_S)

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Whether all keys were there in time."""
        # Not by the store's own wait: where that ends, torch prints what it thinks of it.
        return _until(
            lambda: self.store.check(keys),
            seconds,
            max(_POLL_S, self._info.world_size / _ASKED_PER_S),
        )

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError:
            remedy = "look at rank 0's output"
            raise MeetingError(
                f"rank {self._info.rank}", "rank 0 does not answer any more", remedy
            ) from None


def meet(info: RankInfo, timeout_s: float) -> Meeting:
    """Open rank 0's store, or reach it. Raises MeetingError where that takes over `timeout_s`.

    Raises ConfigError where rank 0 cannot serve it.
    """
    try:
        store = open_store(info, timedelta(seconds=timeout_s))
        store.set_timeout(timedelta(seconds=timeout_s + _MORE_S))
    except LostRanksError as error:
        raise MeetingError(*error.args) from None
    except RuntimeError as error:  # of torch's agent
        problem = f"cannot reach torchrun's store ({error})"
        raise MeetingError(f"rank {info.rank}", problem, "look at torchrun's output") from None
    names: Any = dist
    return Meeting(names.PrefixStore("meeting", store), info)


def examine(
    info: RankInfo,
    own_checks: OwnChecks,
    options: Options,
    show: Callable[[list[Finding]], None],
    *,
    network: bool = True,
) -> int:
    """Make the nodes' own checks, and with `network` that of all ranks; every rank must call it.

    All findings are shown on rank 0. A rank that cannot reach rank 0 shows that, if it is the first
    of its node. Returns the exit status, the same on all ranks; 1 on those that lost rank 0.
    """
    # A process group that was given up leaves threads behind: with this module loaded,
    # common.exit.leave ends the process without waiting for them.
    importlib.import_module("mlperf_bert.distributed.session")
    try:
        return _examine(info, own_checks, options, show, network)
    except MeetingError as error:
        where, problem, remedy = error.args
        lost = fail("network.ranks", f"{where} on {host_name()}: {problem}", remedy)
        if info.local_rank == 0:
            show([lost])
        return exit_status([lost])


def _examine(
    info: RankInfo,
    own_checks: OwnChecks,
    options: Options,
    show: Callable[[list[Finding]], None],
    network: bool,
) -> int:
    start = time.monotonic()
    meeting = meet(info, options.timeout_s)
    meeting.send("here", introduction(info, options))
    if info.rank != 0:
        if info.local_rank == 0:
            meeting.send("findings", _made(own_checks))
        patience = (1 + len(own_checks)) * options.timeout_s + _MORE_S
        if meeting.hear("measure", patience):
            _measured(info, meeting, options)
        status = int(meeting.hear("status", patience + options.timeout_s))
        meeting.part()
        return status
    here = meeting.receive("here", range(info.world_size), options.timeout_s)
    presence = judge_presence(here, info.world_size, options.timeout_s, time.monotonic() - start)
    findings = [presence, *judge_versions(here)] if network else []
    if not network and presence.status == "fail":
        findings = [presence]
    local = _of_all_nodes(_made(own_checks), here, meeting, options, len(own_checks))
    can_measure = network and exit_status(findings) == 0
    meeting.announce("measure", can_measure)
    if can_measure:
        findings += _network(info, here, meeting, options)
    findings = local + findings
    status = exit_status(findings)
    show(findings)  # before any rank ends: where one fails, the launcher ends the others
    meeting.announce("status", status)
    meeting.part(others=len(here) - 1)
    return status


def introduction(info: RankInfo, options: Options) -> dict[str, Any]:
    """What this rank says of itself: host, node, versions, and what its device is or lacks."""
    error, shares = None, False
    try:
        device = _device(info, options)
        shares = device.type == "cuda" and backend_for(info, device) == "gloo"
    except ConfigError as raised:
        error = [f"{raised.args[0]} {raised.args[1]}", raised.args[2]]
    return {
        "host": host_name(),
        "node": info.node_rank,
        "versions": versions(),
        "error": error,
        "shares_gpu": shares,
    }


def versions() -> str:
    """What must not differ between ranks; of this package also the digest of its files."""
    digest = hashlib.sha256()
    root = Path(mlperf_bert.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return (
        f"mlperf-bert {mlperf_bert.package_version()} ({digest.hexdigest()[:8]}), "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _device(info: RankInfo, options: Options) -> torch.device:
    return choose_device(options.wanted_device, info, options.share_gpu)


def _made(checks: OwnChecks) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for check in checks.values():
        rows += as_json(check())["checks"]
    return rows


def _of_all_nodes(
    own: list[dict[str, Any]], here: Here, meeting: Meeting, options: Options, num_checks: int
) -> list[Finding]:
    """The nodes' own checks in one list; `own` are those of rank 0's node."""
    if not own:
        return []
    firsts: dict[int, int] = {}
    for rank in sorted(here):
        firsts.setdefault(here[rank]["node"], rank)
    others = [rank for rank in firsts.values() if rank != 0]
    sent = meeting.receive("findings", others, num_checks * options.timeout_s) if others else {}
    if not others:
        return from_json(own)
    by_host = {_label(here, rank): from_json(rows) for rank, rows in {0: own, **sent}.items()}
    silent = [_label(here, rank) for rank in others if rank not in sent]
    findings = merged(by_host)
    if silent:
        remedy = "log in there and run the doctor alone"
        findings.append(fail("nodes", f"no findings from {', '.join(silent)}", remedy))
    return findings


def _label(here: Here, rank: int) -> str:
    """A node's host, with its number where two nodes have one host."""
    host, node = here[rank]["host"], here[rank]["node"]
    twins = {facts["node"] for facts in here.values() if facts["host"] == host}
    return f"{host} (node {node})" if len(twins) > 1 else str(host)


def _network(info: RankInfo, here: Here, meeting: Meeting, options: Options) -> list[Finding]:
    own = _measured(info, meeting, options)
    if "error" not in own:
        measured = meeting.receive("measured", here, options.timeout_s)
        if len(measured) == len(here) and not any("error" in row for row in measured.values()):
            device = _device(info, options)
            return examined(
                NETWORK,
                lambda: judge(measured, here, backend_for(info, device)),
                options.timeout_s,
            )
        own = {"error": "other ranks failed"}
    measured = meeting.receive("measured", [rank for rank in here if rank], _LAST_WORDS_S)
    return [judge_failure(own["error"], measured, here, options.timeout_s)]


def _measured(info: RankInfo, meeting: Meeting, options: Options) -> dict[str, Any]:
    """This rank's numbers, or an `error`; rank 0 gets them too."""
    result: dict[str, Any] = {}

    def run() -> None:
        try:
            device = _device(info, options)
            if device.type == "cpu":
                set_cpu_threads(info)
            result.update(measure(info, device, meeting.store, options.timeout_s + _MORE_S))
        except Exception as error:  # what gloo and NCCL raise has no type of its own
            result["error"] = in_short(error)

    # In a thread: where another rank hangs, NCCL waits without end, or ends the process.
    thread = threading.Thread(target=run, name="network test", daemon=True)
    thread.start()
    thread.join(options.timeout_s)
    seen = {"error": f"no end within {options.timeout_s:g} s"} if thread.is_alive() else result
    meeting.send("measured", seen)
    return dict(seen)


def _until(condition: Callable[[], bool], seconds: float, poll_s: float) -> bool:
    """Ask again and again; whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
