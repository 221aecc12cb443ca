"""Which batch would be best now: of runs that measured their gradients' noise (docs/goodput.md)."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bert_tools.report.chart import Chart, Series
from bert_tools.report.facts import RunFacts
from bert_tools.report.series import Point
from bert_tools.report.throughput_model import Measured, Setup, ThroughputModel, best_setup, fit
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.optim.noise_scale import efficiency, goodput

BATCH = "sequences a batch"
_MOST_NOISE, _MOST_SECONDS = 1e12, 1e9  # beyond: not what a run of ours wrote
_POINTS = 60  # of a curve
_LARGER_FORWARDS = 4  # than any that was measured: beyond, memory and speed are guesses
_MOST_FORWARDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """What a run says about its batch.

    `noise_scale` (sequences) is the last one that is known, as the optimizer scales gradients;
    `plain` may be None. `model` is of the times of the report's runs, and `best` of `candidates`,
    all on the run's ranks and the run's own setup among them; both None where only one setup was
    timed. `largest_forward`: of all that were timed, in sequences.
    """

    run: int
    label: str
    step: int
    setup: Setup
    noise_scale: float
    plain: float | None
    samples_per_s: float
    model: ThroughputModel | None
    largest_forward: int
    candidates: tuple[Setup, ...]
    best: Setup | None

    @property
    def batch(self) -> int:
        """Of the run, in sequences."""
        return self.setup.global_batch_size

    def efficiency_at(self, batch: float) -> float:
        """Of a sample in another batch, over one in the run's."""
        return efficiency(self.noise_scale, self.batch, batch)

    def batch_of(self, share: float) -> float:
        """The batch at which a sample is worth that share of one in the run's batch."""
        return (self.noise_scale + self.batch) / share - self.noise_scale

    def goodput_of(self, setup: Setup) -> float:
        """Samples a second, counted as samples in the run's batch; by the fitted times."""
        assert self.model is not None
        batch = setup.global_batch_size
        return goodput(self.model.throughput(setup), self.noise_scale, self.batch, batch)

    def with_more_ranks(self, batch: float) -> float:
        """The same where the batch grows with the ranks and each stays as fast: at most that."""
        return goodput(self.samples_per_s * batch / self.batch, self.noise_scale, self.batch, batch)


def batch_facts(runs: Sequence[RunFacts]) -> list[BatchFacts]:
    """Of those runs that know their noise scale."""
    return [found for number, each in enumerate(runs) if (found := _of_run(number, each, runs))]


def batch_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """Efficiency and goodput over the batch."""
    found = batch_facts(runs)
    if not found:
        return []
    several = len(runs) > 1
    # Those of several runs lie close together: their colours say whose they are.
    now = tuple((float(each.batch), "" if several else "batch now", each.run) for each in found)
    best = tuple(
        (float(each.best.global_batch_size), "" if several else "best", each.run)
        for each in found
        if each.best
    )
    return [
        Chart(
            key="batch_efficiency",
            title="Efficiency of a batch",
            unit="",
            about="what a sample is worth in a batch, over one in the run's own; a mark: that one",
            series=tuple(_efficiency_curve(each, several=several) for each in found),
            floor=0.0,
            levels=((0.5, "half"),),
            marks=now,
            across=BATCH,
        ),
        Chart(
            key="batch_goodput",
            title="Goodput of a batch",
            unit="samples/s",
            about="throughput times efficiency; a mark: the best batch on the run's ranks"
            if best
            else "throughput times efficiency, with a rank for each further share of the batch",
            series=tuple(_goodput_curve(each, several=several) for each in found),
            floor=0.0,
            marks=best or now,
            across=BATCH,
        ),
    ]


def _efficiency_curve(each: BatchFacts, *, several: bool) -> Series:
    points: tuple[Point, ...] = tuple((x, each.efficiency_at(x)) for x in _batches(each))
    return Series(run=each.run, label=_label(each, "", several), style="solid", points=points)


