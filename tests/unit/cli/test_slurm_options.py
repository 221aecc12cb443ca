"""`config --slurm` prints options that survive the shell's splitting, or says what does not."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.cli.config import sbatch_options
from mlperf_bert.config.files import load_config
from support import CONFIGS

LARGEST = CONFIGS / "dgxa100_128x8x4x1.toml"


def test_a_config_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--slurm", str(LARGEST)]) == 0
    assert capsys.readouterr().out == (
        "--job-name=dgxa100_128x8x4x1 --nodes=128 --ntasks-per-node=8 --gpus-per-node=8 "
        f"--export=ALL,CONFIG={LARGEST}\n"
    )


def test_overrides_change_the_size() -> None:
    config = load_config(LARGEST, ["parallel.nodes=2", "data.loader=mpi_readers"])
    words = sbatch_options(config, LARGEST).split()
    assert words[1:4] == ["--nodes=2", "--ntasks-per-node=16", "--gpus-per-node=8"]


def test_a_config_of_cpus_asks_for_no_gpu_and_its_path_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(CONFIGS / "cpu_tiny.toml", tmp_path / "mine.toml")
    monkeypatch.chdir(tmp_path)
    assert main(["config", "mine.toml", "--slurm", "--set", "parallel.nodes=2"]) == 0
    line = capsys.readouterr().out.rstrip("\n")
    assert "gpus" not in line
    shell = f"printf '%s\\n' $(printf %s '{line}')"
    split = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert split.stdout.splitlines() == [
        "--job-name=mine",
        "--nodes=2",
        "--ntasks-per-node=2",
        f"--export=ALL,CONFIG={tmp_path}/mine.toml",
    ]


@pytest.mark.parametrize("name", ["a b", "a,b", "a*b", "a[b]", "a'b", "a\nb", "a$b", "a\\b"])
def test_a_path_that_would_be_taken_apart_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name}.toml"
    shutil.copy(CONFIGS / "cpu_tiny.toml", path)
    assert main(["config", "--slurm", str(path)]) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert f"has {name[1]!r} in its path" in done.err
    assert "move it to a path of" in done.err


def test_one_answer_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["config", "--slurm", "--explain", str(LARGEST)])
    assert stopped.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
