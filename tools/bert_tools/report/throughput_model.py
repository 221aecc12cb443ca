"""How long an update takes by ranks and batch: Pollux's model, fitted to measured updates.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mlperf_bert.optim.noise_scale import goodput

Floats = npt.NDArray[np.float64]

_GAMMAS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
_STARTS = (0.02, 0.5, 0.98)  # of a time that is split in two, the constant part
_LEAST_SHARE = 1e-9  # of the shortest measured time: the smallest constant


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Who computes an update: ranks on nodes, sequences a forward, forwards an update."""

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
    """What an update took."""

    setup: Setup
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputModel:
    """The model's constants: seconds, but for gamma; `error` is the fit's in logarithms (RMS)."""

    alpha_grad: float = 0.0
    beta_grad: float = 0.0  # a sequence
    alpha_node: float = 0.0  # all-reduce between ranks of one node
    beta_node: float = 0.0  # a rank above two
    alpha_network: float = 0.0  # between nodes
    beta_network: float = 0.0
    gamma: float = 1.0
    error: float = 0.0

    def seconds(self, setup: Setup) -> float:
        """Of one update."""
        grad = self.alpha_grad + self.beta_grad * setup.local_batch_size
        on_one = setup.nodes == 1
        alpha = self.alpha_node if on_one else self.alpha_network
        beta = self.beta_node if on_one else self.beta_network
        sync = 0.0 if setup.ranks == 1 else alpha + beta * (setup.ranks - 2)
        longer = max(grad, sync)
        if longer <= 0:
            return 0.0
        # Divided by the longer one: no power of it can leave the range of floats.
        powers = (grad / longer) ** self.gamma + (sync / longer) ** self.gamma
        return (setup.grad_accum_steps - 1) * grad + float(longer * powers ** (1 / self.gamma))

    def throughput(self, setup: Setup) -> float:
        """Sequences a second."""
        return setup.global_batch_size / self.seconds(setup)


def fit(measured: Sequence[Measured]) -> ThroughputModel:
    """The model with the least error in the logarithms of the measured times (seconds > 0).

    A constant that no two measurements tell apart stays 0: alpha_g where all had one batch a rank,
    the all-reduce's where all were on one rank, its beta where all were on as many. gamma stays 1
    where there are not more setups than constants.

    Raises ValueError where nothing was measured, or a time is not above zero.
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
    """Of several setups that one of the highest goodput; among equals, the first."""
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
        # Beside one time of a forward alone, or two batches, an all-reduce can be told from it.
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
