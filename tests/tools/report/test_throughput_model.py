"""Times by hand, constants and unseen setups recovered from times, and the batch that is best."""

import math
import random

import pytest

from bert_tools.report.throughput_model import Measured, Setup, ThroughputModel, best_setup, fit

ONE_NODE = ThroughputModel(
    alpha_grad=0.01, beta_grad=0.002, alpha_node=0.03, beta_node=0.001, gamma=2.0
)


def test_time_of_an_update_by_hand() -> None:
    # 10 sequences: T_grad = 10 + 20 = 30 ms; 12 ranks: T_sync = 30 + 10 = 40 ms; together 50 ms.
    setup = Setup(ranks=12, local_batch_size=10)
    assert ONE_NODE.seconds(setup) == pytest.approx(0.05)
    assert ONE_NODE.throughput(setup) == pytest.approx(120 / 0.05)
    # Two forwards before the last are not reduced: 2 x 30 ms more.
    accumulated = Setup(ranks=12, local_batch_size=10, grad_accum_steps=3)
    assert accumulated.global_batch_size == 360
    assert ONE_NODE.seconds(accumulated) == pytest.approx(0.11)
    assert ONE_NODE.seconds(Setup(ranks=1, local_batch_size=10)) == pytest.approx(0.03)


def test_gamma_says_how_much_overlaps() -> None:
    setup = Setup(ranks=2, local_batch_size=1)
    times = [
        ThroughputModel(beta_grad=0.04, alpha_node=0.03, gamma=gamma).seconds(setup)
        for gamma in (1.0, 2.0, 1000.0)
    ]
    assert times == [pytest.approx(0.07), pytest.approx(0.05), pytest.approx(0.04)]


def test_nodes_have_constants_of_their_own() -> None:
    model = ThroughputModel(beta_grad=0.01, alpha_node=0.02, alpha_network=0.5, beta_network=0.1)
    assert model.seconds(Setup(ranks=2, local_batch_size=1)) == pytest.approx(0.03)
    two_nodes = Setup(ranks=4, nodes=2, local_batch_size=1)
    assert model.seconds(two_nodes) == pytest.approx(0.01 + 0.5 + 2 * 0.1)


@pytest.mark.parametrize("gamma", [1.0, 2.0, 4.0])
def test_setups_that_were_not_measured_are_foretold(gamma: float) -> None:
    """From times that are off by up to 2 %, others on 1 to 16 ranks come out within 10 %."""
    draw = random.Random(3)
    true = ThroughputModel(
        alpha_grad=0.02, beta_grad=0.001, alpha_node=0.03, beta_node=0.004, gamma=gamma
    )
    measured = [
        Measured(setup, true.seconds(setup) * draw.uniform(0.98, 1.02))
        for ranks in (1, 2, 4, 8)
        for batch in (8, 32, 128)
        for setup in [Setup(ranks=ranks, local_batch_size=batch)]
    ]
    model = fit(measured)
    assert model.error < 0.02
    unseen = [
        Setup(ranks=1, local_batch_size=64),
        Setup(ranks=6, local_batch_size=16),
        Setup(ranks=16, local_batch_size=48, grad_accum_steps=2),
    ]
    for setup in unseen:
        assert model.seconds(setup) == pytest.approx(true.seconds(setup), rel=0.1)


def test_one_measured_setup_says_only_what_it_can() -> None:
    model = fit([Measured(Setup(ranks=1, local_batch_size=8), 0.4)])
    assert model.seconds(Setup(ranks=1, local_batch_size=8)) == pytest.approx(0.4, rel=1e-4)
    # In Pollux, what was not seen costs nothing: a batch by its sequences, ranks for free.
    assert model.seconds(Setup(ranks=1, local_batch_size=16)) == pytest.approx(0.8, rel=1e-4)
    assert model.seconds(Setup(ranks=4, local_batch_size=8)) == pytest.approx(0.4, rel=1e-4)


def test_two_batches_tell_the_fixed_part_from_the_sequences() -> None:
    # 0.5 s and 0.8 s for 10 and 20 sequences: 0.2 s and 0.03 s a sequence.
    measured = [
        Measured(Setup(ranks=1, local_batch_size=10), 0.5),
        Measured(Setup(ranks=1, local_batch_size=20), 0.8),
    ]
    model = fit(measured)
    assert model.alpha_grad == pytest.approx(0.2, rel=1e-3)
    assert model.beta_grad == pytest.approx(0.03, rel=1e-3)


def test_ranks_beside_one_rank_tell_the_all_reduce() -> None:
    measured = [
        Measured(Setup(ranks=1, local_batch_size=10), 0.5),
        Measured(Setup(ranks=2, local_batch_size=10), 0.6),
    ]
    model = fit(measured)
    assert model.alpha_node == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        fit([Measured(Setup(ranks=1, local_batch_size=8), seconds)])
    with pytest.raises(ValueError, match="at least one"):
        fit([])


@pytest.mark.parametrize("noise_scale", [0.0, 20.0, 200.0, 2000.0])
def test_best_batch_is_where_goodput_is_highest(noise_scale: float) -> None:
    """One rank, T = a + b m: goodput m / (a + b m) (phi + M0) / (phi + m) is highest where
    its slope is 0: a phi = b m^2, so m = sqrt(a phi / b). Here a / b = 50.
    """
    model = ThroughputModel(alpha_grad=0.1, beta_grad=0.002)
    setups = [Setup(ranks=1, local_batch_size=batch) for batch in range(1, 1001)]
    best = best_setup(model, setups, noise_scale, initial_batch=16)
    assert best.global_batch_size == pytest.approx(max(1, math.sqrt(50 * noise_scale)), abs=1)
