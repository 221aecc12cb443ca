"""Training does what it did: every step's loss and gradient norm, on 1, 2 and 4 ranks."""

from functools import cache

import pytest

from trace_cases import (
    CASES,
    STEPS,
    deviation,
    is_same_stream,
    is_within_tolerance,
    load,
    record,
    stream_of_torch,
)

WITHOUT_DROPOUT = [case for case in CASES if case != "dropout"]
# Of optimizers, accumulation, ranks and dropout one trace each; the others take minutes.
OFTEN = (("adamw", 2), ("lamb", 1), ("dropout", 1))


@pytest.fixture(scope="module")
def recorded(tiny_config, synthetic_data, tmp_path_factory):
    """Records a case, the same one once."""

    @cache
    def recorded(case, ranks, *extra):
        run_dir = tmp_path_factory.mktemp("trace") / "run"
        return record(case, ranks, tiny_config, synthetic_data, run_dir, *extra)

    return recorded


@pytest.fixture
def same_stream():
    if not is_same_stream(load("adamw", 1).stream, stream_of_torch()):
        pytest.skip("this build of torch draws other random numbers than the recorded traces")


@pytest.mark.usefixtures("same_stream")
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *OFTEN,
        *(
            pytest.param(case, ranks, marks=pytest.mark.longest)
            for case in CASES
            for ranks in (1, 2)
            if (case, ranks) not in OFTEN
        ),
    ],
)
def test_the_golden_trace_is_followed(recorded, case, ranks):
    trace, golden = recorded(case, ranks), load(case, ranks)
    assert trace.data_sha256 == golden.data_sha256, "other data: the trace says nothing"
    assert len(trace.loss) == STEPS
    assert is_within_tolerance(trace, golden), deviation(trace, golden)
    assert sum(trace.loss[-5:]) < sum(trace.loss[:5]) - 0.5  # it learns
    if case in WITHOUT_DROPOUT:  # and ranks change nothing
        assert is_within_tolerance(trace, load(case, 1))


@pytest.mark.longest
@pytest.mark.usefixtures("same_stream")
@pytest.mark.parametrize("case", WITHOUT_DROPOUT)
def test_four_ranks_follow_the_trace_of_one(recorded, case):
    assert is_within_tolerance(recorded(case, 4), load(case, 1))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.longest)])
def test_same_seed_is_bit_equal_and_another_differs(recorded, ranks):
    few = "run.max_steps=10"
    whole, begun = recorded("dropout", ranks), recorded("dropout", ranks, few)
    assert len(begun.loss) == 10
    assert (whole.loss[:10], whole.grad_norm[:10]) == (begun.loss, begun.grad_norm)
    other = recorded("dropout", ranks, few, "run.seed=21")
    assert all(a != b for a, b in zip(other.loss, begun.loss, strict=True))


@pytest.mark.longest
@pytest.mark.usefixtures("same_stream")
@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("adamw", "optim.epsilon=1.1e-6"),
        ("adamw", "optim.beta_2=0.9991"),
        ("adamw", "optim.weight_decay=0.011"),
        ("lamb", "optim.epsilon=1.1e-6"),
        ("lamb", "optim.weight_decay=0.011"),
    ],
)
def test_small_changes_are_noticed(recorded, case, change):
    assert not is_within_tolerance(recorded(case, 1, change), load(case, 1))
