"""`doctor` on every rank of a job: who came, each node's own checks, then the network of all."""

import hashlib
import importlib
import importlib.metadata
import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import mlperf_bert
from bert_tools.doctor.checks import LOCAL, NETWORK, make
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.distributed.binding import choose_device
from mlperf_bert.distributed.launch import RankInfo, backend_for, host_name, set_cpu_threads
from mlperf_bert.distributed.network_test.findings import (
    Finding,
    as_json,
    examined,
    exit_status,
    fail,
    from_json,
    in_short,
    merged,
)
from mlperf_bert.distributed.network_test.judge import (
    Here,
    judge,
    judge_failure,
    judge_presence,
    judge_versions,
)
from mlperf_bert.distributed.network_test.measure import measure
from mlperf_bert.distributed.network_test.meeting import Meeting, MeetingError, meet
from mlperf_bert.distributed.network_test.options import Options

_LAST_WORDS_S = 2.0  # for the reasons of other ranks, once rank 0's collectives failed
_MORE_S = 30.0  # over a limit that other ranks keep


def examine(
    info: RankInfo,
    names: Sequence[str],
    options: Options,
    show: Callable[[list[Finding]], None],
) -> int:
    """Make the checks `names` together with the other ranks; every rank must call it.

    All findings are shown on rank 0. A rank that cannot reach rank 0 shows that, if it is the first
    of its node. Returns the exit status, the same on all ranks; 1 on those that lost rank 0.
    """
    # A process group that was given up leaves threads behind: with this module loaded,
    # __main__.entry ends the process without waiting for them.
    importlib.import_module("mlperf_bert.distributed.session")
    try:
        return _examine(info, names, options, show)
    except MeetingError as error:
        where, problem, remedy = error.args
        lost = fail("network.ranks", f"{where} on {host_name()}: {problem}", remedy)
        if info.local_rank == 0:
            show([lost])
        return exit_status([lost])


def _examine(
    info: RankInfo,
    names: Sequence[str],
    options: Options,
    show: Callable[[list[Finding]], None],
) -> int:
    start = time.monotonic()
    meeting = meet(info, options.timeout_s)
    meeting.send("here", introduction(info, options))
    own_checks = [name for name in names if name in LOCAL]
    if info.rank != 0:
        if info.local_rank == 0:
            meeting.send("findings", _made(own_checks, options))
        patience = (1 + len(own_checks)) * options.timeout_s + _MORE_S
        if meeting.hear("measure", patience):
            _measured(info, meeting, options)
        status = int(meeting.hear("status", patience + options.timeout_s))
        meeting.part()
        return status
    here = meeting.receive("here", range(info.world_size), options.timeout_s)
    presence = judge_presence(here, info.world_size, options.timeout_s, time.monotonic() - start)
    findings = [presence, *judge_versions(here)] if NETWORK in names else []
    if NETWORK not in names and presence.status == "fail":
        findings = [presence]
    local = _of_all_nodes(_made(own_checks, options), here, meeting, options, len(own_checks))
    can_measure = NETWORK in names and exit_status(findings) == 0
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
    try:
        own = importlib.metadata.version("mlperf-bert")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        own = "from source"
    return (
        f"mlperf-bert {own} ({digest.hexdigest()[:8]}), torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def _device(info: RankInfo, options: Options) -> torch.device:
    return choose_device(options.wanted_device, info, options.share_gpu)


def _made(names: Sequence[str], options: Options) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += as_json(make(name, options))["checks"]
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
    thread = threading.Thread(target=run, name="doctor network", daemon=True)
    thread.start()
    thread.join(options.timeout_s)
    seen = {"error": f"no end within {options.timeout_s:g} s"} if thread.is_alive() else result
    meeting.send("measured", seen)
    return dict(seen)
