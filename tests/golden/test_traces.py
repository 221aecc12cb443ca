"""Training does what it did: every step's loss and gradient norm, on 1 and 2 ranks."""

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
def test_the_golden_trace_is_followed(tiny_config, synthetic_data, tmp_path, case, ranks):
    golden = load(case, ranks)
    trace = record(case, ranks, tiny_config, synthetic_data, tmp_path / "run")
    assert trace.data_sha256 == golden.data_sha256, "other data: the trace says nothing"
    assert len(trace.loss) == STEPS
    assert is_within_tolerance(trace, golden), deviation(trace, golden)
    assert sum(trace.loss[-5:]) < sum(trace.loss[:5]) - 0.5  # it learns
    if case in WITHOUT_DROPOUT:  # and ranks change nothing
        assert is_within_tolerance(trace, load(case, 1))