def _goodput_curve(each: BatchFacts, *, several: bool) -> Series:
    if each.model is None:
        points: tuple[Point, ...] = tuple((x, each.with_more_ranks(x)) for x in _batches(each))
        label = _label(each, "with more ranks, each as fast", several)
        return Series(run=each.run, label=label, style="solid", points=points)
    best: dict[int, float] = {}
    last = max(_batches(each)[-1], each.best.global_batch_size if each.best else 0)
    for setup in each.candidates:
        batch, value = setup.global_batch_size, each.goodput_of(setup)
        if batch <= last:
            best[batch] = max(best.get(batch, 0.0), value)
    label = _label(each, "on the same ranks", several)
    return Series(run=each.run, label=label, style="solid", points=tuple(sorted(best.items())))


def _batches(each: BatchFacts) -> list[float]:
    """Of a curve: from the run's own to where a sample is worth a quarter."""
    low, high = float(each.batch), max(4.0 * each.batch, each.batch_of(0.25))
    return [low + (high - low) * place / _POINTS for place in range(_POINTS + 1)]


def _label(each: BatchFacts, words: str, several: bool) -> str:
    return ", ".join(filter(None, (each.label if several else "", words))) or "this run"


def _of_run(number: int, facts: RunFacts, runs: Sequence[RunFacts]) -> BatchFacts | None:
    config, records = facts.run.config, facts.run.records
    known = [each for each in records if _is_noise(each.get("noise_scale"))]
    timed = _measured(facts)
    if config is None or timed is None or not known:
        return None
    last = known[-1]
    others = [each for each in runs if _is_alike(config, each)]
    measured = tuple(each for each in map(_measured, others) if each is not None)
    setups = {each.setup for each in measured}
    model = _fitted(measured) if len(setups) > 1 else None
    largest = max(each.local_batch_size for each in setups)
    candidates = tuple(_candidates(timed.setup, largest))
    phi, batch = float(last["noise_scale"]), timed.setup.global_batch_size
    plain = last.get("noise_scale_plain")
    return BatchFacts(
        run=number,
        label=facts.label,
        step=last["step"],
        setup=timed.setup,
        noise_scale=phi,
        plain=float(plain) if plain is not None and _is_noise(plain) else None,
        samples_per_s=batch / timed.seconds,
        model=model,
        largest_forward=largest,
        candidates=candidates,
        best=None if model is None else best_setup(model, candidates, phi, batch),
    )


@lru_cache(maxsize=32)
def _fitted(measured: tuple[Measured, ...]) -> ThroughputModel:
    """Once for all runs that cost the same, and for charts and words."""
    return fit(measured)


def _is_noise(value: float | None) -> bool:
    return value is not None and 0 <= value <= _MOST_NOISE


def _is_alike(config: RunConfig, other: RunFacts) -> bool:
    """Whether sequences of both runs cost the same."""
    theirs = other.run.config
    return theirs is not None and (theirs.model, theirs.data.max_seq_length) == (
        config.model,
        config.data.max_seq_length,
    )


def _measured(facts: RunFacts) -> Measured | None:
    """What an update of a run took, the median of its intervals."""
    config = facts.run.config
    times = [each.get("step_ms") for each in facts.run.records]
    known = [
        value / 1e3 for value in times if value is not None and 0 < value < 1e3 * _MOST_SECONDS
    ]
    if config is None or not known:
        return None
    parallel = config.parallel
    setup = Setup(
        ranks=parallel.world_size,
        nodes=parallel.nodes,
        local_batch_size=parallel.local_batch_size,
        grad_accum_steps=parallel.grad_accum_steps,
    )
    return Measured(setup, statistics.median(known))


def _candidates(setup: Setup, largest: int) -> Iterator[Setup]:
    """On the same ranks: the run's own setup; then forwards of half as many and of up to four times
    as many sequences as were measured, and more of them an update.
    """
    yield setup
    local = max(1, setup.local_batch_size // 2)
    while local <= largest * _LARGER_FORWARDS:
        forwards = 1
        while forwards <= _MOST_FORWARDS:
            yield Setup(
                ranks=setup.ranks,
                nodes=setup.nodes,
                local_batch_size=local,
                grad_accum_steps=forwards,
            )
            forwards *= 2
        local *= 2
