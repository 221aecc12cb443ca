"""What the clock of an MLPerf log says of a run: its phases, its rates, where it was resumed."""

from dataclasses import dataclass

from bert_tools.common.log_reader import Record, RunLog, is_number

_MS_PER_S = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds by the log; None where it does not tell both ends of a phase.

    `run_s` is MLPerf's time to train, from `run_start` to `run_stop`; `evaluation_s` is all
    evaluations together; `init_s` the time before. `train_samples` is the last that is told, as
    MLPerf's checkers take it. `seen_s` is from `run_start` to the last record
    of a run that has not stopped. `rates` are samples and samples a second at that point;
    `resumed_at` says after how many samples a resumed run went on, if the log says that it is one.
    """

    init_s: float | None
    run_s: float | None
    seen_s: float | None
    evaluation_s: float | None
    train_samples: int | None
    rates: tuple[tuple[int, float], ...]
    resumed_at: int | None


def timing_of(log: RunLog) -> Timing:
    """Of a log; times that go backwards count as not told."""
    start, stop = _first(log, "run_start"), _first(log, "run_stop")
    return Timing(
        init_s=_between(_first(log, "init_start"), _first(log, "init_stop")),
        run_s=_between(start, stop),
        seen_s=_between(start, log.records[-1]) if log.records else None,
        evaluation_s=_evaluations_s(log),
        train_samples=_integer(_last(log, "train_samples")),
        rates=_rates(log),
        resumed_at=resumed_at(log),
    )


def resumed_at(log: RunLog) -> int | None:
    """Samples of the checkpoint that a log's run went on from; None where it began anew."""
    record = _first(log, "resumed")
    if record is None or record.value is not True:
        return None
    return _count(record.metadata.get("samples"))


def _first(log: RunLog, key: str) -> Record | None:
    return next(iter(log.named(key)), None)


def _last(log: RunLog, key: str) -> Record | None:
    return next(reversed(log.named(key)), None)


def _integer(record: Record | None) -> int | None:
    return _count(record.value) if record is not None else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _between(start: Record | None, stop: Record | None) -> float | None:
    if start is None or stop is None or stop.time_ms < start.time_ms:
        return None
    return (stop.time_ms - start.time_ms) / _MS_PER_S


def _evaluations_s(log: RunLog) -> float | None:
    """Of evaluations that have begun and ended, one after the other."""
    total, began, count = 0.0, None, 0
    for record in log.records:
        if record.key == "eval_start":
            began = record
        elif record.key == "eval_stop" and began is not None:
            seconds, began = _between(began, record), None
            if seconds is None:
                return None
            total, count = total + seconds, count + 1
    return total if count else None


def _rates(log: RunLog) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for record in log.named("tracked_stats"):
        rate = record.value.get("throughput") if isinstance(record.value, dict) else None
        told = record.metadata.get("samples_count") or record.metadata.get("epoch_num")
        samples = _count(told)
        if samples is None or (found and samples <= found[-1][0]):
            continue
        if isinstance(rate, int | float) and is_number(rate) and 0 < rate < 1e300:
            found.append((samples, float(rate)))
    return tuple(found)
