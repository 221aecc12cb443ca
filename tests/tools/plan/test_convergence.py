"""Samples to expect agree with the checker of mlperf-logging and with what it reports."""

import pytest
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from mlperf_bert.evaluation.convergence import convergence_points, expected_samples

RULESETS = ["2.1.0", "5.0.0"]
REPORTED = {
    448: (2_414_421, 2_274_732),
    512: (2_420_324, 2_280_211),
    768: (2_443_934, 2_306_738),
    1536: (2_514_763, 2_386_317),
    3072: (2_656_421, 2_545_477),
    4096: (2_750_860, 2_651_583),
    6144: (3_319_125, 3_212_483),
    8192: (3_807_431, 3_726_176),
    16_384: (5_505_422, 5_400_269),
}


@pytest.fixture(scope="module", params=RULESETS)
def checker(request: pytest.FixtureRequest) -> RCP_Checker:
    made = RCP_Checker("training", request.param, "bert", verbose=False)
    made.compute_rcp_stats()
    return made


@pytest.mark.parametrize(("batch", "samples"), REPORTED.items())
def test_as_the_checker_reports_them(batch: int, samples: tuple[int, int]) -> None:
    expected = expected_samples(batch)
    assert expected is not None
    assert (expected.mean, expected.minimum) == pytest.approx(samples, abs=1)


def test_points_are_the_checkers(checker: RCP_Checker) -> None:
    pruned = {record["BS"] for record in checker._get_rcp_data("pruned_rcps").values()}
    records = sorted(checker._get_rcp_data("full_rcps").values(), key=lambda each: each["BS"])
    for point, record in zip(convergence_points(), records, strict=True):
        assert point.global_batch_size == record["BS"]
        assert point.runs == len(record["Epochs to converge"])
        assert point.mean_samples == pytest.approx(record["RCP Mean"], abs=0.1)
        assert point.std_samples == pytest.approx(record["RCP Stdev"], abs=0.1)
        assert point.minimum_samples == pytest.approx(record["Min Epochs"], abs=0.1)
        assert point.in_pruned_set == (record["BS"] in pruned)


@pytest.mark.parametrize("batch", [512, 1000, 3072, 5000, 14_336])
def test_between_points_as_the_checker_interpolates(checker: RCP_Checker, batch: int) -> None:
    low = checker._find_top_min_rcp(batch, "pruned_rcps")
    high = checker._find_bottom_max_rcp(batch, "pruned_rcps")
    _, record = checker._create_interp_rcp(batch, low, high)
    expected = expected_samples(batch)
    assert expected is not None
    assert expected.kind == "between"
    assert expected.mean == pytest.approx(record["RCP Mean"], abs=0.1)
    assert expected.minimum == pytest.approx(record["Min Epochs"], abs=0.5)


def test_below_and_above_the_points() -> None:
    smallest = expected_samples(96)
    assert smallest is not None
    assert (round(smallest.minimum), smallest.kind) == (2_274_732, "smallest")
    assert expected_samples(16_385) is None
