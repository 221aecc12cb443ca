"""`doctor --burn-in`: every device trains alone for a time and is compared with the others.

Nothing is reduced over the ranks, so a slow one shows and slows no other. Rates are also compared
with those of MLPerf's submitters on such accelerators (published_rates.csv).
"""

import csv
import gc
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import Any

import torch

from bert_tools.bench.cli import small_config
from bert_tools.bench.training_run import TrainingRun, training_run
from bert_tools.doctor.gpus import heat
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig, has_bert_large_sizes
from mlperf_bert.distributed.binding import bind, choose_device
from mlperf_bert.distributed.launch import RankInfo, host_name, set_cpu_threads
from mlperf_bert.distributed.network_test.all_ranks import Meeting, MeetingError, meet
from mlperf_bert.distributed.network_test.findings import (
    Finding,
    Options,
    exit_status,
    fail,
    in_short,
    in_words,
    ok,
    warn,
)
from mlperf_bert.run.metrics import memory_bytes

_NUM_UPDATES = {"cuda": 4, "cpu": 2}  # distinct updates
_CHUNK_S = 2.0  # of steps between two looks at the device
_REPORT_S = 5.0
_COMPARED_S = 60.0  # the first and the last minute, or a third of what there is
_BUILD_S = 600.0  # most delay of the last rank after the first: kernels are compiled
_MORE_S = 30.0  # beyond rank 0's own limit
_NAME = "burn_in"
SEED = 1
_GIB = 2**30
_LARGEST_BATCH = 448  # the global batch of the published runs on one node
# For BERT-large in 16 bits: weights, moments and kernels' buffers; then what a sequence of mean
# length keeps for its backward. By arithmetic, with a margin; a batch that does not fit is halved.
_FIXED_BYTES = 10 * _GIB
_SEQUENCE_BYTES = 0.28 * _GIB
_CPU_BATCH = 8

NAMED_BELOW = 0.95  # of the median of all devices
FAILS_BELOW = 0.90
LARGEST_DROP = 0.05  # of the rate, from beginning to end
PUBLISHED_SHARE = 0.7  # of the published rate; below, something is likely to be wrong

Report = Callable[["Trace"], None]
Show = Callable[[list[Finding], dict[str, Any]], None]
"""Shows the findings; other keys go into `--json`."""
Device = Mapping[str, Any]
"""The result of one device, ready for JSON; rates in sequences per second."""


@dataclass(slots=True)
class Trace:
    """A device's progress: seconds and samples of each chunk of steps."""

    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    steps: int = 0
    non_finite_steps: int = 0
    loss: float = math.nan
    hottest: int | None = None
    throttled: set[str] = field(default_factory=set)

    def rate(self) -> float:
        """Samples per second over all chunks."""
        return sum(self.samples) / sum(self.seconds)

    def ends(self, longest_s: float) -> tuple[float, float, float]:
        """Samples per second at the beginning and at the end, and the seconds of each part."""
        part = min(longest_s, sum(self.seconds) / 3)
        first = _rate_of(list(zip(self.samples, self.seconds, strict=True)), part)
        last = _rate_of(list(zip(self.samples[::-1], self.seconds[::-1], strict=True)), part)
        return first, last, part


def _rate_of(chunks: list[tuple[int, float]], part_s: float) -> float:
    samples, seconds = 0, 0.0
    for more, taken in chunks:
        samples, seconds = samples + more, seconds + taken
        if seconds >= part_s:
            break
    return samples / seconds


def num_devices(options: Options) -> int:
    """The number of devices of this machine that train."""
    if options.wanted_device == "cpu" or not torch.cuda.is_available():
        return 1
    return torch.cuda.device_count()


