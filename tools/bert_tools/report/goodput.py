"""The best batch for runs that measured gradient noise (docs/how/goodput.md).

The time of an update by ranks and batch follows Pollux's model, fitted to measured updates:

    forward and backward    T_grad = alpha_g + beta_g m             m sequences on a rank
    all-reduce              T_sync = 0 on one rank, else alpha + beta (K - 2) of K ranks,
                                     with other constants on one node than on more
    update                  T = s T_grad + (T_grad^gamma + T_sync^gamma)^(1 / gamma)
                                     s forwards before the last; gamma = 1: nothing overlaps,
                                     large: the longer of both hides the other

Source: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning"
(arXiv 2008.12260), section 4.1, fit by the root of the mean squared logarithmic error included.
As there, what was never measured is assumed to cost nothing.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bert_tools.report.chart import Chart, Point, Series, curve_label, significant
from bert_tools.report.facts import RunFacts
from bert_tools.squad.noise_scale import efficiency, goodput, learning_rate_gain
from mlperf_bert.config.run_config import RunConfig

Floats = npt.NDArray[np.float64]

_GAMMAS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
_STARTS = (0.02, 0.5, 0.98)  # constant part of a time that is split in two
_LEAST_SHARE = 1e-9  # smallest constant, as a share of the shortest measured time


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The setup of an update: ranks, nodes, sequences per forward, forwards per update."""

    ranks: int
    nodes: int = 1
    local_batch_size: int
    grad_accum_steps: int = 1

    @property
    def global_batch_size(self) -> int:
        """Sequences of an update."""
        return self.ranks * self.local_batch_size * self.grad_accum_steps


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured time of an update."""

    setup: Setup
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputModel:
    """The model's constants in seconds, except gamma; `error` is the fit's in logarithms (RMS)."""

    alpha_grad: float = 0.0
    beta_grad: float = 0.0  # a sequence
    alpha_node: float = 0.0  # all-reduce between ranks of one node
    beta_node: float = 0.0  # a rank above two
    alpha_network: float = 0.0  # between nodes
    beta_network: float = 0.0
    gamma: float = 1.0
    error: float = 0.0

    def seconds(self, setup: Setup) -> float:
        """Seconds of one update."""
        grad = self.alpha_grad + self.beta_grad * setup.local_batch_size
        on_one = setup.nodes == 1
        alpha = self.alpha_node if on_one else self.alpha_network
        beta = self.beta_node if on_one else self.beta_network
        sync = 0.0 if setup.ranks == 1 else alpha + beta * (setup.ranks - 2)
        longer = max(grad, sync)
        if longer <= 0:
            return 0.0
        # Divided by the longer one, so that no power overflows.
        powers = (grad / longer) ** self.gamma + (sync / longer) ** self.gamma
        return (setup.grad_accum_steps - 1) * grad + float(longer * powers ** (1 / self.gamma))

    def throughput(self, setup: Setup) -> float:
        """Sequences per second."""
        return setup.global_batch_size / self.seconds(setup)


def fit(measured: Sequence[Measured]) -> ThroughputModel:
    """Fit the model with the least error in the logarithms of measured times (seconds > 0).

    A constant that no two measurements can distinguish stays 0: alpha_g if all had the same batch
    per rank, the all-reduce's if all were on one rank, its beta if all had the same number of
    ranks. gamma stays 1 unless there are more setups than constants.

    Raises ValueError if nothing was measured, or a time is not above zero.
    """
    if not measured or not all(0 < each.seconds < math.inf for each in measured):
        raise ValueError("at least one measured time is needed, and all above zero")
    names = _told_apart([each.setup for each in measured])
    has_sync = any(name.startswith("alpha_n") for name in names)
    enough = len({each.setup for each in measured}) > len(names)
    gammas = _GAMMAS if has_sync and enough else _GAMMAS[:1]
    fits = (_fit_from(names, measured, gamma, start) for gamma in gammas for start in _STARTS)
    return min(fits, key=lambda model: model.error)


def best_setup(
    model: ThroughputModel, setups: Iterable[Setup], noise_scale: float, initial_batch: float
) -> Setup:
    """The setup of the highest goodput; among equals, the first."""
    return max(
        setups,
        key=lambda setup: goodput(
            model.throughput(setup), noise_scale, initial_batch, setup.global_batch_size
        ),
    )


def _told_apart(setups: Sequence[Setup]) -> list[str]:
    names = ["beta_grad"]
    if len({setup.local_batch_size for setup in setups}) > 1:
        names.append("alpha_grad")
    for place in ("node", "network"):
        here = [setup for setup in setups if (setup.nodes == 1) == (place == "node")]
        ranks = {setup.ranks for setup in here if setup.ranks > 1}
        # An all-reduce is distinguishable given a time of a forward alone, or two batches.
        if ranks and len(set(setups)) > len(names):
            names.append(f"alpha_{place}")
            if len(ranks) > 1 and len(set(setups)) > len(names):
                names.append(f"beta_{place}")
    return names


def _fit_from(
    names: Sequence[str], measured: Sequence[Measured], gamma: float, start: float
) -> ThroughputModel:
    """Levenberg-Marquardt on the constants' logarithms, from one start."""
    from scipy.optimize import least_squares

    times = [each.seconds for each in measured]
    sequences = sum(each.setup.local_batch_size * each.setup.grad_accum_steps for each in measured)
    guesses = {"beta_grad": (1 - start) * sum(times) / sequences}
    constants = np.log([guesses.get(name, start * min(times)) for name in names])
    limits = math.log(_LEAST_SHARE * min(times)), math.log(max(times) / _LEAST_SHARE)

    def model_of(logarithms: Floats) -> ThroughputModel:
        values = np.exp(np.clip(logarithms, *limits)).tolist()
        return ThroughputModel(gamma=gamma, **dict(zip(names, values, strict=True)))

    def residuals(logarithms: Floats) -> Floats:
        model = model_of(logarithms)
        return np.array([math.log(model.seconds(each.setup) / each.seconds) for each in measured])

    found = least_squares(residuals, constants, method="lm", xtol=1e-15, ftol=1e-15, gtol=1e-15)
    return replace(model_of(found.x), error=float(np.sqrt(np.mean(found.fun**2))))


