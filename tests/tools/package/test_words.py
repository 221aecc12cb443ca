"""What counts of a checker's words, and the score."""

from pathlib import Path

import pytest

from bert_tools.package.checkers import Call, judge, scaling_of
from bert_tools.package.score import olympic_mean
from submissions import MEAN_OF_EIGHT, OPEN, TIMES

CALL = Call(
    ruleset="5.0.0",
    checker="package_checker",
    subject="the package",
    arguments=(),
    wanted={"INFO - Run 10/10": 1, "INFO - SUCCESS": 1, "INFO - RCP Test Passed: ": 0},
)
GOOD = "WARNING -  harmless\nINFO - Run 10/10\nINFO - SUCCESS\n"


@pytest.mark.parametrize(
    ("status", "output"),
    [
        (0, "INFO - Run 10/10\n"),
        (0, "INFO - SUCCESS\n"),
        (0, f"{GOOD}INFO - Run 10/10\n"),
        (0, f"{GOOD}INFO - RCP Test Passed: RCP found\n"),
        (0, f"{GOOD}ERROR - anything\n"),
        (0, f"{GOOD}Traceback (most recent call last):\n"),
        (0, f"{GOOD}WARNING -  Skipping benchmark: gnmt\n"),
        (0, f"{GOOD}WARNING -  1 file does not comply, accepting this under olympic scoring\n"),
        (0, f"{GOOD}INFO - Bypassing Seed Checker\n"),
        (0, f"{GOOD}WARNING -  RCP test failed but allowed to proceed with RCP bypass.\n"),
        (0, f"{GOOD}WARNING - Unknown files in result directory: x\n"),
        (0, f"{GOOD}INFO - CHECKS FAILED.\n"),
        (1, GOOD),
    ],
)
def test_only_the_words_of_a_checker_count(status: int, output: str) -> None:
    assert judge(CALL, 0, GOOD) == ()
    assert judge(CALL, status, output) != ()


def test_the_score_of_ten_times() -> None:
    assert olympic_mean(TIMES) == pytest.approx(MEAN_OF_EIGHT)
    assert olympic_mean([3.0] * 10) == 3.0


def test_a_scaling_factor_is_read_where_the_checker_left_one(tmp_path: Path) -> None:
    assert scaling_of(tmp_path, OPEN) == 1.0
    directory = tmp_path / "results" / OPEN / "bert"
    directory.mkdir(parents=True)
    (directory / "scaling.json").write_text('{"scaling_factor": 1.0477}')
    assert scaling_of(tmp_path, OPEN) == 1.0477