def burn_in(info: RankInfo, seconds: float, options: Options, show: Show) -> int:
    """Train on this rank's device; every rank must call it.

    Rank 0 shows the results of all devices. A rank that cannot reach rank 0 reports that if it is
    the first of its node. Returns the exit status, the same on all ranks; 1 on those that lost rank
    0.
    """
    if info.world_size == 1:
        result = _of_this_device(info, seconds, options, _reporter(info, seconds, None))
        return _judged({0: result}, 1, show)
    try:
        return _with_others(info, seconds, options, show)
    except MeetingError as error:
        where, problem, remedy = error.args
        lost = fail(_NAME, f"{where} on {host_name()}: {problem}", remedy)
        if info.local_rank == 0:
            show([lost], {})
        return exit_status([lost])


def _with_others(info: RankInfo, seconds: float, options: Options, show: Show) -> int:
    meeting = meet(info, options.timeout_s)
    meeting.send("here", None)
    end = time.monotonic() + seconds + _BUILD_S  # a rank that fails early waits for the others
    everyone = range(info.world_size)
    came = meeting.receive("here", everyone, options.timeout_s) if info.rank == 0 else everyone
    report = _reporter(info, seconds, meeting)
    result = _of_this_device(info, seconds, options, report)
    meeting.send("result", result)
    if info.rank != 0:
        patience = end - time.monotonic() + options.timeout_s + _MORE_S
        status = int(meeting.hear("status", patience))
        meeting.part()
        return status
    results = meeting.receive("result", came, end - time.monotonic())
    # Shown before any rank ends, because the launcher ends the others when one fails.
    status = _judged(results, info.world_size, show)
    meeting.announce("status", status)
    meeting.part(others=len(results) - 1)
    return status


def _judged(results: dict[int, dict[str, Any]], world_size: int, show: Show) -> int:
    devices = [results[rank] for rank in sorted(results)]
    missing = [rank for rank in range(world_size) if rank not in results]
    findings = judge(devices, missing)
    show(findings, {"burn_in": {"devices": devices}})
    return exit_status(findings)


def _of_this_device(
    info: RankInfo, seconds: float, options: Options, report: Report
) -> dict[str, Any]:
    """The result of this rank's device; an `error` if it did not train."""
    own: dict[str, Any] = {"rank": info.rank, "host": host_name(), "error": None}
    try:
        own |= _on_device(info, seconds, options, report)
    except Exception as error:  # a device that fails in the middle may raise anything
        own["error"] = f"{error}" if isinstance(error, ConfigError) else in_short(error)
    return own


def _on_device(info: RankInfo, seconds: float, options: Options, report: Report) -> dict[str, Any]:
    device = choose_device(options.wanted_device, info, options.share_gpu)
    name = "CPU"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        bind(info, device)
        name = torch.cuda.get_device_name(device)
    else:
        set_cpu_threads(info)
    config, trace = train_what_runs(options.config, device, seconds, report)
    return {"device": str(device), "device_name": name, **_facts(config, trace, device)}


def _facts(config: RunConfig, trace: Trace, device: torch.device) -> dict[str, Any]:
    first, last, part = trace.ends(_COMPARED_S)
    model = asdict(config.model)
    return {
        "samples_per_s": trace.rate(),
        "first_samples_per_s": first,
        "last_samples_per_s": last,
        "compared_s": part,
        "seconds": sum(trace.seconds),
        "steps": trace.steps,
        "non_finite_steps": trace.non_finite_steps,
        "loss": trace.loss if math.isfinite(trace.loss) else None,
        "hottest_celsius": trace.hottest,
        "throttled_by": sorted(trace.throttled),
        "memory_peak_bytes": memory_bytes(device),
        "has_bert_large_sizes": has_bert_large_sizes(config.model),
        "max_seq_length": config.data.max_seq_length,
        "optimizer": config.optim.name,
        "local_batch_size": config.parallel.local_batch_size,
        "step_mode": config.run.step_mode,
        **{key: model[key] for key in ("num_layers", "hidden_size", "precision")},
    }


