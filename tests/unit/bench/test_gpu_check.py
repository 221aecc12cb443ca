"""`tools/gpu_check.sh`: its settings exist, its dry run does every part, its summary judges."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlperf_bert.bench import cli
from mlperf_bert.bench.run_options import make_config
from mlperf_bert.squad import cli as squad_cli
from mlperf_bert.squad.options import settings_of
from mlperf_bert.squad.settings import parse_engine
from support import REPOSITORY, run_process

SCRIPT = REPOSITORY / "tools" / "gpu_check.sh"
SUMMARY = REPOSITORY / "tools" / "summarise_gpu.py"
TRAIN: dict[str, Any] = {
    "device": "cuda",
    "samples_per_s": 1000.0,
    "step_ms": 112.0,
    "tflops": 500.0,
    "mfu": 0.7,
    "mfu_of_burst": 0.6,
    "padding_share": 0.01,
    "memory_peak_bytes": 2**33,
}


def listed(*arguments: str, **environ: str) -> dict[str, list[str]]:
    done = run_process("bash", SCRIPT, *arguments, PYTHON=sys.executable, **environ)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    return {name: shlex.split(command) for name, command in lines}


def test_every_measurement_has_arguments_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # as the script does
    parts = listed("--list")
    measured = {name: words for name, words in parts.items() if "bench" in words}
    others = {"tests.txt", "doctor.json", "burn_in.json", "squad.json"}
    assert set(parts) - set(measured) == others
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    for name, words in measured.items():
        args = parser.parse_args(words[words.index("bench") + 1 :])
        assert args.json, name
        if getattr(args, "config", None) is not None:
            config = make_config(args)
            assert config.model.num_layers == 24
            assert config.parallel.world_size == 1


def test_the_fine_tuning_has_arguments_that_can_be() -> None:
    (words,) = listed("--list", ONLY="^squad$").values()
    parser = argparse.ArgumentParser()
    squad_cli.add_arguments(parser)
    args = parser.parse_args(words[words.index("squad") + 1 :])
    assert args.json and args.engines == "single"
    settings = settings_of(args, parse_engine(args.engines), seed=1)
    assert settings.updates == 100 and settings.precision == "bf16"


def test_ablations_differ_from_the_headline_in_their_switch_alone() -> None:
    parts = listed("--list", ONLY="train_bf16|ablation_")
    headline = parts.pop("train_bf16.json")
    assert len(parts) >= 10
    for name, words in parts.items():
        added = [word for word in words if "=" in word and word not in headline]
        assert added, name
        assert [word for word in headline if "=" in word and word not in words] == []


def write_part(out: Path, name: str, status: int, result: Mapping[str, Any] | None) -> None:
    with (out / "parts.tsv").open("a", encoding="utf-8") as file:
        file.write(f"{name}\t{status}\t3\tbench {name}\n")
    if result is not None:
        (out / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    (out / f"{name}.log").write_text("progress\nlast words\n", encoding="utf-8")


def summary(out: Path) -> str:
    done = run_process(sys.executable, SUMMARY, out)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_summary_judges_the_goals(tmp_path: Path) -> None:
    write_part(tmp_path, "train_bf16", 0, TRAIN)
    write_part(tmp_path, "train_fp8", 0, {**TRAIN, "samples_per_s": 1100.0})
    write_part(tmp_path, "train_batch_4_captured", 0, {**TRAIN, "samples_per_s": 90.0})
    write_part(tmp_path, "train_batch_4_eager", 0, {**TRAIN, "samples_per_s": 50.0})
    write_part(tmp_path, "ablation_eager", 0, {**TRAIN, "samples_per_s": 900.0})
    write_part(tmp_path, "ablation_attention_cudnn", 2, None)
    write_part(tmp_path, "scale", 137, None)
    write_part(tmp_path, "tests", 1, None)
    words = summary(tmp_path)
    assert "| bf16 samples/s, first step | at least 950 | met: 1000 |" in words
    assert "| FP8 samples/s | at least 1250 | missed: 1100 |" in words
    assert "| captured / eager at 4 sequences | at least 1.5 | met: 1.8 |" in words
    assert "| evaluation, share of a run | at most 0.028 | not measured |" in words
    assert "| ablation_eager | 900.0 | 0.900 |" in words
    assert "cannot run here: last words" in words
    assert "stopped: took too long" in words
    assert "failed (1): last words" in words


def test_summary_of_a_cpu_judges_nothing(tmp_path: Path) -> None:
    write_part(tmp_path, "train_bf16", 0, {**TRAIN, "device": "cpu"})
    words = summary(tmp_path)
    assert "Not run on a GPU" in words
    assert "met" not in words.split()


def dry_run(out: Path, **environ: str) -> dict[str, list[str]]:
    """Commands of the parts that a dry run did, by name; all of them succeeded."""
    done = run_process("bash", SCRIPT, "--dry-run", PYTHON=sys.executable, OUT=str(out), **environ)
    assert done.returncode == 0, done.stderr
    lines = (out / "parts.tsv").read_text(encoding="utf-8").splitlines()
    parts = [line.split("\t") for line in lines]
    assert {status for _, status, *_ in parts} == {"0"}, done.stderr
    words = (out / "summary.md").read_text(encoding="utf-8")
    assert "Not run on a GPU" in words
    assert all(f"| {name} | done |" in words for name, *_ in parts)
    return {name: command.split() for name, _, _, command in parts}


@pytest.mark.slow
def test_dry_run_of_some_parts(tmp_path: Path) -> None:
    names = ("train_bf16", "eval_bf16", "profile_bf16", "sweep", "squad")
    assert tuple(dry_run(tmp_path, ONLY=f"^({'|'.join(names)})$")) == names
    assert os.path.getsize(tmp_path / "profile_bf16.png") > 0


@pytest.mark.longest
def test_dry_run_does_every_part(tmp_path: Path) -> None:
    commands = dry_run(tmp_path, LIMIT_S="270").values()
    forms = {"train", "against", "eval", "profile", "checkpoints"}
    forms |= {"scale", "optimizer", "cost", "loader"}
    assert {words[words.index("bench") + 1] for words in commands if "bench" in words} == forms
