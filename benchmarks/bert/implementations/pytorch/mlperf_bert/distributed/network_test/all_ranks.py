"""The network test on every rank of a job: presence, each node's own checks, the network.

Ranks meet in a store on rank 0 and leave their findings there as JSON. No collective is needed, so
a missing rank can be named and each device judged alone.
"""

import hashlib
import importlib
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
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
    shutdown,
)
from mlperf_bert.distributed.network_test.findings import (
    LARGE_BYTES,
    NETWORK,
    Finding,
    Here,
    Options,
    as_json,
    examined,
    exit_status,
    fail,
    from_json,
    in_short,
    judge,
    judge_failure,
    judge_presence,
    judge_versions,
    merged,
)

PAIR_BYTES = 8 * 2**20
_CLOCK_ROUNDS = 5
_LATENCY_ROUNDS = 20
_LARGE_ROUNDS = 5
_PAIR_ROUNDS = 3
_LARGE_SECONDS = 5.0  # for all large rounds; a slow link gets fewer
_FAREWELL_S = 5.0  # for the others to read rank 0's last word from its store
_POLL_S = 0.05
_ASKED_PER_S = 4000  # polling rate of all waiting ranks together
_LAST_WORDS_S = 2.0  # wait for other ranks' reasons once rank 0's collectives failed
_MORE_S = 30.0  # allowed beyond other ranks' limits, and for a request to the store

OwnChecks = Sequence[Callable[[], list[Finding]]]
"""What the first rank of each node looks at alone; none of them raises."""


class MeetingError(UserError):
    """This rank cannot reach rank 0, or rank 0 has gone."""


class Meeting:
    """The ranks' meeting place. All ranks `send`; only rank 0 calls `receive` and `announce`.

    `store` is a `torch.distributed.Store`, which torch's stubs lack.
    """

    def __init__(self, store: Any, info: RankInfo) -> None:
        self._info = info
        self.store = store

    def send(self, topic: str, value: Any) -> None:
        """Leave a value for rank 0."""
        self._guarded(lambda: self.store.set(f"{topic}/{self._info.rank}", json.dumps(value)))

    def receive(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """The values that these ranks sent in time; missing ranks are left out."""
        ranks = list(ranks)
        self._wait([f"{topic}/{rank}" for rank in ranks], seconds)
        there = {rank: f"{topic}/{rank}" for rank in ranks if self.store.check([f"{topic}/{rank}"])}
        texts = self.store.multi_get(list(there.values())) if there else []
        return {rank: json.loads(text) for rank, text in zip(there, texts, strict=True)}

    def announce(self, topic: str, value: Any) -> None:
        """Leave a value for all other ranks."""
        self.store.set(topic, json.dumps(value))

    def hear(self, topic: str, seconds: float) -> Any:
        """The value that rank 0 announces. Raises MeetingError if none comes in time."""

        def heard() -> Any:
            if not self._wait([topic], seconds):
                raise RuntimeError("not announced")
            return json.loads(self.store.get(topic))

        return self._guarded(heard)

    def part(self, others: int = 0) -> None:
        """Leave; rank 0 stays until all present ranks, which call this too, heard its last word."""
        with suppress(RuntimeError):  # a rank that is gone needs nothing more
            if self._info.rank != 0:
                self.store.add("parted", 1)
                return
            _until(lambda: self.store.add("parted", 0) >= others, _FAREWELL_S, _POLL_S)

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """True if all keys arrived in time."""
        # Not by the store's own wait, because torch prints a message when that times out.
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
                f"rank {self._info.rank}", "rank 0 no longer answers", remedy
            ) from None


def meet(info: RankInfo, timeout_s: float) -> Meeting:
    """Open rank 0's store, or reach it.

    Raises MeetingError if that takes over `timeout_s`. Raises ConfigError if rank 0 cannot serve
    it.
    """
    try:
        store = open_store(info, timedelta(seconds=timeout_s))
        store.set_timeout(timedelta(seconds=timeout_s + _MORE_S))
    except LostRanksError as error:
        raise MeetingError(*error.args) from None
    except RuntimeError as error:  # value of torch's agent
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
    """Make the nodes' own checks, and with `network` the common one; every rank must call it.

    Rank 0 shows all findings. A rank that cannot reach rank 0 says so if it is the first of its
    node. Returns the exit status, the same on all ranks; 1 on those that lost rank 0.
    """
    # An abandoned process group leaves threads behind: with this module loaded, __main__ ends the
    # process without waiting for them.
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
            meeting.send("findings", as_json(_made(own_checks))["checks"])
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
    show(findings)  # before any rank ends, because the launcher ends the others if one fails
    meeting.announce("status", status)
    meeting.part(others=len(here) - 1)
    return status


def introduction(info: RankInfo, options: Options) -> dict[str, Any]:
    """This rank's introduction: host, node, versions, and its device or what it lacks."""
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
    """Versions that must not differ between ranks; for this package also a digest of its files."""
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


def _made(checks: OwnChecks) -> list[Finding]:
    return [finding for check in checks for finding in check()]


def _of_all_nodes(
    own: list[Finding], here: Here, meeting: Meeting, options: Options, num_checks: int
) -> list[Finding]:
    """All nodes' own checks in one list; `own` are those of rank 0's node."""
    if not own:
        return []
    firsts: dict[int, int] = {}
    for rank in sorted(here):
        firsts.setdefault(here[rank]["node"], rank)
    others = [rank for rank in firsts.values() if rank != 0]
    if not others:
        return own
    sent = meeting.receive("findings", others, num_checks * options.timeout_s)
    by_host = {_label(here, 0): own}
    by_host |= {_label(here, rank): from_json(rows) for rank, rows in sent.items()}
    silent = [_label(here, rank) for rank in others if rank not in sent]
    findings = merged(by_host)
    if silent:
        remedy = "log in there and run the doctor alone"
        findings.append(fail("nodes", f"no findings from {', '.join(silent)}", remedy))
    return findings


