"""Options and findings of checks, and rank 0's judgement of all ranks' numbers."""

import statistics
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from mlperf_bert.common.errors import ConfigError, UserError
from mlperf_bert.config.run_config import RunConfig

SCHEMA_VERSION = 1
EXIT_REFUSED = 1  # something fails; schedulers read this
Status = Literal["ok", "info", "warn", "fail"]
DeviceName = Literal["auto", "cpu", "cuda"]
_NAME_WIDTH = 23
NETWORK = "network"  # name of the check that all ranks make together

LARGE_BYTES = 64 * 2**20  # size of the all-reduce that measures bandwidth
LARGEST_SKEW_S = 1.0
SLOW_PAIR = 0.5  # share of the median rate of its kind, within a node or between nodes
# BERT-large's 16-bit gradients are 0.67 GB, and a step of one A100 node 0.19 s. A bus bandwidth a
# GPU below these makes the all-reduce as long as the step, or points to a lost NVLink or NIC.
LEAST_NCCL_BYTES_PER_S = {"node": 10e9, "nodes": 5e9}
LARGEST_NCCL_LATENCY_S = 1e-3
_MPI_HINT = "start all ranks of the job (srun, mpirun, torchrun on every node)"

Here = Mapping[int, Mapping[str, Any]]
"""What each rank that came says of itself: host, versions, error."""
Measured = Mapping[int, Mapping[str, Any]]
"""What each rank measured, or its `error`."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a check; `config` and `data` are those of the coming run, if given.

    `all_packages`: list optional packages that nothing here needs, too.
    `timeout_s`: limit for one check, and for a rank to arrive. `command`: the same options as words
    for another process of this command. Raises ConfigError for an invalid `timeout_s`.
    """

    config: RunConfig | None = None
    data: Path | None = None
    device: DeviceName = "auto"
    all_packages: bool = False
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
        """The config's setting: whether ranks may share GPUs.

        Without a config they may, because the run is unknown and half of `mpi_readers`' processes
        use no GPU.
        """
        if self.config is None or self.config.data.loader == "mpi_readers":
            return "allow"
        return self.config.parallel.share_gpu


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
        text = f"{self.status:<4}  {self.name:<{_NAME_WIDTH}}  {_one_line(self.found)}"
        return text + (f"; {_one_line(self.remedy)}" if self.remedy else "")


def ok(name: str, found: str) -> Finding:
    """A finding that all is well."""
    return Finding("ok", name, found)


def info(name: str, found: str, remedy: str) -> Finding:
    """A finding about something absent that a healthy machine may lack."""
    return Finding("info", name, found, remedy)


