"""The check `network`, the part of rank 0: what all ranks saw becomes findings."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mlperf_bert.distributed.network_test.findings import Finding, fail, in_words, ok, warn

LARGEST_SKEW_S = 1.0
SLOW_PAIR = 0.5  # of the median of its kind, within a node or between nodes
# BERT-large's 16-bit gradients are 0.67 GB, and a step of one A100 node 0.19 s. A GPU's own bus
# bandwidth below these makes the all-reduce as long as the step, or points to a lost NVLink or NIC.
LEAST_NCCL_BYTES_PER_S = {"node": 10e9, "nodes": 5e9}
LARGEST_NCCL_LATENCY_S = 1e-3
_MPI_HINT = "start all ranks of the job (srun, mpirun, torchrun on every node)"

Here = Mapping[int, Mapping[str, Any]]
"""What each rank that came says of itself: host, versions, error."""


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
    from mlperf_bert.distributed.network_test.measure import LARGE_BYTES

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