def candidates(
    given: RunConfig | None, device: torch.device, free_bytes: int
) -> Iterator[RunConfig]:
    """Configs of one rank to try in turn, until one runs and fits. `free_bytes`: of the GPU.

    A given config is the only candidate, reduced to one rank.
    """
    if given is not None:
        yield _one_rank(given)
        return
    if device.type == "cpu":
        yield _config(_CPU_BATCH)  # a model whose step takes a CPU a second or so
        return
    precision = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    batch = batch_for(free_bytes)
    while batch:
        for step_mode in ("captured", "eager"):
            large = ("model.num_layers=24", "model.hidden_size=1024")
            mode = (f"model.precision={precision}", f"run.step_mode={step_mode}")
            yield _config(batch, *large, *mode)
        batch //= 2


def _one_rank(given: RunConfig) -> RunConfig:
    data = given.data
    if data.sampler.startswith("strata"):  # one rank's batch may be too small for it
        data = replace(data, sampler="uniform")
    parallel = replace(given.parallel, nodes=1, ranks_per_node=1)
    return replace(given, parallel=parallel, data=data, run=replace(given.run, seed=SEED))


def batch_for(free_bytes: int) -> int:
    """Sequences of BERT-large in 16 bits that should fit, a multiple of 8 if at least 8."""
    batch = int((free_bytes - _FIXED_BYTES) / _SEQUENCE_BYTES)
    batch = max(1, min(_LARGEST_BATCH, batch))
    return batch - batch % 8 if batch >= 8 else batch


def _config(batch: int, *settings: str) -> RunConfig:
    return small_config(f"run.seed={SEED}", f"parallel.local_batch_size={batch}", *settings)