BATCH = "sequences a batch"
_MOST_NOISE, _MOST_SECONDS = 1e12, 1e9  # larger values do not come from our runs
_POINTS = 60  # of a curve
_LARGER_FORWARDS = 4  # times the largest measured: beyond, memory and speed are guesses
_TESTED = 4  # times the batch: so far predictions were held against trainings (docs/how/goodput.md)
_FACTORS = (1, 2, _TESTED)
_TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """Facts about a run's batch.

    `noise_scale` (sequences) is the last known one, of plain gradients. `model` is fitted to the
    times of the report's runs; `best` is one of `candidates`, which are all on the run's ranks and
    include its own setup; both are None if only one setup was timed. `largest_forward` is the
    largest that was timed, in sequences.
    """

    run: int
    label: str
    step: int
    setup: Setup
    noise_scale: float
    samples_per_s: float
    model: ThroughputModel | None
    largest_forward: int
    candidates: tuple[Setup, ...]
    best: Setup | None

    @property
    def batch(self) -> int:
        """The run's batch in sequences."""
        return self.setup.global_batch_size

    def efficiency_at(self, batch: float) -> float:
        """Efficiency of a sample in another batch, relative to the run's batch."""
        return efficiency(self.noise_scale, self.batch, batch)

    def batch_of(self, share: float) -> float:
        """The batch at which a sample has this share of its worth in the run's batch."""
        return (self.noise_scale + self.batch) / share - self.noise_scale

    def goodput_of(self, setup: Setup) -> float:
        """Samples per second, counted as samples in the run's batch, from the fitted times."""
        assert self.model is not None
        batch = setup.global_batch_size
        return goodput(self.model.throughput(setup), self.noise_scale, self.batch, batch)

    def with_more_ranks(self, batch: float) -> float:
        """An upper bound if the batch grows with the ranks and each rank stays as fast."""
        return goodput(self.samples_per_s * batch / self.batch, self.noise_scale, self.batch, batch)


def batch_facts(runs: Sequence[RunFacts]) -> list[BatchFacts]:
    """Facts of the runs with a known noise scale."""
    return [found for number, each in enumerate(runs) if (found := _of_run(number, each, runs))]


