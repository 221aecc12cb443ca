"""Which batch would be best now: of runs that measured their gradients' noise (docs/goodput.md)."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bert_tools.report.chart import Chart, Point, Series, curve_label, significant
from bert_tools.report.facts import RunFacts
from bert_tools.report.throughput_model import Measured, Setup, ThroughputModel, best_setup, fit
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.optim.noise_scale import efficiency, goodput, learning_rate_gain

BATCH = "sequences a batch"
_MOST_NOISE, _MOST_SECONDS = 1e12, 1e9  # beyond: not what a run of ours wrote
_POINTS = 60  # of a curve
_LARGER_FORWARDS = 4  # than any that was measured: beyond, memory and speed are guesses
_MOST_FORWARDS = 64
_FACTORS = (1, 2, 4, 8, 16, 32)
_TIMES = "\N{MULTIPLICATION SIGN}"


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
            about="what a sample is worth in a batch, over one in the run's own; a mark: that one",
            series=tuple(
                Series(
                    run=each.run,
                    label=curve_label(each.label, "", several=several),
                    points=tuple((x, each.efficiency_at(x)) for x in _batches(each)),
                )
                for each in found
            ),
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


def _goodput_curve(each: BatchFacts, *, several: bool) -> Series:
    points: list[Point]
    if each.model is None:
        words = "with more ranks, each as fast"
        points = [(x, each.with_more_ranks(x)) for x in _batches(each)]
    else:
        words = "on the same ranks"
        last = max(_batches(each)[-1], each.best.global_batch_size if each.best else 0)
        best: dict[float, float | None] = {}
        for value, batch in sorted(
            (each.goodput_of(x), x.global_batch_size) for x in each.candidates
        ):
            if batch <= last:
                best[batch] = value
        points = sorted(best.items())
    label = curve_label(each.label, words, several=several)
    return Series(run=each.run, label=label, points=tuple(points))


def _batches(each: BatchFacts) -> list[float]:
    """Of a curve: from the run's own to where a sample is worth a quarter."""
    low, high = float(each.batch), max(4.0 * each.batch, each.batch_of(0.25))
    return [low + (high - low) * place / _POINTS for place in range(_POINTS + 1)]


def _of_run(number: int, facts: RunFacts, runs: Sequence[RunFacts]) -> BatchFacts | None:
    config = facts.run.config
    known = [each for each in facts.run.records if _is_noise(each.get("noise_scale"))]
    timed = _measured(facts)
    if config is None or timed is None or not known:
        return None
    others = [each for each in runs if _is_alike(config, each)]
    measured = tuple(each for each in map(_measured, others) if each is not None)
    setups = {each.setup for each in measured}
    model = _fitted(measured) if len(setups) > 1 else None
    largest = max(each.local_batch_size for each in setups)
    candidates = tuple(_candidates(timed.setup, largest))
    phi, batch = float(known[-1]["noise_scale"]), timed.setup.global_batch_size
    plain = known[-1].get("noise_scale_plain")
    return BatchFacts(
        run=number,
        label=facts.label,
        step=known[-1]["step"],
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
    known = [each / 1e3 for each in facts.run.known("step_ms") if 0 < each < 1e3 * _MOST_SECONDS]
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
            yield replace(setup, local_batch_size=local, grad_accum_steps=forwards)
            forwards *= 2
        local *= 2


def in_words(each: BatchFacts) -> list[str]:
    """What follows from the noise scale, in sentences."""
    plain = "" if each.plain is None else f" ({significant(each.plain, 3)} of plain gradients)"
    words = [
        f"At step {each.step:,} the noise scale is {significant(each.noise_scale, 3)} "
        f"sequences{plain}; the batch has {each.batch:,}.",
        f"Up to {round(each.batch_of(0.9)):,} sequences a sample keeps 90 % of its worth, up to "
        f"{round(each.batch_of(0.5)):,} half of it.",
    ]
    if each.best is None or each.model is None:
        words.append(
            "One setup was timed, which does not say how long other batches take: report this run "
            "together with short ones of another local_batch_size to see the best on these ranks."
        )
        return words
    best, error = each.best, each.model.error  # of the fitted times, in logarithms
    gain = each.goodput_of(best) / each.goodput_of(each.setup)
    last = (
        f"On these {each.setup.ranks} ranks the best batch is {best.global_batch_size:,} "
        f"(local_batch_size {best.local_batch_size}, grad_accum_steps {best.grad_accum_steps}): "
        f"{significant(gain, 3)} {_TIMES} the goodput of now, by times fitted within "
        f"{100 * error:.1f} %."
    )
    if best != each.setup and math.log(gain) <= error:
        last += " That is no more than the fit is off by: the batch of now may be as good."
    if best.local_batch_size > each.largest_forward:
        last += " No run shown had so large a forward: see whether it fits in memory."
    return [*words, last]


def batch_rows(each: BatchFacts) -> Iterator[list[str]]:
    """The run's batch and larger ones: worth, samples and updates needed, learning rates."""
    for factor in _FACTORS:
        batch = each.batch * factor
        worth = each.efficiency_at(batch)
        root = learning_rate_gain(each.noise_scale, each.batch, batch, "square_root")
        # AdaScale is of SGD, which sees gradients as they are.
        adascale = None
        if each.plain is not None:
            adascale = learning_rate_gain(each.plain, each.batch, batch, "adascale")
        times = [
            "unknown" if value is None else f"{significant(value, 3)} {_TIMES}"
            for value in (1 / worth, 1 / worth / factor, root, adascale)
        ]
        yield [f"{batch:,}", f"{100 * worth:.1f} %", *times]
