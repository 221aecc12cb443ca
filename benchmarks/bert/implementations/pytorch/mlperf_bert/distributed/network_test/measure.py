"""The network of all ranks: collectives that every rank tries, and what rank 0 makes of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mlperf_bert.distributed.launch import RankInfo, backend_for, shutdown
from mlperf_bert.distributed.network_test.findings import Finding, fail, in_words, ok, warn

LARGE_BYTES = 64 * 2**20
PAIR_BYTES = 8 * 2**20
_CLOCK_ROUNDS = 5
_LATENCY_ROUNDS = 20
_LARGE_ROUNDS = 5
_PAIR_ROUNDS = 3
_LARGE_SECONDS = 5.0  # of all large ones; a slow link gets fewer of them

LARGEST_SKEW_S = 1.0
SLOW_PAIR = 0.5  # of the median of its kind, within a node or between nodes
# BERT-large's 16-bit gradients are 0.67 GB, and a step of one A100 node 0.19 s. A GPU's own bus
# bandwidth below these makes the all-reduce as long as the step, or points to a lost NVLink or NIC.
LEAST_NCCL_BYTES_PER_S = {"node": 10e9, "nodes": 5e9}
LARGEST_NCCL_LATENCY_S = 1e-3
_MPI_HINT = "start all ranks of the job (srun, mpirun, torchrun on every node)"

Here = Mapping[int, Mapping[str, Any]]
"""What each rank that came says of itself: host, versions, error."""


def measure(info: RankInfo, device: torch.device, store: Any, timeout_s: float) -> dict[str, Any]:
    """Join the other ranks and try the network; what this rank saw, ready for JSON.

    Every rank must call it. Raises RuntimeError where a collective fails; the process group is then
    left as it is, because taking it down may wait for ever.
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
    sum_is_right = small_sum_is_right(info, place)  # the first one makes the connections
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
    """Whether an all-reduce of rank numbers, each times 1 .. 1024, is exactly right."""
    factors = torch.arange(1, 1025, device=place)
    numbers = factors * info.rank
    dist.all_reduce(numbers)
    return torch.equal(numbers, factors * sum(range(info.world_size)))


def clock_round(info: RankInfo, place: torch.device) -> list[float]:
    """This rank's time of day before an all-gather and after it.

    No rank is through before all have begun, which bounds how far two clocks are apart.
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
    """LARGE_BYTES in fp32: median seconds, and whether every sum was exactly right."""
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
    """The same number on every rank, so they agree on the slowest one's time."""
    slowest = torch.tensor([seconds], device=place)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, min(_LARGE_ROUNDS, int(_LARGE_SECONDS / max(slowest.item(), 1e-6))))


def pair_rates(info: RankInfo, place: torch.device) -> dict[str, float]:
    """Bytes a second to and from each neighbour in the ring, at the same time: rank -> rate.

    In three turns of pairs that have no rank in common, so that a slow one slows no other.
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
    """Neighbours of a turn, no rank in two of them; turns 0 to 2 hold each link of the ring once.

    The third turn has the link that an odd ring leaves over.
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
        torch.cuda.synchronize(place)  # a measurement: the host has to know when it is over


def judge_presence(here: Here, world_size: int, timeout_s: float, took_s: float) -> Finding:
    """Whether all ranks came."""
    name = "network.ranks"
    hosts = list(dict.fromkeys(str(here[rank]["host"]) for rank in sorted(here)))
    missing = [str(rank) for rank in range(world_size) if rank not in here]
    where = f"{len(here)} of {world_size} ranks came ({in_words(hosts)})"
    if missing:
        found = f"{where}; not within {timeout_s:g} s: rank {in_words(missing, most=16)}"
        return fail(name, found, f"{_MPI_HINT}, or allow more by --timeout")
    on = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return ok(name, f"all {world_size} ranks came, on {on}, in {took_s:.1f} s")


