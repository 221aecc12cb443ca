"""`doctor --burn-in`, what the devices did becomes findings: who is slow, hot or wrong.

They are compared with what MLPerf's submitters reached on an accelerator of that name
(published_rates.csv).
"""

import csv
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mlperf_bert.distributed.network_test.findings import Finding, fail, in_words, ok, warn

_FILE = "published_rates.csv"

NAMED_BELOW = 0.95  # of the median of all devices
FAILS_BELOW = 0.90
LARGEST_DROP = 0.05  # of the rate, from beginning to end
PUBLISHED_SHARE = 0.7  # of the published rate; below, something is likely to be wrong
Device = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRate:
    """Sequences a second of one accelerator in the best published run on `accelerators` of them."""

    accelerator: str
    end_to_end: float
    train_only: float | None
    accelerators: int
    global_batch_size: int
    round: str
    submitter: str

    @property
    def best(self) -> float:
        """Without evaluation where the logs tell it."""
        return self.train_only or self.end_to_end


def published_rate(device_name: str) -> PublishedRate | None:
    """The best published rate of the accelerator that torch names so; None where it is unknown."""
    for row in _rows():
        if re.search(row["pattern"], device_name, re.IGNORECASE):
            return PublishedRate(
                accelerator=row["accelerator"],
                end_to_end=float(row["end_to_end"]),
                train_only=float(row["train_only"]) if row["train_only"] else None,
                accelerators=int(row["accelerators"]),
                global_batch_size=int(row["global_batch_size"]),
                round=row["round"],
                submitter=row["submitter"],
            )
    return None


def _rows() -> list[dict[str, str]]:
    text = resources.files("bert_tools.doctor").joinpath(_FILE).read_text("utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def judge(devices: Sequence[Device], missing: Sequence[int]) -> list[Finding]:
    """Findings on the results of all devices; `missing` are ranks without one."""
    findings = []
    if missing:
        words = in_words([str(rank) for rank in missing])
        remedy = "look at that rank's output and its machine's log (dmesg: Xid)"
        findings.append(fail("burn_in.ranks", f"nothing came from rank {words}", remedy))
    for device in devices:
        if device["error"]:
            remedy = "take the device out, or mend that"
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
    # With the rank: several may have a host's CPU, or be shown one GPU each by the launcher.
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


def _published(trained: Sequence[Device]) -> Finding:
    name = "burn_in.published"
    device_name = str(trained[0]["device_name"])
    if not trained[0]["has_bert_large_sizes"]:
        return ok(name, "nothing is published for this model")
    published = published_rate(device_name)
    if published is None:
        return ok(name, f"{device_name} is not in our table of published results")
    rate = statistics.median(float(device["samples_per_s"]) for device in trained)
    return judge_published(rate, trained[0]["optimizer"], published)


def judge_published(rate: float, optimizer: str, published: PublishedRate) -> Finding:
    """`rate` in sequences a second of a device against what submitters reached with theirs."""
    name = "burn_in.published"
    share = rate / published.best
    kind = "without evaluation" if published.train_only else "with evaluation"
    found = (
        f"{share:.2f} of the best published {published.best:,.1f} sequences/s a device, {kind} "
        f"({published.submitter}, MLPerf Training {published.round}, {published.accelerators} x "
        f"{published.accelerator}, LAMB at a global batch of {published.global_batch_size}, with "
        f"all-reduce; here {optimizer}, no all-reduce)"
    )
    if share < PUBLISHED_SHARE:
        remedy = "look at clocks and power limit; published runs from H100 on train in FP8"
        return warn(name, f"{found}, below {PUBLISHED_SHARE}", remedy)
    return ok(name, found)


def progress_line(done_s: float, total_s: float, rates: Mapping[int, float]) -> str:
    """One line for people: how far, how fast, and the slowest of several ranks."""
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
