"""What made a run slow, by its own files; none of it changes an accuracy."""

from statistics import median

from bert_tools.report.causes import Cause
from bert_tools.report.run import Run

LEAST_RATES = 6  # that have a first and a last third
DROP = 0.9  # of the first third's median rate
SLOW_RANK = 1.5  # where the run's config is not there to say
WAITING_SHARE = 0.05  # of a step's time


def find_slowness(run: Run) -> list[Cause]:
    """The likeliest first."""
    found = [_throughput_drop(run), _slow_rank(run), _waits_for_data(run)]
    return [cause for cause in found if cause is not None]


def _throughput_drop(run: Run) -> Cause | None:
    rates, third = run.throughputs, len(run.throughputs) // 3
    if len(rates) < LEAST_RATES:
        return None
    before, after = median(rates[:third]), median(rates[-third:])
    if after >= DROP * before:
        return None
    return Cause(
        "throughput_drop",
        "devices slowed down during the run: heat, power, other jobs, or a slower disk",
        f"median {before:,.1f} samples/s in the first third, {after:,.1f} in the last",
        "mlperf_bert doctor --burn-in 10m on the same nodes",
        decisive=False,
    )


def _slow_rank(run: Run) -> Cause | None:
    ratios = [record.get("slowest_over_median") for record in run.records]
    known = [ratio for ratio in ratios if ratio is not None]
    factor = run.config.run.straggler_factor if run.config else SLOW_RANK
    if not known or median(known) <= factor:
        return None
    return Cause(
        "slow_rank",
        "one rank is slower than the others, which wait for it",
        f"the slowest rank needs {median(known):.2f} times the median for its own work "
        f"(median of {len(known)} records)",
        "stdout.log names rank and host: mlperf_bert doctor --burn-in 10m there",
        decisive=False,
    )


def _waits_for_data(run: Run) -> Cause | None:
    shares = [
        record["wait_ms"] / record["step_ms"]
        for record in run.records
        if record.get("wait_ms") is not None and record.get("step_ms")
    ]
    if not shares or median(shares) <= WAITING_SHARE:
        return None
    return Cause(
        "waits_for_data",
        "steps wait for their data",
        f"{median(shares):.0%} of the time of rank 0's steps (median of {len(shares)} records)",
        "mlperf_bert stage-data, and mlperf_bert doctor --only disk",
        decisive=False,
    )
