"""`doctor --burn-in`: every device trains on its own for a time and is held against the others.

Nothing is reduced over the ranks, so that one that is slow is seen and slows no other.
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from bert_tools.bench.cli import small_config
from bert_tools.bench.training_run import TrainingRun, training_run
from bert_tools.doctor.burn_in_findings import judge, progress_line
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
)
from mlperf_bert.run.metrics import memory_bytes

_NUM_UPDATES = {"cuda": 4, "cpu": 2}  # distinct ones
_CHUNK_S = 2.0  # of steps between two looks at the device
_REPORT_S = 5.0
_COMPARED_S = 60.0  # the first and the last minute, or a third of what there is
_BUILD_S = 600.0  # by which the last rank may be later than the first: kernels are compiled
_MORE_S = 30.0  # over a limit that rank 0 keeps
_NAME = "burn_in"
SEED = 1
_GIB = 2**30
_LARGEST_BATCH = 448  # the global batch of the published runs on one node
# Of BERT-large in 16 bits: weights, moments and kernels' own; then what a sequence of the mean
# length keeps for its backward. By arithmetic, with room to spare; what does not fit is halved.
_FIXED_BYTES = 10 * _GIB
_SEQUENCE_BYTES = 0.28 * _GIB
_CPU_BATCH = 8

Report = Callable[["Trace"], None]
Show = Callable[[list[Finding], dict[str, Any]], None]
"""Gets the findings, and what goes beside them into `--json`."""


@dataclass(slots=True)
class Trace:
    """What a device has done so far: seconds and samples of each chunk of steps."""

    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    steps: int = 0
    non_finite_steps: int = 0
    loss: float = math.nan
    hottest: int | None = None
    throttled: set[str] = field(default_factory=set)

    def rate(self) -> float:
        """Samples a second of all of it."""
        return sum(self.samples) / sum(self.seconds)

    def ends(self, longest_s: float) -> tuple[float, float, float]:
        """Samples a second at the beginning and at the end, and how many seconds each was."""
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
    """How many devices of this machine are to train."""
    if options.wanted_device == "cpu" or not torch.cuda.is_available():
        return 1
    return torch.cuda.device_count()


def burn_in(info: RankInfo, seconds: float, options: Options, show: Show) -> int:
    """Train on this rank's device; every rank must call it.

    What all devices did is shown on rank 0. A rank that cannot reach rank 0 shows that, if it is
    the first of its node. Returns the exit status, the same on all ranks; 1 on those that lost
    rank 0.
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
    end = time.monotonic() + seconds + _BUILD_S  # one that fails early waits for the others
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
    # Shown before any rank ends: where one fails, the launcher ends the others.
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
    """What this rank's device did; an `error` where it did not train."""
    own: dict[str, Any] = {"rank": info.rank, "host": host_name(), "error": None}
    try:
        own |= _on_device(info, seconds, options, report)
    except Exception as error:  # a device that fails in the middle raises what it likes
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
    """The result of one device, ready for JSON; rates in sequences a second."""
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

    One that was given is the only one, as one rank of it.
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
    if data.sampler.startswith("strata"):  # which one rank's batch may be too small for
        data = replace(data, sampler="uniform")
    parallel = replace(given.parallel, nodes=1, ranks_per_node=1)
    return replace(given, parallel=parallel, data=data, run=replace(given.run, seed=SEED))


def batch_for(free_bytes: int) -> int:
    """Sequences of BERT-large in 16 bits that should fit, a multiple of 8 where there are 8."""
    batch = int((free_bytes - _FIXED_BYTES) / _SEQUENCE_BYTES)
    batch = max(1, min(_LARGEST_BATCH, batch))
    return batch - batch % 8 if batch >= 8 else batch


def _config(batch: int, *settings: str) -> RunConfig:
    return small_config(f"run.seed={SEED}", f"parallel.local_batch_size={batch}", *settings)


def train_what_runs(
    given: RunConfig | None, device: torch.device, seconds: float, report: Report
) -> tuple[RunConfig, Trace]:
    """Train by the first candidate that runs and fits into memory; which one, and what it did.

    Raises the last one's ConfigError, or torch's out-of-memory error.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    reason: Exception = ConfigError("--burn-in", "has nothing to try", "give a --config")
    for config in candidates(given, device, free):
        try:
            return config, _built_and_trained(config, device, seconds, report)
        except (torch.OutOfMemoryError, ConfigError) as error:
            reason = error.with_traceback(None)  # which holds the model that did not fit
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
    """Train for about so long, after a step with each update; the device is read once a chunk.

    A chunk has each update equally often, so that chunks differ in time alone.
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
    """Rank 0 prints what all are doing now; the others tell it."""

    def report(trace: Trace) -> None:
        now = trace.samples[-1] / trace.seconds[-1]
        rates = {info.rank: now}
        if meeting is not None:
            with suppress(MeetingError):  # progress alone: the end will tell
                meeting.send("rate", now)
                if info.rank == 0:
                    rates = meeting.receive("rate", range(info.world_size), 0.0)
        if info.rank == 0:
            line = progress_line(sum(trace.seconds), seconds, rates)
            print(line, file=sys.stderr, flush=True)

    return report
