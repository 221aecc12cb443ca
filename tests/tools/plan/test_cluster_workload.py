"""What ranks of a simulated step have to compute: as the project's own planner deals it."""

from pathlib import Path

import numpy as np
import pytest

from bert_tools.plan.cluster.software import programs, with_capture
from bert_tools.plan.cluster.workload import Dealing, Workload, draw_steps, even_workload
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import BalancePolicy, SamplerName
from mlperf_bert.data.balance import Balance, StepPlanner
from mlperf_bert.data.length_histogram import read_histogram
from mlperf_bert.data.sampler import UniformSampler

PUBLISHED = programs()["nvidia_v2_0"]


@pytest.fixture(scope="module")
def index(histogram: Path) -> SampleIndex:
    return SampleIndex.of_histogram(read_histogram(histogram), "test", 76)


def dealing(balance: BalancePolicy = "none", sampler: SamplerName = "uniform") -> Dealing:
    return Dealing(local_batch_size=8, balance=balance, sampler=sampler)


def imbalance(work: Workload) -> float:
    return float(work.real_tokens.max() / work.real_tokens.mean())


@pytest.mark.parametrize("policy", ["none", "presort_local", "presort_global"])
def test_ranks_get_what_the_planner_gives_them(policy: BalancePolicy, index: SampleIndex) -> None:
    works = draw_steps(index, dealing(policy), PUBLISHED, 4, 4, draws=3)
    planner = StepPlanner(
        UniformSampler(len(index.lengths), 128, 0),
        index.lengths,
        index.masked_counts,
        world_size=16,
        balance=Balance(policy=policy, ranks_per_node=4),
    )
    assert len(works) == 3
    plan = planner.plan(1)
    assert works[0].tokens.tolist() == plan.num_tokens[:, 0].tolist()
    assert works[0].masked.tolist() == plan.num_masked[:, 0].tolist()
    assert works[0].sequences.tolist() == [8] * 16


def test_presort_is_more_even_than_random_draws(index: SampleIndex) -> None:
    none, local, everywhere = (
        np.mean([imbalance(work) for work in draw_steps(index, dealing(name), PUBLISHED, 8, 4, 5)])
        for name in ("none", "presort_local", "presort_global")
    )
    assert everywhere < local < none


def test_a_captured_step_pads_all_ranks_to_the_largest(index: SampleIndex) -> None:
    (eager,) = draw_steps(index, dealing(), PUBLISHED, 4, 4, 1)
    (captured,) = draw_steps(index, dealing(), with_capture(PUBLISHED, "on"), 4, 4, 1)
    assert captured.tokens.tolist() == [eager.tokens.max()] * 16
    assert captured.real_tokens.tolist() == eager.tokens.tolist()


def test_packed_rows_are_full_and_hold_two_sequences(index: SampleIndex) -> None:
    program = programs()["nvidia_v2_0_captured"]
    (work,) = draw_steps(index, dealing(), program, 2, 4, 1)
    assert work.tokens.tolist() == [8 * 512] * 8
    assert work.sequences.tolist() == [16] * 8
    assert work.masked.tolist() == work.tokens.tolist()  # its head computes every position


def test_padded_rows_take_one_for_each_sequence(index: SampleIndex) -> None:
    (work,) = draw_steps(index, dealing(), programs()["nvidia_v1_1_captured"], 2, 4, 1)
    assert work.tokens.tolist() == [8 * 512] * 8


def test_an_evaluation_of_padded_or_packed_rows_computes_all_of_them() -> None:
    for name, tokens in (
        ("ours", 256),
        ("nvidia_v2_0", 256),
        ("nvidia_v1_1_captured", 512),
        ("nvidia_v2_0_captured", 256),  # two sequences of 256 fill a row
    ):
        work = even_workload(2, 10, 256, 38, programs()[name])
        assert work.tokens.tolist() == [10 * tokens] * 2
        assert work.real_tokens.tolist() == [10 * 256] * 2


def test_attention_pairs_lie_between_real_ones_and_those_of_full_rows(index: SampleIndex) -> None:
    by_layout = {
        name: float(draw_steps(index, dealing(), programs()[name], 2, 4, 1)[0].attended.sum())
        for name in ("ours", "baidu", "nvidia_v2_0")
    }
    batch = UniformSampler(len(index.lengths), 64, 0).global_batch(1)
    lengths = index.lengths[batch].astype(float)
    assert (lengths**2).sum() <= by_layout["ours"] <= by_layout["baidu"] <= by_layout["nvidia_v2_0"]
    assert by_layout["nvidia_v2_0"] <= ((lengths + 16) * 512).sum()


def test_published_exchange_gathers_padded_rows(index: SampleIndex) -> None:
    (everywhere,) = draw_steps(index, dealing("exchange_global"), PUBLISHED, 2, 4, 1)
    (node,) = draw_steps(index, dealing("exchange_local"), PUBLISHED, 2, 4, 1)
    # Four rows of 512 and a label in 16 bits for each of 64 samples, or of 32.
    assert everywhere.input_bytes == 64 * 2 * (4 * 512 + 1)
    assert node.input_bytes == 32 * 2 * (4 * 512 + 1)
    assert (everywhere.input_scope, node.input_scope) == ("world", "node")


def test_more_than_the_set_holds_is_refused(index: SampleIndex) -> None:
    with pytest.raises(ConfigError, match="makes a global batch of"):
        draw_steps(index, dealing(), PUBLISHED, 10_000, 8, 1)