def judge_versions(here: Here) -> list[Finding]:
    """Whether all ranks run the same software on a device each."""
    name, findings = "network.versions", []
    kinds: dict[str, list[int]] = {}
    for rank, facts in here.items():
        kinds.setdefault(str(facts["versions"]), []).append(rank)
    if len(kinds) > 1:
        words = [f"{versions} on {_ranks(ranks, here)}" for versions, ranks in kinds.items()]
        remedy = "install the same on every node"
        findings.append(fail(name, "differ: " + " | ".join(words), remedy))
    else:
        findings.append(ok(name, f"the same on all ranks: {next(iter(kinds))}"))
    errors: dict[tuple[str, ...], list[int]] = {}
    for rank, facts in here.items():
        if facts["error"]:
            errors.setdefault(tuple(facts["error"]), []).append(rank)
    sharing = [rank for rank, facts in here.items() if facts["shares_gpu"]]
    if sharing:
        found = f"{_ranks(sharing, here)} share GPUs: tried over gloo, not NCCL"
        remedy = "start one rank a GPU and let each see all (srun: --gpus-per-node)"
        findings.append(warn("network.devices", found, remedy))
    for (problem, remedy), ranks in errors.items():
        findings.append(fail("network.devices", f"{_ranks(ranks, here)}: {problem}", remedy))
    return findings


def judge_failure(
    own: str, measured: Mapping[int, Mapping[str, Any]], here: Here, timeout_s: float
) -> Finding:
    """The collectives did not come to an end; `own` is rank 0's reason, `measured` what came."""
    reasons: dict[str, list[int]] = {}
    for rank, result in measured.items():
        if "error" in result:
            reasons.setdefault(str(result["error"]), []).append(rank)
    words = [f"{_ranks(ranks, here)}: {reason}" for reason, ranks in reasons.items()]
    silent = [rank for rank in here if rank not in measured and rank != 0]
    if silent:
        words.append(f"no word from {_ranks(silent, here)}")
    found = "; ".join([own, *words])
    remedy = (
        "check the network between these hosts (NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME or "
        "GLOO_SOCKET_IFNAME name the interface)"
    )
    return fail("network.allreduce", found, remedy)


def judge(measured: Mapping[int, Mapping[str, Any]], here: Here, backend: str) -> list[Finding]:
    """What every rank's numbers say."""
    ranks = sorted(measured)
    return [
        _exactness(measured, here, backend),
        _bandwidth(measured, here, backend),
        _latency(measured, backend),
        *_pairs(measured, here),
        judge_clocks({rank: measured[rank]["clock"] for rank in ranks}, here),
    ]


def _exactness(measured: Mapping[int, Mapping[str, Any]], here: Here, backend: str) -> Finding:
    name = "network.allreduce"
    wrong = [
        rank
        for rank, result in measured.items()
        if not (result["sum_is_right"] and result["large"]["is_right"])
    ]
    if wrong:
        remedy = "take the host out and look for a broken GPU, cable or card"
        return fail(name, f"{backend}: wrong sums on {_ranks(wrong, here)}", remedy)
    connected = max(float(result["connected_s"]) for result in measured.values())
    return ok(name, f"{backend}: sums exactly right, connected in {connected:.2f} s")


def bus_bytes_per_s(num_bytes: int, seconds: float, world_size: int) -> float:
    """An all-reduce's rate independent of the ranks: what each moves over its link, each way."""
    return 2 * (world_size - 1) / world_size * num_bytes / seconds


def _bandwidth(measured: Mapping[int, Mapping[str, Any]], here: Here, backend: str) -> Finding:
    name = "network.bandwidth"
    seconds = max(float(result["large"]["seconds"]) for result in measured.values())
    rate = bus_bytes_per_s(LARGE_BYTES, seconds, len(measured))
    found = (
        f"{rate / 1e9:.2f} GB/s bus bandwidth, all-reduce of {LARGE_BYTES // 2**20} MiB in "
        f"{1e3 * seconds:.1f} ms"
    )
    nodes = {facts["node"] for facts in here.values()}
    least = LEAST_NCCL_BYTES_PER_S["nodes" if len(nodes) > 1 else "node"]
    if backend == "nccl" and rate < least:
        remedy = "check NVLink (nvidia-smi topo -m), InfiniBand links and GPUDirect (NCCL_DEBUG)"
        return warn(name, f"{found}, below {least / 1e9:g}", remedy)
    return ok(name, found)