def batch_charts(runs: Sequence[RunFacts]) -> list[Chart]:
    """Charts of efficiency and goodput over the batch."""
    found = batch_facts(runs)
    if not found:
        return []
    several = len(runs) > 1
    # Curves of several runs lie close together: colours tell them apart.
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
        found = sorted((each.goodput_of(x), float(x.global_batch_size)) for x in each.candidates)
        points = sorted({batch: value for value, batch in found}.items())
    label = curve_label(each.label, words, several=several)
    return Series(run=each.run, label=label, points=tuple(points))


def _batches(each: BatchFacts) -> list[float]:
    """Batches of a curve, from the run's own to the largest of which anything is known."""
    low, high = float(each.batch), float(_TESTED * each.batch)
    return [low + (high - low) * place / _POINTS for place in range(_POINTS + 1)]


def _of_run(number: int, facts: RunFacts, runs: Sequence[RunFacts]) -> BatchFacts | None:
    config = facts.run.config
    known = [each for each in facts.run.records if _is_noise(each.get("noise_scale_plain"))]
    timed = _measured(facts)
    if config is None or timed is None or not known:
        return None
    others = [each for each in runs if _is_alike(config, each)]
    measured = tuple(each for each in map(_measured, others) if each is not None)
    setups = {each.setup for each in measured}
    model = _fitted(measured) if len(setups) > 1 else None
    largest = max(each.local_batch_size for each in setups)
    candidates = tuple(_candidates(timed.setup, largest))
    phi, batch = float(known[-1]["noise_scale_plain"]), timed.setup.global_batch_size
    return BatchFacts(
        run=number,
        label=facts.label,
        step=known[-1]["step"],
        setup=timed.setup,
        noise_scale=phi,
        samples_per_s=batch / timed.seconds,
        model=model,
        largest_forward=largest,
        candidates=candidates,
        best=None if model is None else best_setup(model, candidates, phi, batch),
    )


@lru_cache(maxsize=32)
def _fitted(measured: tuple[Measured, ...]) -> ThroughputModel:
    """The fitted model, cached for all runs of equal cost, for charts and text."""
    return fit(measured)


def _is_noise(value: float | None) -> bool:
    return value is not None and 0 <= value <= _MOST_NOISE


def _is_alike(config: RunConfig, other: RunFacts) -> bool:
    """True if sequences of both runs cost the same."""
    theirs = other.run.config
    return theirs is not None and (theirs.model, theirs.data.max_seq_length) == (
        config.model,
        config.data.max_seq_length,
    )


def _measured(facts: RunFacts) -> Measured | None:
    """The time of a run's update, the median over its intervals."""
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
    as many sequences as were measured, and more of them an update, up to _TESTED batches.
    """
    yield setup
    local = max(1, setup.local_batch_size // 2)
    while local <= largest * _LARGER_FORWARDS:
        other = replace(setup, local_batch_size=local, grad_accum_steps=1)
        while other.global_batch_size <= _TESTED * setup.global_batch_size:
            yield other
            other = replace(other, grad_accum_steps=2 * other.grad_accum_steps)
        local *= 2


def in_words(each: BatchFacts) -> list[str]:
    """The conclusions from the noise scale, in sentences."""
    words = [
        f"At step {each.step:,} the noise scale is {significant(each.noise_scale, 3)} "
        f"sequences; the batch has {each.batch:,}.",
        f"Up to {round(each.batch_of(0.9)):,} sequences a sample keeps 90 % of its worth, up to "
        f"{round(each.batch_of(0.5)):,} half of it. Medians of five trainings predicted the "
        f"samples at {_TESTED} times their batch within 30 %; one run's value scatters more, and "
        "nothing larger is recommended.",
    ]
    if each.best is None or each.model is None:
        words.append(
            "One setup was timed, which does not say how long other batches take: report this run "
            "together with short ones of another local_batch_size to see the best on these ranks."
        )
        return words
    best, error = each.best, each.model.error  # error of the fitted times, in logarithms
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
    """Rows for the run's batch and larger ones: worth, samples, updates, learning rates."""
    for factor in _FACTORS:
        batch = each.batch * factor
        worth = each.efficiency_at(batch)
        root = learning_rate_gain(each.noise_scale, each.batch, batch, "square_root")
        adascale = learning_rate_gain(each.noise_scale, each.batch, batch, "adascale")
        gains = 1 / worth, 1 / worth / factor, root, adascale
        times = [f"{significant(value, 3)} {_TIMES}" for value in gains]
        yield [f"{batch:,}", f"{100 * worth:.1f} %", *times]
