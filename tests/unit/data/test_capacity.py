"""Capacities: exact ones hold every step, bounds hold longer runs, ladders waste little."""

from dataclasses import replace

import numpy as np
import pytest

from mlperf_bert.config.sections import SamplerName
from mlperf_bert.data.balance import Balance, StepPlan, StepPlanner
from mlperf_bert.data.capacity import (
    LADDER_CAPACITIES,
    LADDER_STEP,
    RISK,
    CapacityLadder,
    CapacityPlan,
    ForwardSizes,
    waste,
)
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.sampler import make_sampler

DRAWS = 500
LENGTHS = np.sort(wikipedia_lengths().draw_evenly(100_000, seed=1)).astype(np.uint16)
MASKED = np.clip(np.rint(0.15 * LENGTHS), 1, 76).astype(np.uint8)


def planner(
    sampler: SamplerName = "quantile",
    balance: Balance | None = None,
    world_size: int = 8,
    local_batch_size: int = 8,
    lengths: np.ndarray = LENGTHS,
) -> StepPlanner:
    return StepPlanner(
        make_sampler(
            sampler,
            order_by_length=np.arange(len(lengths)),
            length_histogram=np.bincount(lengths).tolist(),
            global_batch_size=world_size * local_batch_size,
            seed=3,
        ),
        lengths,
        MASKED,
        world_size=world_size,
        balance=balance or Balance(policy="presort_global"),
    )


def drawn(steps: StepPlanner, num_steps: int) -> list[StepPlan]:
    """As many plans as `DRAWS`, spread over the run, or all of a shorter one."""
    planned = np.linspace(1, num_steps, min(num_steps, DRAWS)).astype(int)
    return [steps.plan(step) for step in planned.tolist()]


def sizes_of(plans: list[StepPlan]) -> ForwardSizes:
    sizes = ForwardSizes()
    for plan in plans:
        sizes.add(plan)
    return sizes


def test_an_exact_capacity_is_the_smallest_that_holds_every_step() -> None:
    unequal = Balance(policy="presort_global", counts="unequal")
    plans = drawn(planner("uniform", unequal, local_batch_size=3), 100)
    assert CapacityPlan.of_sizes(sizes_of(plans), 100) == CapacityPlan(
        tokens=max(plan.num_tokens.max() for plan in plans),
        sequences=max(plan.counts.max() for plan in plans),
        masked=max(plan.num_masked.max() for plan in plans),
        basis="exact",
    )


def test_waste_is_room_beyond_the_mean() -> None:
    plans = [planner(local_batch_size=4).plan(step) for step in (1, 2)]
    mean = np.mean([plan.num_tokens for plan in plans])
    assert waste(2 * int(mean), sizes_of(plans).tokens) == pytest.approx(2 * int(mean) / mean - 1)


@pytest.mark.parametrize("policy", ["none", "presort_global"])
@pytest.mark.parametrize("sampler", ["uniform", "quantile", "strata"])
def test_a_bound_holds_a_longer_run(sampler: SamplerName, policy: str) -> None:
    steps, num_steps = planner(sampler, Balance(policy=policy)), 4 * DRAWS  # type: ignore[arg-type]
    bound = CapacityPlan.of_sizes(sizes_of(drawn(steps, num_steps)), num_steps)
    assert bound.basis == "bound"
    sizes = sizes_of([steps.plan(step) for step in range(1, num_steps + 1)])
    exact = CapacityPlan.of_sizes(sizes, num_steps)
    assert exact.tokens <= bound.tokens and exact.masked <= bound.masked
    assert exact.sequences == bound.sequences == 8
    # It is of use: at most as much again as the run's largest step is above the mean.
    assert waste(bound.tokens, sizes.tokens) <= 2 * waste(exact.tokens, sizes.tokens)


@pytest.mark.parametrize("tail", ["normal", "gumbel"])
def test_a_bound_fails_as_rarely_as_it_says(tail: str) -> None:
    plan, runs, num_steps = planner().plan(1), 100, 20_000
    failures = 0
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        largest = getattr(generator, tail)(100_000, 400, num_steps).astype(np.int64)
        seen = [
            replace(plan, num_tokens=np.full_like(plan.num_tokens, tokens))
            for tokens in largest[:: num_steps // DRAWS]
        ]
        bound = CapacityPlan.of_sizes(sizes_of(seen), num_steps)
        failures += bound.tokens < largest.max()
    assert failures <= runs * RISK + 3 * (runs * RISK) ** 0.5


def test_equal_steps_need_no_margin() -> None:
    lengths = np.full(1000, 100, dtype=np.uint16)
    sizes = sizes_of(drawn(planner(lengths=lengths), 10 * DRAWS))
    bound = CapacityPlan.of_sizes(sizes, 10 * DRAWS)
    assert bound.tokens == 8 * 100


def test_a_ladder_has_twelve_capacities_2_percent_apart() -> None:
    largest = CapacityPlan(tokens=100_000, sequences=448, masked=15_000, basis="exact")
    ladder = CapacityLadder.below(largest)
    assert len(ladder.capacities) == LADDER_CAPACITIES
    assert ladder.capacities[-1] == largest
    tokens = np.array([capacity.tokens for capacity in ladder.capacities])
    assert tokens[:-1] / tokens[1:] == pytest.approx(1 - LADDER_STEP, abs=1e-4)


def test_the_smallest_capacity_that_holds_both_is_chosen() -> None:
    plan = planner(world_size=1).plan(1)
    largest = CapacityPlan(tokens=1000, sequences=8, masked=150, basis="exact")
    ladder = CapacityLadder.below(largest)

    def padded(tokens: int, masked: int) -> int:
        """The tokens that a forward of such a size is padded to."""
        of_size = replace(
            plan,
            num_tokens=np.full_like(plan.num_tokens, tokens),
            num_masked=np.full_like(plan.num_masked, masked),
        )
        return round(tokens * (1 + ladder.token_waste(sizes_of([of_size]))))

    assert padded(1000, 1) == padded(1, 150) == 1000
    assert padded(1001, 1) == 1001 and padded(1, 151) == 1  # none holds it
    assert padded(1, 1) == ladder.capacities[0].tokens
    for smaller, larger in zip(ladder.capacities, ladder.capacities[1:], strict=False):
        assert padded(smaller.tokens, smaller.masked) == smaller.tokens
        assert padded(smaller.tokens + 1, 1) == larger.tokens
        assert padded(1, smaller.masked + 1) == larger.tokens


def test_a_ladder_makes_uniform_draws_cheap_to_pad() -> None:
    steps = planner("uniform", world_size=1, local_batch_size=448)
    sizes = sizes_of([steps.plan(step) for step in range(1, DRAWS + 1)])
    largest = CapacityPlan.of_sizes(sizes, DRAWS)
    ladder = CapacityLadder.below(largest)
    # Section 8.3 of the analysis: 11 % with one capacity over a long run, 1.0 % with the ladder.
    assert waste(largest.tokens, sizes.tokens) > 0.08
    assert ladder.token_waste(sizes) < 0.012


def test_what_no_capacity_holds_is_not_padded() -> None:
    sizes = sizes_of([planner().plan(1)])
    tiny = CapacityPlan(tokens=1, sequences=1, masked=1, basis="exact")
    assert CapacityLadder.below(tiny).token_waste(sizes) == 0
