"""The same training on any number of ranks, by any launcher: real processes over gloo."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from forked_ranks import free_port, mpiexec_of
from support import metrics_losses, run_cli, run_process

LOSS_TOLERANCE = 5e-6
STEPS = 20


def sizes(ranks: int, batch: int, accumulation: int = 1) -> list[str]:
    values = {"ranks_per_node": ranks, "local_batch_size": batch, "grad_accum_steps": accumulation}
    return [word for key, value in values.items() for word in ("--set", f"parallel.{key}={value}")]


def torchrun(ranks: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", free_port(), "-m", "mlperf_bert"),
    ]


@pytest.fixture(scope="module")
def arguments(tiny_config: Path, synthetic_data: Path) -> list[str]:
    return ["train", "--config", str(tiny_config), "--data", str(synthetic_data)]


@pytest.fixture(scope="module")
def one_rank(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    done = run_cli(*arguments, "--run-dir", run_dir)
    assert done.returncode == 3, done.stderr  # ran to its end, target missed by design
    return run_dir


def assert_same_losses(run_dir: Path, expected: Path) -> None:
    assert len(metrics_losses(expected)) == STEPS
    assert metrics_losses(run_dir) == pytest.approx(
        metrics_losses(expected), abs=LOSS_TOLERANCE, rel=0
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchrun_equals_one_rank(
    ranks: int, arguments: list[str], one_rank: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = [*arguments, "--run-dir", run_dir, *sizes(ranks, 16 // ranks)]
    done = run_process(*torchrun(ranks), *options)
    assert "target NOT reached after 320 samples" in done.stdout, done.stderr
    assert_same_losses(run_dir, one_rank)


def test_captured_with_dropout_on_two_ranks_equals_eager_on_one(
    arguments: list[str], tmp_path: Path
) -> None:
    """Dropout is keyed by sample, so that it does not depend on who computes which."""
    dropout = ["--set", "model.hidden_dropout=0.1", "--set", "model.attention_dropout=0.1"]
    done = run_cli(*arguments, "--run-dir", tmp_path / "one", *dropout)
    assert done.returncode == 3, done.stderr
    options = [*arguments, "--run-dir", tmp_path / "two", *dropout, *sizes(2, 8)]
    done = run_process(*torchrun(2), *options, "--set", "run.step_mode=captured")
    assert "target NOT reached after 320 samples" in done.stdout, done.stderr
    assert_same_losses(tmp_path / "two", tmp_path / "one")


def test_accumulation_equals_one_forward(
    arguments: list[str], one_rank: Path, tmp_path: Path
) -> None:
    done = run_cli(*arguments, "--run-dir", tmp_path / "run", *sizes(1, 4, 4))
    assert done.returncode == 3, done.stderr
    assert_same_losses(tmp_path / "run", one_rank)


def test_mpiexec_equals_one_rank(arguments: list[str], one_rank: Path, tmp_path: Path) -> None:
    options = [*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8)]
    done = run_process(*mpiexec_of(2), "-m", "mlperf_bert", *options, MASTER_PORT=free_port())
    assert "target NOT reached after 320 samples" in done.stdout, done.stderr
    assert_same_losses(tmp_path / "run", one_rank)


def start_slurm_task(rank: int, port: str, options: Sequence[object]) -> subprocess.Popen[str]:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "mlperf_bert", *map(str, options)],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_slurm_variables_equal_one_rank(
    arguments: list[str], one_rank: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = [*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8)]
    tasks = [start_slurm_task(rank, port, options) for rank in range(2)]
    outputs = [task.communicate(timeout=200)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [3, 3], outputs
    assert_same_losses(tmp_path / "run", one_rank)


def test_a_mistake_of_one_rank_alone_is_said_by_all(
    arguments: list[str], synthetic_data: Path, tmp_path: Path
) -> None:
    shutil.copytree(synthetic_data, tmp_path / "data")
    next((tmp_path / "data" / "train" / "shards").glob("*.hdf5")).unlink()
    port = free_port()
    options = [*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8)]
    places = ([], ["--data", tmp_path / "data"])  # rank 1 looks elsewhere, as on another node
    tasks = [start_slurm_task(rank, port, [*options, *places[rank]]) for rank in range(2)]
    outputs = [task.communicate(timeout=200)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2], outputs
    assert all(out.count("\n") == 1 and "train.hdf5" in out for out in outputs), outputs
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_accuracy_of_a_checkpoint_is_equal_on_any_number_of_ranks(
    ranks: int, one_rank: Path, synthetic_data: Path
) -> None:
    checkpoints = one_rank / "run_0" / "checkpoints"
    options = ["evaluate", "--checkpoint", checkpoints, "--data", synthetic_data, "--json"]
    done = run_cli(*options) if ranks == 1 else run_process(*torchrun(ranks), *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    state = json.loads((checkpoints / "step_00000020" / "state.json").read_text())
    assert result["mlm_accuracy"] == state["mlm_accuracy"]
    assert result["masked_tokens"] > 500


def test_ranks_start_by_themselves_without_a_launcher(
    arguments: list[str], one_rank: Path, tmp_path: Path
) -> None:
    done = run_cli(*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8))
    assert done.returncode == 3
    assert done.stderr == ""  # nothing over the ranks' own words
    assert_same_losses(tmp_path / "run", one_rank)


def test_wrong_number_of_ranks_is_one_clear_line(arguments: list[str], tmp_path: Path) -> None:
    options = ["--run-dir", tmp_path / "run", "--set", "parallel.nodes=2"]
    done = run_cli(*arguments, *options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "parallel.ranks_per_node" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_failing_rank_ends_the_run_with_its_own_words(
    arguments: list[str], tmp_path: Path
) -> None:
    options = ["--run-dir", tmp_path / "run", *sizes(2, 8), "--set", "model.vocab_size=70"]
    done = run_cli(*arguments, *options)
    assert done.returncode == 2
    # Who had not come so far when the first rank failed is ended by the launcher, and says so.
    lines = set(done.stderr.splitlines()) - {
        "mlperf_bert: SIGTERM before the first step: nothing to save",
        "mlperf_bert: interrupted by SIGTERM",
    }
    assert 1 <= len(lines) <= 2 and all("model.vocab_size" in line for line in lines)