def train_what_runs(
    given: RunConfig | None, device: torch.device, seconds: float, report: Report
) -> tuple[RunConfig, Trace]:
    """Train by the first candidate that runs and fits into memory; return it and its trace.

    Raises the last one's ConfigError, or torch's out-of-memory error.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    reason: Exception = ConfigError("--burn-in", "has nothing to try", "give a --config")
    for config in candidates(given, device, free):
        try:
            return config, _built_and_trained(config, device, seconds, report)
        except (torch.OutOfMemoryError, ConfigError) as error:
            reason = error.with_traceback(None)  # the error holds the model that did not fit
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    raise reason


def _built_and_trained(
    config: RunConfig, device: torch.device, seconds: float, report: Report
) -> Trace:
    with training_run(config, device, num_updates=_NUM_UPDATES[device.type]) as run:
        return train_for(run, seconds, report)


def train_for(
    run: TrainingRun,
    seconds: float,
    report: Report,
    clock: Callable[[], float] = time.perf_counter,
) -> Trace:
    """Train for about `seconds`, after a step with each update; read the device once per chunk.

    A chunk has each update equally often, so chunks differ only in time.
    """
    updates = len(run.updates)
    samples = [sum(len(batch.lengths) for batch in update) for update in run.host_updates]
    began = clock()
    for number in range(updates):
        run(number).item()  # waits for the device
    rounds = max(1, int(_CHUNK_S / max(clock() - began, 1e-6)))
    trace, done = Trace(), updates
    start = reported = clock()
    while not trace.seconds or clock() - start < seconds:
        began = clock()
        bad = torch.zeros((), dtype=torch.int64, device=run.device)
        for number in range(done, done + rounds * updates):
            loss = run(number)
            bad += ~torch.isfinite(loss)
        trace.non_finite_steps += int(bad.item())  # waits for the device
        trace.seconds.append(clock() - began)
        trace.samples.append(rounds * sum(samples))
        done += rounds * updates
        trace.steps, trace.loss = done - updates, float(loss.item())
        rounds = max(1, round(rounds * _CHUNK_S / trace.seconds[-1]))
        if clock() - reported >= _REPORT_S:
            reported = clock()
            _look(trace, run.device)
            report(trace)
    _look(trace, run.device)
    return trace


def _look(trace: Trace, device: torch.device) -> None:
    if device.type != "cuda":
        return
    degrees, reasons = heat(device.index or 0)
    if degrees is not None:
        trace.hottest = max(degrees, trace.hottest or 0)
    trace.throttled.update(reasons)


def _reporter(info: RankInfo, seconds: float, meeting: Meeting | None) -> Report:
    """Rank 0 prints the progress of all ranks; the others report to it."""

    def report(trace: Trace) -> None:
        now = trace.samples[-1] / trace.seconds[-1]
        rates = {info.rank: now}
        if meeting is not None:
            with suppress(MeetingError):  # only progress: the end will show a failure
                meeting.send("rate", now)
                if info.rank == 0:
                    rates = meeting.receive("rate", range(info.world_size), 0.0)
        if info.rank == 0:
            line = progress_line(sum(trace.seconds), seconds, rates)
            print(line, file=sys.stderr, flush=True)

    return report


def judge(devices: Sequence[Device], missing: Sequence[int]) -> list[Finding]:
    """Findings on the results of all devices; `missing` are ranks without one."""
    findings = []
    if missing:
        words = in_words([str(rank) for rank in missing])
        remedy = "look at that rank's output and its machine's log (dmesg: Xid)"
        findings.append(fail("burn_in.ranks", f"nothing came from rank {words}", remedy))
    for device in devices:
        if device["error"]:
            remedy = "take the device out, or mend the cause"
            findings.append(fail("burn_in.errors", f"{_name(device)}: {device['error']}", remedy))
    trained = [device for device in devices if not device["error"]]
    if not trained:
        return findings
    return [
        *findings,
        _rate(trained),
        outliers({_name(device): float(device["samples_per_s"]) for device in trained}),
        _drop(trained),
        _losses(trained),
        *_heat(trained),
        _published(trained),
    ]


def _name(device: Device) -> str:
    # With the rank, as several may share a host's CPU, or see one GPU each as device 0.
    return f"rank {device['rank']} ({device.get('device', 'no device')} on {device['host']})"


def _rate(trained: Sequence[Device]) -> Finding:
    rates = [float(device["samples_per_s"]) for device in trained]
    first = trained[0]
    model = (
        "BERT-large"
        if first["has_bert_large_sizes"]
        else (f"{first['num_layers']} layers of {first['hidden_size']}")
    )
    found = (
        f"median {statistics.median(rates):,.1f} sequences/s of {len(rates)} x "
        f"{first['device_name']}, {sum(rates):,.1f} together ({model}, {first['precision']}, "
        f"{first['step_mode']}, batch {first['local_batch_size']}, lengths up to "
        f"{first['max_seq_length']}; {first['steps']} steps in {first['seconds']:.0f} s)"
    )
    return ok("burn_in.rate", found)


def outliers(rates: Mapping[str, float]) -> Finding:
    """Name the devices that are slower than the median of all by more than the factors above."""
    name = "burn_in.outliers"
    if len(rates) < 2:
        return ok(name, "one device: nothing to compare it with")
    median = statistics.median(rates.values())
    shares = {device: rate / median for device, rate in rates.items()}
    slow = sorted((share, device) for device, share in shares.items() if share < NAMED_BELOW)
    if not slow:
        return ok(name, f"none: the slowest has {min(shares.values()):.3f} of the median")
    found = in_words([f"{device} has {share:.3f} of the median" for share, device in slow])
    found += f" (named below {NAMED_BELOW}, fails below {FAILS_BELOW})"
    remedy = "look at its clocks, power, temperature and PCIe link; take it out if it stays so"
    make = fail if slow[0][0] < FAILS_BELOW else warn
    return make(name, found, remedy)


def _drop(trained: Sequence[Device]) -> Finding:
    name = "burn_in.drop"
    kept = {
        _name(device): device["last_samples_per_s"] / device["first_samples_per_s"]
        for device in trained
    }
    worst = min(kept, key=lambda device: kept[device])
    part = trained[0]["compared_s"]
    found = f"the last {part:.0f} s at {kept[worst]:.3f} of the first {part:.0f} s ({worst})"
    if kept[worst] < 1 - LARGEST_DROP:
        remedy = "look for heat (fans, inlet), power limits and other jobs on the machine"
        return warn(name, found, remedy)
    return ok(name, found)


def _losses(trained: Sequence[Device]) -> Finding:
    name = "burn_in.losses"
    wrong = [device for device in trained if device["non_finite_steps"] or device["loss"] is None]
    if wrong:
        words = [f"{_name(device)} in {device['non_finite_steps']} steps" for device in wrong]
        remedy = "take the device out: the others had finite ones of the same numbers"
        if len(wrong) == len(trained):
            remedy = "lower the learning rate, or use another precision"
        return fail(name, f"not finite: {in_words(words)}", remedy)
    return ok(name, f"finite, the last one {trained[0]['loss']:.3f}")


def _heat(trained: Sequence[Device]) -> list[Finding]:
    name = "burn_in.heat"
    known = [device for device in trained if device["hottest_celsius"] is not None]
    throttled = [device for device in trained if device["throttled_by"]]
    if throttled:
        words = [f"{_name(device)}: {', '.join(device['throttled_by'])}" for device in throttled]
        remedy = "look at fans, inlet temperature and power supply (nvidia-smi -q -d PERFORMANCE)"
        return [warn(name, f"clocks held down on {in_words(words)}", remedy)]
    if known:
        hottest = max(known, key=lambda device: int(device["hottest_celsius"]))
        return [ok(name, f"at most {hottest['hottest_celsius']} C ({_name(hottest)})")]
    return []


def published_rate(device_name: str) -> dict[str, str] | None:
    """Row of the best published run on the accelerator with torch's name; None if unknown."""
    text = resources.files("bert_tools.doctor").joinpath("published_rates.csv").read_text("utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    found = (row for row in rows if re.search(row["pattern"], device_name, re.IGNORECASE))
    return next(found, None)


def _published(trained: Sequence[Device]) -> Finding:
    name, first = "burn_in.published", trained[0]
    if not first["has_bert_large_sizes"]:
        return ok(name, "nothing is published for this model")
    row = published_rate(first["device_name"])
    if row is None:
        return ok(name, f"{first['device_name']} is not in our table of published results")
    # Without evaluation if the logs give that.
    best = float(row["train_only"] or row["end_to_end"])
    share = statistics.median(device["samples_per_s"] for device in trained) / best
    found = (
        f"{share:.2f} of the best published {best:,.1f} sequences/s a device, "
        f"{'without' if row['train_only'] else 'with'} evaluation ({row['submitter']}, MLPerf "
        f"Training {row['round']}, {row['accelerators']} x {row['accelerator']}, LAMB at a global "
        f"batch of {row['global_batch_size']}, with all-reduce; here {first['optimizer']}, no "
        "all-reduce)"
    )
    if share < PUBLISHED_SHARE:
        remedy = "look at clocks and power limit; published runs from H100 on train in FP8"
        return warn(name, f"{found}, below {PUBLISHED_SHARE}", remedy)
    return ok(name, found)


def progress_line(done_s: float, total_s: float, rates: Mapping[int, float]) -> str:
    """A progress line: time left, rate, and the slowest of several ranks."""
    left, plural = max(0, round(total_s - done_s)), "s" * (len(rates) > 1)
    line = (
        f"burn-in: {left // 60}:{left % 60:02d} left, {len(rates)} device{plural}, "
        f"{sum(rates.values()):,.1f} sequences/s"
    )
    if len(rates) > 1:
        slowest = min(rates, key=lambda rank: rates[rank])
        share = rates[slowest] / statistics.median(rates.values())
        line += f", slowest rank {slowest} with {share:.2f} of the median"
    return line