def _latency(measured: Mapping[int, Mapping[str, Any]], backend: str) -> Finding:
    name = "network.latency"
    seconds = max(float(result["latency_s"]) for result in measured.values())
    found = f"{1e6 * seconds:,.0f} us for an all-reduce of one number"
    if backend == "nccl" and seconds > LARGEST_NCCL_LATENCY_S:
        remedy = "look for other jobs, and whether ranks are bound to cores near their GPU"
        return warn(name, f"{found}, above {1e6 * LARGEST_NCCL_LATENCY_S:,.0f}", remedy)
    return ok(name, found)


def _pairs(measured: Mapping[int, Mapping[str, Any]], here: Here) -> list[Finding]:
    """Neighbours that are slower than the others of their kind: where there are any to compare."""
    by_kind: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
    for rank, result in measured.items():
        for peer, rate in result["pairs"].items():
            pair = (min(rank, int(peer)), max(rank, int(peer)))
            links = by_kind[here[pair[0]]["node"] == here[pair[1]]["node"]]
            links[pair] = min(rate, links.get(pair, rate))
    findings = []
    for within_node, links in by_kind.items():
        if len(links) > 1:
            findings.append(_judge_links(links, here, within_node))
    return findings


def _judge_links(links: Mapping[tuple[int, int], float], here: Here, within_node: bool) -> Finding:
    kind = "within a node" if within_node else "between nodes"
    name = "network.neighbours"
    median = statistics.median(links.values())
    slow = [pair for pair, rate in links.items() if rate < SLOW_PAIR * median]
    found = f"{len(links)} pairs {kind}, median {median / 1e9:.2f} GB/s each way"
    if slow:
        words = [
            f"{_rank(a, here)} with {_rank(b, here)} {links[a, b] / median:.2f} of it"
            for a, b in slow
        ]
        remedy = "look for the host, GPU or cable that they have in common"
        return warn(name, f"{found}; slower: {in_words(words)}", remedy)
    return ok(name, f"{found}, slowest {min(links.values()) / median:.2f} of it")


def judge_clocks(clocks: Mapping[int, Sequence[Sequence[float]]], here: Here) -> Finding:
    """Whether the clocks of all hosts agree with rank 0's."""
    name = "network.clocks"
    offsets = {rank: clock_offset(clocks[0], rounds) for rank, rounds in clocks.items() if rank}
    wrong = {
        rank: middle
        for rank, (middle, error) in offsets.items()
        if abs(middle) - error > LARGEST_SKEW_S
    }
    if wrong:
        far = max(wrong, key=lambda rank: abs(wrong[rank]))
        found = f"{_ranks(list(wrong), here)} differ from rank 0's, at most {wrong[far]:+.1f} s"
        return warn(name, found, "run a time service (chrony, ntpd) on every node")
    largest = max((abs(middle) + error for middle, error in offsets.values()), default=0.0)
    return ok(name, f"at most {1e3 * largest:.1f} ms apart")


def clock_offset(
    reference: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """By how many seconds `other` is ahead of `reference`, and the largest error of that.

    Args:
        reference: seconds of day before and after each round, in which no one is through before
            all have begun.
        other: the same rounds by the other clock.
    """
    low = max(o[0] - r[1] for r, o in zip(reference, other, strict=True))
    high = min(o[1] - r[0] for r, o in zip(reference, other, strict=True))
    return (low + high) / 2, max(high - low, 0.0) / 2


def _ranks(ranks: Sequence[int], here: Here) -> str:
    words = [_rank(rank, here) for rank in sorted(ranks)]
    return in_words(words)


def _rank(rank: int, here: Here) -> str:
    return f"rank {rank} ({here[rank]['host']})" if rank in here else f"rank {rank}"