def _label(here: Here, rank: int) -> str:
    """A node's host, with its number if two nodes share a host."""
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
        except Exception as error:  # errors of gloo and NCCL have no type of their own
            result["error"] = in_short(error)

    # In a thread: if another rank hangs, NCCL waits without end, or ends the process.
    thread = threading.Thread(target=run, name="network test", daemon=True)
    thread.start()
    thread.join(options.timeout_s)
    seen = {"error": f"no end within {options.timeout_s:g} s"} if thread.is_alive() else result
    meeting.send("measured", seen)
    return dict(seen)


def _until(condition: Callable[[], bool], seconds: float, poll_s: float) -> bool:
    """Poll a condition; true if it held in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True


def measure(info: RankInfo, device: torch.device, store: Any, timeout_s: float) -> dict[str, Any]:
    """Join the other ranks and test the network; return this rank's measurements, ready for JSON.

    Every rank must call it. Raises RuntimeError if a collective fails; the process group then
    stays, because destroying it may wait for ever.
    """
    backend = backend_for(info, device)
    place = device if backend == "nccl" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    names: Any = dist  # torch's stubs lack this one
    dist.init_process_group(
        backend,
        store=names.PrefixStore("network", store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=place if backend == "nccl" else None,
    )
    start = time.perf_counter()
    sum_is_right = small_sum_is_right(info, place)  # the first call makes the connections
    seen = {
        "sum_is_right": sum_is_right,
        "connected_s": time.perf_counter() - start,
        "clock": [clock_round(info, place) for _ in range(_CLOCK_ROUNDS)],
        "latency_s": latency(place),
        "large": large_all_reduce(info, place),
        "pairs": pair_rates(info, place),
    }
    shutdown()
    return seen


def small_sum_is_right(info: RankInfo, place: torch.device) -> bool:
    """True if an all-reduce of rank numbers, each times 1 .. 1024, is exact."""
    factors = torch.arange(1, 1025, device=place)
    numbers = factors * info.rank
    dist.all_reduce(numbers)
    return torch.equal(numbers, factors * sum(range(info.world_size)))


def clock_round(info: RankInfo, place: torch.device) -> list[float]:
    """This rank's time of day before an all-gather and after it.

    No rank finishes before all have begun, which bounds the difference of two clocks.
    """
    everyone = [torch.zeros(1, device=place) for _ in range(info.world_size)]
    began = time.time()
    dist.all_gather(everyone, torch.zeros(1, device=place))
    _wait_for(place)
    return [began, time.time()]


def latency(place: torch.device) -> float:
    """Median seconds of an all-reduce of one number."""
    number = torch.zeros(1, device=place)
    return statistics.median(
        _seconds(lambda: dist.all_reduce(number), place) for _ in range(_LATENCY_ROUNDS)
    )


def large_all_reduce(info: RankInfo, place: torch.device) -> dict[str, Any]:
    """An all-reduce of LARGE_BYTES in fp32: median seconds, and whether every sum was exact."""
    values = torch.empty(LARGE_BYTES // 4, device=place)
    total = float(info.world_size * (info.world_size + 1) // 2)  # exact in fp32 to 5,792 ranks
    is_right, rounds = True, 1 + _LARGE_ROUNDS
    times: list[float] = []
    while len(times) < rounds:
        values.fill_(info.rank + 1)
        times.append(_seconds(lambda: dist.all_reduce(values), place))
        is_right = is_right and bool((values == total).all())
        if len(times) == 1:
            rounds = 1 + _affordable_rounds(times[0], place)
    return {"seconds": statistics.median(times[1:]), "is_right": is_right}


def _affordable_rounds(seconds: float, place: torch.device) -> int:
    """The number of rounds, the same on every rank, from the slowest rank's time."""
    slowest = torch.tensor([seconds], device=place)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, min(_LARGE_ROUNDS, int(_LARGE_SECONDS / max(slowest.item(), 1e-6))))


def pair_rates(info: RankInfo, place: torch.device) -> dict[str, float]:
    """Bytes a second to and from each neighbour in the ring, at the same time: rank -> rate.

    It runs in three turns of disjoint pairs, so that a slow pair slows no other.
    """
    rates: dict[str, float] = {}
    for turn in range(3):
        pairs = [pair for pair in ring_pairs(info.world_size, turn) if info.rank in pair]
        for first, second in pairs:
            peer = second if info.rank == first else first
            rates[str(peer)] = _exchange(peer, place)
        dist.barrier()
    return rates


def ring_pairs(world_size: int, turn: int) -> list[tuple[int, int]]:
    """Disjoint pairs of neighbours of a turn; turns 0 to 2 hold each link of the ring once.

    The third turn has the link that remains in an odd ring.
    """
    if world_size < 2:
        return []
    links = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    if world_size == 2:
        links = links[:1]
    odd_one = [links.pop()] if world_size % 2 else []
    return (links[0::2], links[1::2], odd_one)[turn]


def _exchange(peer: int, place: torch.device) -> float:
    mine, theirs = (torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=place) for _ in range(2))

    def both_ways() -> None:
        operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    _seconds(both_ways, place)  # makes the connection
    return PAIR_BYTES / min(_seconds(both_ways, place) for _ in range(_PAIR_ROUNDS))


def _seconds(action: Callable[[], object], place: torch.device) -> float:
    _wait_for(place)
    start = time.perf_counter()
    action()
    _wait_for(place)
    return max(time.perf_counter() - start, 1e-9)


def _wait_for(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)  # a measurement: the host must know when it ends
