"""Steps of evaluations; `config slurm` prints options that survive the shell."""

import shutil
import subprocess
from math import ceil

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.cli.config import sbatch_options
from mlperf_bert.config.files import load_config
from support import CONFIGS, refusal, write_program

RECORD = CONFIGS / "open_adamw_dgxa100_128x8x16x1.toml"
LARGEST = CONFIGS / "dgxa100_128x8x4x1.toml"


@pytest.mark.parametrize("batch", [448, 4096, 16_384, 16_416])
def test_point_k_is_the_first_step_that_reaches_k_intervals(batch):
    overrides = ["parallel.nodes=1", "parallel.ranks_per_node=1", "run.max_steps=3000"]
    sampler = ["data.sampler=uniform", f"parallel.local_batch_size={batch}"]
    config = load_config(RECORD, [*overrides, *sampler])
    interval = config.eval_interval_samples
    found = [step for step in range(1, 3001) if config.evaluation_is_due(step * batch)]
    assert found == [ceil(k * interval / batch) for k in range(1, 3000 * batch // interval + 1)]
    often = load_config(RECORD, ["eval.interval_samples=100"])  # less than a batch
    samples = often.parallel.global_batch_size
    assert often.evaluation_is_due(samples) and often.evaluation_is_due(2 * samples)


@pytest.mark.parametrize(
    ("sinfo", "asks"),
    [
        ("echo '(null)'; echo 'gpu:a100:8(S:0-1)'", " --gpus-per-node=8"),
        ("echo '(null)'", ""),
        ("exit 1", " --gpus-per-node=8"),  # no SLURM that answers
        (None, " --gpus-per-node=8"),
    ],
)
def test_gpus_are_asked_for_where_slurm_counts_them(sinfo, asks, monkeypatch, tmp_path, capsys):
    if sinfo is not None:
        write_program(tmp_path / "sinfo", f"#!/bin/sh\n{sinfo}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["config", "slurm", str(LARGEST)]) == 0
    size = "--job-name=dgxa100_128x8x4x1 --nodes=128 --ntasks-per-node=8"
    assert capsys.readouterr().out.partition(" --export=")[0] == size + asks
    config = load_config(LARGEST, ["parallel.nodes=2", "data.loader=mpi_readers"])
    assert f" --nodes=2 --ntasks-per-node=16{asks} " in sbatch_options(config, LARGEST)


def test_a_config_of_cpus_asks_for_no_gpu_and_its_path_is_made_absolute(
    tmp_path, monkeypatch, capsys
):
    shutil.copy(CONFIGS / "cpu_tiny.toml", tmp_path / "mine.toml")
    monkeypatch.chdir(tmp_path)
    assert main(["config", "slurm", "mine.toml", "--set", "parallel.nodes=2"]) == 0
    line = capsys.readouterr().out.rstrip("\n")
    shell = f"printf '%s\\n' $(printf %s '{line}')"
    split = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert split.stdout.splitlines() == [
        "--job-name=mine",
        "--nodes=2",
        "--ntasks-per-node=2",
        f"--export=ALL,CONFIG={tmp_path}/mine.toml",
    ]


def test_a_shipped_config_goes_by_its_name_in_a_tree_whose_path_has_a_space(tmp_path, monkeypatch):
    path = tmp_path / "a tree" / LARGEST.name
    monkeypatch.setattr("mlperf_bert.cli.config.SHIPPED", path.parent)
    assert sbatch_options(load_config(LARGEST), path).endswith(f"=ALL,CONFIG={LARGEST.stem}")


def test_a_path_that_would_be_taken_apart_is_refused(tmp_path, capsys):
    for bad in " ,*[']\n$\\":
        path = tmp_path / f"a{bad}b.toml"
        shutil.copy(CONFIGS / "cpu_tiny.toml", path)
        error = refusal(capsys, "config", "slurm", path)
        assert f"has {bad!r} in its path" in error
        assert "use only letters, digits and" in error
