"""`mlperf_bert plan` refuses in one line before it reckons; what it can do without."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from plan_cases import Asked
from support import run_process

SIZES = "--nodes 2 --gpus-per-node 4 --local-batch-size 6"
BALANCE = f"balance {SIZES} --histogram lengths.csv"
CLUSTER = f"cluster {SIZES} --draws 2 --histogram lengths.csv"
SUGGEST = "suggest --gpus-per-node 8"
BUCKETS = "buckets --config cpu_tiny"
LAW = "law --filter submitter=NVIDIA --filter division=closed"
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
        "--max-predictions 65536": "--max-predictions: is 65536",
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
    "balance": {
        "--gpus-per-node 8 --local-batch-size 4": "--nodes: is missing",
        "--config cpu_tiny": "--config: has sequences of 64 tokens at most",
        "--config h100_1x8x96x1 --cost-b 0": "--cost-b: does not go with --config",
    },
    BUCKETS: {
        "--set model.num_layers=0": "error: model.num_layers: is 0",
    },
    SUGGEST: {
        "--nodes 0": "--nodes: is 0",
        "--nodes 1 --gpus-per-node 0": "--gpus-per-node: is 0",
        "--nodes 5000": "40,000 ranks, more than sequences of the largest batch",
        "--nodes 1 --out own.txt": "own.txt does not end in .toml",
        "--nodes 1 --out own_2x8x56x1.toml": "[parallel] says 1x8x56x1",
        "--nodes 1 --out missing/own.toml": "No such file or directory",
    },
    LAW: {
        "--filter colour=red": "--filter: cannot read 'colour=red'",
        "--filter round": "--filter: cannot read 'round'",
        "--filter accelerators>=many": "give a number after >=",
        "--filter round=2.1 --filter accelerators=64": "makes no law",
        "--filter round=9.9": "no entry is left to fit",
        "--out law.pdf": "does not end in .png",
        "--at 0": "--at: is 0",
        f"--at 8 --at {10**12}": "--at: is 1000000000000",
    },
    "law": {
        "nowhere": "nowhere: is not a directory",
        "lengths.csv": "lengths.csv: is not a directory",
        ".": "holds no MLPerf log of bert",
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
        "--out many.csv": "many.csv: File exists",
        "--sampler strata_6_3_2_5 --local-batch-size 5": "16",
        "--histogram missing.csv": "missing.csv",
    },
}


@pytest.fixture
def files(histogram: Path, in_own_directory: Path) -> list[str]:
    """The names of the questions' input files, in the working directory."""
    Path("lengths.csv").write_bytes(histogram.read_bytes())
    Path("many.csv").write_text("length,count\n5,999999999\n")
    return sorted(path.name for path in in_own_directory.iterdir())


@pytest.mark.parametrize("question", REFUSED)
def test_what_cannot_be_is_one_line(told: Asked, files: list[str], question: str) -> None:
    for words, message in REFUSED[question].items():
        assert message in told(question, words, status=2), words
        assert sorted(path.name for path in Path().iterdir()) == files, words


def test_the_picture_does_not_replace_the_histogram(told: Asked, files: list[str]) -> None:
    own = Path("own.png").absolute()
    own.write_bytes(Path("lengths.csv").read_bytes())
    Path("link.png").symlink_to("own.png")
    words = f"balance {SIZES} --histogram own.png --out"
    for name in (own, "link.png"):
        assert "is the file of --histogram" in told(words, name, status=2)
    assert own.read_bytes() == Path("lengths.csv").read_bytes()


def test_quantiles_are_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *BALANCE.split(), "--quantiles", "x"])
    assert "is 'x', give 'auto' or a number" in capsys.readouterr().err


HIDDEN = """import sys
class Hidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {modules}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Hidden())
from mlperf_bert.__main__ import main
found = [main(["plan", *words.split()]) for words in sys.argv[1:]]
print(found)
"""


def answered_without(*modules: str, questions: Sequence[str]) -> tuple[list[int], str, str]:
    """Statuses of questions in a process that cannot import these modules; what it says."""
    done = run_process(sys.executable, "-c", HIDDEN.replace("{modules}", str(modules)), *questions)
    assert done.returncode == 0, done.stderr
    *lines, statuses = done.stdout.splitlines()
    return json.loads(statuses), "\n".join(lines), done.stderr


def test_no_question_needs_torch_or_numba(files: list[str]) -> None:
    statuses, said, _ = answered_without(
        *("torch", "numba"),
        questions=(
            f"{BALANCE} --draws 2 --out own.png",
            BUCKETS,
            "law",
            f"{SUGGEST} --nodes 2 --out own.toml",
            CLUSTER,
        ),
    )
    assert statuses == [0] * 5
    assert "time = " in said and "global batch    768" in said
    assert "\npicture: own.png\n" in said
    assert Path("own.png").read_bytes().startswith(b"\x89PNG")
    assert "lengths.csv" in files and "[parallel]" in Path("own.toml").read_text()


def test_without_matplotlib_questions_are_answered_and_pictures_refused(files: list[str]) -> None:
    asked_for = (f"{BALANCE} --draws 2", LAW, f"{LAW} --json", CLUSTER, BUCKETS)
    refused = [f"{LAW} --out x.png", f"{CLUSTER} --out ."]
    questions = [*asked_for, *refused]
    statuses, said, errors = answered_without("matplotlib", questions=questions)
    assert statuses == [0] * len(asked_for) + [2] * len(refused)
    assert errors.count("error: matplotlib: is not installed, and draws the picture; ") == 2
    assert "\nuniform " in said and "time = " in said and '{"schema_version": 1' in said
    assert sorted(path.name for path in Path().iterdir()) == files
