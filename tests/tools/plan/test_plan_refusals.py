"""`mlperf_bert plan` refuses in one line, with status 2, before it reckons; and needs no torch."""

import sys
from pathlib import Path

import pytest

from bert_tools.plan.entries import COLUMNS
from mlperf_bert.__main__ import main
from support import CONFIGS, run_process

PNG = b"\x89PNG\r\n"
SIZES = "--nodes 2 --gpus-per-node 4 --local-batch-size 6"
BALANCE = f"balance {SIZES} --histogram lengths.csv"
CLUSTER = f"cluster {SIZES} --draws 2 --histogram lengths.csv"
SUGGEST = "suggest --gpus 8"
BUCKETS = f"buckets --config {CONFIGS}/cpu_tiny.toml"
LAW = "law own.csv"
OWN = (
    ",".join(COLUMNS),
    "2.1,Acme,small,closed,Example A1,8,20.0,0,448,2.5,,2083,260.4,10",
    "2.1,Acme,large,closed,Example A1,64,4.0,1,3072,2.8,,11667,182.3,10",
)
REFUSED = {
    BALANCE: {
        "--nodes 0": "--nodes: is 0",
        "--gpus-per-node -1": "--gpus-per-node: is -1",
        "--local-batch-size 0": "--local-batch-size: is 0",
        "--local-batch-size 100000": "--local-batch-size: makes a global batch of 800,000",
        "--draws 1": "--draws: is 1",
        "--seed -1": "--seed: is -1",
        "--cost-a 0": "--cost-a: is 0",
        "--cost-a nan": "--cost-a: is nan",
        "--cost-b -1": "--cost-b: is -1",
        "--cost-b inf": "--cost-b: is inf",
        "--max-predictions 0": "--max-predictions: is 0",
        "--max-predictions 256": "--max-predictions: is 256",
        "--out missing/own.png": "lies in a directory that does not exist",
        "--out .": "is a directory",
        "--out own.pdf": "own.pdf does not end in .png",
        f"--out {'x' * 300}.png": "with names of up to 304",
        f"--out {'x' * 250}.png": "with names of up to 254",
        f"--out {'x' * 200}/own.png": "lies in a directory that does not exist",
        "--quantiles 0": "--quantiles: 0 does not divide the global batch of 48",
        "--quantiles 5": "--quantiles: 5 does not divide the global batch of 48",
        "--steps 59": "--steps: is 59",
        f"--steps {2**31}": f"--steps: is {2**31}",
        "--histogram none.csv": "none.csv: No such file",
        "--histogram many.csv": "divide all counts by the same number",
    },
    f"balance {SIZES}": {
        "--data .": "is not a prepared set",
        f"--data {'x' * 200}": "is not a directory",
        "--data . --max-predictions 5": "does not go with --data",
    },
    BUCKETS: {
        "--bucket-cap-mb 0": "error: --bucket-cap-mb: is 0",
        "--bucket-cap-mb nan": "error: --bucket-cap-mb: is nan",
        "--out missing/x.png": "error: --out: missing/x.png",
        "--set model.num_layers=0": "error: model.num_layers: is 0",
    },
    SUGGEST: {
        "--nodes 0": "--nodes: is 0",
        "--nodes 1 --gpus 0": "--gpus: is 0",
        "--nodes 1 --local-batch-size 0": "--local-batch-size: is 0",
        "--nodes 5000": "40,000 ranks, more than sequences of the largest batch",
        "--nodes 999999": "makes 7,999,992 ranks",
        "--nodes 64 --local-batch-size 99": "use 1 to 16,384",
        "--nodes 1 --out own.txt": "own.txt does not end in .toml",
        "--nodes 1 --out own_2x8x56x1.toml": "[parallel] says 1x8x56x1",
        "--nodes 1 --out missing/own.toml": "No such file or directory",
    },
    LAW: {
        "--filter colour=red": "--filter: 'colour' is no key; use one of round",
        "--filter round": "--filter: cannot read 'round'",
        "--filter accelerators~8": "give a number after",
        "--filter accelerators>=many": "give a number after",
        "--filter submitter>=Acme": "which is no number; use =, != or ~",
        "--filter system=small": "one entry alone, '2.1 Acme small', makes no law",
        "--filter round=9.9": "no entry is left to fit",
        "--out law.pdf": "does not end in .png",
        "--at 0": "--at: is 0",
        f"--at 8 --at {10**12}": "--at: is 1000000000000",
        "--seed -1": "--seed: is -1",
    },
    "law": {
        "nowhere": "nowhere: does not exist",
        "own.csv/logs": "own.csv/logs: Not a directory",
        "n" * 300: "with names of up to 300",
        "n" * 300 + ".csv": "with names of up to 304",
    },
    CLUSTER: {
        "--nodes 0": "--nodes: is 0",
        "--gpus-per-node -4": "--gpus-per-node: is -4",
        "--local-batch-size 0": "--local-batch-size: is 0",
        "--nodes 1000000000000000": "--nodes: is 1e+15",
        "--nodes 100000": "--nodes: makes 400,000 ranks",
        "--gpus-per-node 100000": "--gpus-per-node: is 100,000; set it to 576 at most",
        "--local-batch-size 100000": "makes a global batch of 800,000",
        "--local-batch-size 100000000": "keep it to 8,388,608",
        "--draws 0": "--draws: is 0",
        "--draws 100000": "--draws: is 100000",
        "--seed -1": "--seed: is -1",
        "--samples nan": "--samples: is nan",
        "--samples 0": "--samples: is 0",
        "--samples inf": "--samples: is inf",
        "--start-up-s -1": "--start-up-s: is -1",
        "--start-up-s nan": "--start-up-s: is nan",
        "--evaluation-interval 0": "--evaluation-interval: is 0",
        "--skipped-steps -1": "--skipped-steps: is -1",
        "--node-bandwidth 0": "--node-bandwidth: is 0",
        "--node-bandwidth 1e-300": "--node-bandwidth: is 1e-300; set it within 0.01",
        "--node-bandwidth nan": "--node-bandwidth: is nan",
        "--precision fp8": "a100 has no such units",
        "--timeline missing/own.png": "--timeline: missing/own.png lies in a directory that does",
        "--timeline own.pdf": "does not end in .png",
        "--timeline own.png --sweep-plot own.png": "own.png is the file of --timeline too",
        "--sampler strata_6_3_2_5 --local-batch-size 5": "16",
        "--histogram missing.csv": "missing.csv",
    },
}