def warn(name: str, found: str, remedy: str) -> Finding:
    """A finding with which training runs, but slower or with less."""
    return Finding("warn", name, found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    """A finding with which training does not run, or not correctly."""
    return Finding("fail", name, found, remedy)


def examined(name: str, check: Callable[[], Sequence[Finding]], limit_s: float) -> list[Finding]:
    """The findings of `check`; an error, or no end within `limit_s`, is a finding too.

    It runs in a thread of its own, which is abandoned when it hangs: a file system that does not
    answer must not block the other checks.
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
    """The exit status: 0, or EXIT_REFUSED if something fails."""
    return EXIT_REFUSED if any(finding.status == "fail" for finding in findings) else 0


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The object of `--json`."""
    return {"schema_version": SCHEMA_VERSION, "checks": [asdict(finding) for finding in findings]}


def from_json(rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Findings of another process, from its `checks`."""
    return [Finding(row["status"], row["name"], row["found"], row["remedy"]) for row in rows]


def merged(by_host: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """The findings of many hosts as those of one.

    Findings that are `ok` on several hosts become one line with the first host's facts; the others
    become one line for each text, which opens with its hosts.
    """
    of_name = _grouped(
        (finding.name, (host, finding)) for host, found in by_host.items() for finding in found
    )
    lines: list[Finding] = []
    for name, found in of_name.items():
        groups = _grouped(
            ("ok" if finding.status == "ok" else (finding.found, finding.remedy), (host, finding))
            for host, finding in found
        )
        for key, group in groups.items():
            hosts = [host for host, _ in group]
            where, first = _first_and_count(hosts) if key == "ok" else in_words(hosts), group[0][1]
            lines.append(Finding(first.status, name, f"{where}: {first.found}", first.remedy))
    return lines


def _grouped(pairs: Iterable[tuple[Key, Any]]) -> dict[Key, list[Any]]:
    """The values of each key, both in order of appearance."""
    groups: dict[Key, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def in_words(names: Sequence[str], most: int = 8) -> str:
    """`a, b, c`, and the number of further ones."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _first_and_count(hosts: Sequence[str]) -> str:
    unique = list(dict.fromkeys(hosts))
    return unique[0] if len(unique) == 1 else f"{len(unique)} hosts, {unique[0]}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def judge_presence(here: Here, world_size: int, timeout_s: float, took_s: float) -> Finding:
    """A finding: whether all ranks came."""
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
    """Findings: whether all ranks run the same software, and have a device each."""
    findings = []
    kinds = _grouped((str(facts["versions"]), rank) for rank, facts in here.items())
    if len(kinds) > 1:
        words = [f"{versions} on {_ranks(ranks, here)}" for versions, ranks in kinds.items()]
        found, remedy = "differ: " + " | ".join(words), "install the same on every node"
        findings.append(fail("network.versions", found, remedy))
    else:
        found = f"the same on all ranks: {next(iter(kinds))}"
        findings.append(ok("network.versions", found))
    sharing = [rank for rank, facts in here.items() if facts["shares_gpu"]]
    if sharing:
        found = f"{_ranks(sharing, here)} share GPUs: tried over gloo, not NCCL"
        remedy = "start one rank a GPU and let each see all (srun: --gpus-per-node)"
        findings.append(warn("network.devices", found, remedy))
    errors = _grouped((tuple(facts["error"]), r) for r, facts in here.items() if facts["error"])
    for (problem, remedy), ranks in errors.items():
        findings.append(fail("network.devices", f"{_ranks(ranks, here)}: {problem}", remedy))
    return findings


def judge_failure(own: str, measured: Measured, here: Here, timeout_s: float) -> Finding:
    """The finding if collectives did not end; `own` is rank 0's reason, `measured` what arrived."""
    reasons = _grouped((str(r["error"]), rank) for rank, r in measured.items() if "error" in r)
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


def judge(measured: Measured, here: Here, backend: str) -> list[Finding]:
    """Findings from every rank's numbers."""
    return [
        _exactness(measured, here, backend),
        _bandwidth(measured, here, backend),
        _latency(measured, backend),
        *_pairs(measured, here),
        _clocks({rank: measured[rank]["clock"] for rank in sorted(measured)}, here),
    ]


def _exactness(measured: Measured, here: Here, backend: str) -> Finding:
    name = "network.allreduce"
    right = {
        rank: result["sum_is_right"] and result["large"]["is_right"]
        for rank, result in measured.items()
    }
    if not all(right.values()):
        wrong = _ranks([rank for rank in right if not right[rank]], here)
        remedy = "take the host out and look for a broken GPU, cable or card"
        return fail(name, f"{backend}: wrong sums on {wrong}", remedy)
    connected = max(float(result["connected_s"]) for result in measured.values())
    return ok(name, f"{backend}: sums exactly right, connected in {connected:.2f} s")


def _bandwidth(measured: Measured, here: Here, backend: str) -> Finding:
    seconds = max(float(result["large"]["seconds"]) for result in measured.values())
    # Bus bandwidth, independent of the number of ranks: bytes over each rank's link, each way.
    rate = 2 * (len(measured) - 1) / len(measured) * LARGE_BYTES / seconds
    found = (
        f"{rate / 1e9:.2f} GB/s bus bandwidth, all-reduce of {LARGE_BYTES // 2**20} MiB in "
        f"{1e3 * seconds:.1f} ms"
    )
    nodes = {facts["node"] for facts in here.values()}
    least = LEAST_NCCL_BYTES_PER_S["nodes" if len(nodes) > 1 else "node"]
    if backend == "nccl" and rate < least:
        remedy = "check NVLink (nvidia-smi topo -m), InfiniBand links and GPUDirect (NCCL_DEBUG)"
        return warn("network.bandwidth", f"{found}, below {least / 1e9:g}", remedy)
    return ok("network.bandwidth", found)


def _latency(measured: Measured, backend: str) -> Finding:
    seconds = max(float(result["latency_s"]) for result in measured.values())
    found = f"{1e6 * seconds:,.0f} us for an all-reduce of one number"
    if backend == "nccl" and seconds > LARGEST_NCCL_LATENCY_S:
        remedy = "look for other jobs, and whether ranks are bound to cores near their GPU"
        found += f", above {1e6 * LARGEST_NCCL_LATENCY_S:,.0f}"
        return warn("network.latency", found, remedy)
    return ok("network.latency", found)


def _pairs(measured: Measured, here: Here) -> list[Finding]:
    """Findings on neighbours slower than others of their kind, if there are any to compare."""
    by_kind: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
    for rank, result in measured.items():
        for peer, rate in result["pairs"].items():
            pair = (min(rank, int(peer)), max(rank, int(peer)))
            links = by_kind[here[pair[0]]["node"] == here[pair[1]]["node"]]
            links[pair] = min(rate, links.get(pair, rate))
    return [_links(links, here, near) for near, links in by_kind.items() if len(links) > 1]


def _links(links: Mapping[tuple[int, int], float], here: Here, within_node: bool) -> Finding:
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


def _clocks(clocks: Mapping[int, Sequence[Sequence[float]]], here: Here) -> Finding:
    """A finding: whether the clocks of all hosts agree with rank 0's."""
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
    """The seconds by which `other` is ahead of `reference`, and the largest error of that.

    Args:
        reference: seconds of day before and after each round, which no rank finishes before all
            have begun.
        other: the same rounds by the other clock.
    """
    low = max(o[0] - r[1] for r, o in zip(reference, other, strict=True))
    high = min(o[1] - r[0] for r, o in zip(reference, other, strict=True))
    return (low + high) / 2, max(high - low, 0.0) / 2


def _ranks(ranks: Sequence[int], here: Here) -> str:
    return in_words([_rank(rank, here) for rank in sorted(ranks)])


def _rank(rank: int, here: Here) -> str:
    return f"rank {rank} ({here[rank]['host']})" if rank in here else f"rank {rank}"
