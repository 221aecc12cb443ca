"""`mlperf_bert plan` refuses in one line before it reckons; what it can do without."""

import sys
from pathlib import Path

import pytest

from support import run_process

BALANCE = "balance --config dgxa100_1x8x56x1"
CLUSTER = (
    "cluster --config dgxa100_1x8x56x1 --set mlperf.enforce_rules=false --set parallel.nodes=2 "
    "--set parallel.ranks_per_node=4 --set parallel.local_batch_size=6"
)
H200 = "--config h200_1x1x448x1"
SUGGEST = "suggest --gpus-per-node 8"
BUCKETS = "buckets --config encoder_cpu_tiny"
LAW = "law --filter submitter=NVIDIA --filter division=closed"
REFUSED = {
    BALANCE: {
        "--set parallel.nodes=0": "parallel.nodes must be from 1 to 65,536, not 0",
        "--set parallel.nodes=9999 --set mlperf.enforce_rules=false": "sequences per update, ",
        "--draws 1": "--draws: is 1",
        "--data .": "is not a prepared set",
        f"--data {'x' * 200}": "no such directory",
    },
    "balance": {
        "--config cpu_tiny": "--config: the config's sequences have at most 64 tokens",
    },
    BUCKETS: {
        "--set model.num_layers=0": "model.num_layers must be from 1 to 1,000, not 0",
        "--set model.architecture=modern --set model.objective=mlm": "architecture: is 'modern'",
    },
    SUGGEST: {
        "--nodes 0": "--nodes: is 0",
        "--nodes 5000": "40,000 ranks, but a batch has at most 16,384 sequences",
        "--nodes 1 --out kept.csv/own.toml": "kept.csv: File exists; use a directory",
    },
    LAW: {
        "--filter colour=red": "--filter: cannot read 'colour=red'",
        "--filter accelerators>=many": "write a number after >=",
        "--filter round=2.1 --filter accelerators=64": "is not enough to fit a law",
        "--filter round=9.9": "no entry with a time",
    },
    "law": {
        "nowhere": "nowhere: no such directory",
        ".": "contains no MLPerf log of the benchmark bert",
    },
    CLUSTER: {
        "--set parallel.nodes=60000 --set parallel.local_batch_size=1": "results in 240,000 ranks",
        "--node-bandwidth 1e-300": "--node-bandwidth: is 1e-300; set --node-bandwidth to",
        "--node-bandwidth nan": "--node-bandwidth: is nan",
        "--set model.precision=fp8": "is fp8, which the accelerator a100 does not support",
        "--set data.sampler=stratified_6_3_2_5 --set parallel.local_batch_size=5": "16",
    },
    "cluster": {
        "--config cpu_tiny": "does not train BERT-large on GPUs",
        f"{H200} --set mlperf.enforce_rules=false --set model.architecture=modern "
        "--set model.objective=mlm": "does not train BERT-large on GPUs",
        f"{H200} --set model.kernels=reference": "uses reference kernels",
        "--config open_muon_dgxa100_128x8x16x1": "optim.name: is 'muon'",
        f"{H200} --set data.max_seq_length=128 --set mlperf.enforce_rules=false "
        "--set data.max_predictions=20": "sequence length other than 512",
    },
}


@pytest.fixture
def files(in_own_directory):
    """The names of the files in the working directory: of one that must be kept."""
    Path("kept.csv").write_text("kept\n")
    return sorted(path.name for path in in_own_directory.iterdir())


@pytest.mark.parametrize("question", REFUSED)
def test_what_cannot_be_is_one_line(told, files, question):
    for words, message in REFUSED[question].items():
        assert message in told(question, words, status=2), words
        assert sorted(path.name for path in Path().iterdir()) == files, words


HIDDEN = """import sys
class Hidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "numba"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Hidden())
from mlperf_bert.__main__ import main
print([main(["plan", *words.split()]) for words in sys.argv[1:]])
"""


def test_no_question_needs_torch_or_numba(files):
    suggest = f"{SUGGEST} --nodes 2 --out own.toml"
    questions = (f"{BALANCE} --draws 2", BUCKETS, "law", suggest, CLUSTER)
    done = run_process(sys.executable, "-c", HIDDEN, *questions)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n[0, 0, 0, 0, 0]\n")
    assert "time = " in done.stdout and "global batch 768," in done.stdout
    assert "kept.csv" in files and "[parallel]" in Path("own.toml").read_text()
