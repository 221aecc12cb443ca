"""`mlperf_bert plan balance` refuses in one line, with status 2, before it measures."""

from pathlib import Path

import pytest

from mlperf_bert.__main__ import main

SIZES = ("--nodes", "2", "--gpus-per-node", "4", "--local-batch-size", "6")


def test_the_picture_does_not_replace_the_histogram(
    capsys: pytest.CaptureFixture[str], histogram: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.png").write_bytes(histogram.read_bytes())
    (tmp_path / "link.png").symlink_to("own.png")
    words = ["plan", "balance", *SIZES, "--histogram", "own.png", "--out"]
    for name in (str(tmp_path / "own.png"), "link.png"):
        assert main([*words, name]) == 2
        output = capsys.readouterr()
        assert output.out == "" and "is the file of --histogram" in output.err
    assert (tmp_path / "own.png").read_bytes() == histogram.read_bytes()


def test_quantiles_are_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "balance", *SIZES, "--quantiles", "x"])
    assert "is 'x', give 'auto' or a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "0"), "--nodes: is 0"),
        (("--gpus-per-node", "-1"), "--gpus-per-node: is -1"),
        (("--local-batch-size", "0"), "--local-batch-size: is 0"),
        (("--local-batch-size", "100000"), "--local-batch-size: makes a global batch of 800,000"),
        (("--draws", "1"), "--draws: is 1"),
        (("--seed", "-1"), "--seed: is -1"),
        (("--cost-a", "0"), "--cost-a: is 0"),
        (("--cost-a", "nan"), "--cost-a: is nan"),
        (("--cost-b", "-1"), "--cost-b: is -1"),
        (("--cost-b", "inf"), "--cost-b: is inf"),
        (("--max-predictions", "0"), "--max-predictions: is 0"),
        (("--max-predictions", "256"), "--max-predictions: is 256"),
        (("--out", "missing/own.png"), "lies in a directory that does not exist"),
        (("--out", "."), "is a directory"),
        (("--out", "own.pdf"), "own.pdf does not end in .png"),
        (("--out", "x" * 300 + ".png"), "with names of up to 304"),
        (("--out", "x" * 250 + ".png"), "with names of up to 254"),
        (("--out", "x" * 200 + "/own.png"), "lies in a directory that does not exist"),
        (("--quantiles", "0"), "--quantiles: 0 does not divide the global batch of 48"),
        (("--quantiles", "5"), "--quantiles: 5 does not divide the global batch of 48"),
        (("--steps", "59"), "--steps: is 59"),
        (("--steps", str(2**31)), f"--steps: is {2**31}"),
    ],
)
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str],
    histogram: Path,
    tmp_path: Path,
    arguments: tuple[str, str],
    message: str,
) -> None:
    assert main(["plan", "balance", *SIZES, "--histogram", str(histogram), *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err and output.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_bad_data_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    many = tmp_path / "many.csv"
    many.write_text("length,count\n5,999999999\n")
    for arguments, message in (
        (("--histogram", str(many)), "divide all counts by the same number"),
        (("--histogram", str(tmp_path / "none.csv")), "none.csv: No such file"),
        (("--data", str(tmp_path)), "is not a prepared set"),
        (("--data", "x" * 200), "is not a directory"),
        (("--data", str(tmp_path), "--max-predictions", "5"), "does not go with --data"),
    ):
        assert main(["plan", "balance", *SIZES, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