@pytest.fixture
def files(histogram: Path, in_own_directory: Path) -> list[str]:
    """What questions read, in the working directory; the names of it."""
    Path("lengths.csv").write_bytes(histogram.read_bytes())
    Path("many.csv").write_text("length,count\n5,999999999\n")
    Path("own.csv").write_text("\n".join([*OWN, ""]))
    return sorted(path.name for path in in_own_directory.iterdir())


@pytest.mark.parametrize("question", REFUSED)
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], files: list[str], question: str
) -> None:
    for words, message in REFUSED[question].items():
        assert main(["plan", *question.split(), *words.split()]) == 2, words
        output = capsys.readouterr()
        assert output.out == "", words
        assert message in output.err and output.err.count("\n") == 1, words
        assert sorted(path.name for path in Path().iterdir()) == files, words


def test_the_picture_does_not_replace_the_histogram(
    capsys: pytest.CaptureFixture[str], histogram: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.png").write_bytes(histogram.read_bytes())
    (tmp_path / "link.png").symlink_to("own.png")
    words = ["plan", "balance", *SIZES.split(), "--histogram", "own.png", "--out"]
    for name in (str(tmp_path / "own.png"), "link.png"):
        assert main([*words, name]) == 2
        output = capsys.readouterr()
        assert output.out == "" and "is the file of --histogram" in output.err
    assert (tmp_path / "own.png").read_bytes() == histogram.read_bytes()


def test_quantiles_are_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *BALANCE.split(), "--quantiles", "x"])
    assert "is 'x', give 'auto' or a number" in capsys.readouterr().err


def test_no_question_needs_torch_or_numba(files: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['numba'] = None\n"
    code += "from mlperf_bert.__main__ import main\n"
    code += "for words in sys.argv[1:]: assert main(words.split()) == 0, words\n"
    asked = (
        f"plan {BALANCE} --draws 2",
        f"plan {BUCKETS}",
        "plan law --no-plot",
        f"plan {SUGGEST} --nodes 2 --out own.toml",
        f"plan {CLUSTER}",
        f"plan memory --config {CONFIGS}/cpu_tiny.toml",
    )
    done = run_process(sys.executable, "-c", code, *asked)
    assert done.returncode == 0, done.stderr
    assert "time = " in done.stdout and "global batch    768" in done.stdout
    assert Path("balance_2x4x6.png").read_bytes().startswith(PNG)
    assert "own.csv" in files and "[parallel]" in Path("own.toml").read_text()
