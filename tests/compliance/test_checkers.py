"""The MLCommons compliance checker on a real log of cpu_tiny."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlperf_bert.config_io import load_config
from mlperf_bert.data.index import Manifest
from support import CONFIGS, mlperf_records, run_process

RULESETS = ["2.0.0", "2.1.0", "3.0.0", "3.1.0", "4.0.0", "4.1.0", "5.0.0"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def log(cpu_tiny_run: subprocess.CompletedProcess[str], checkout: Path) -> Path:
    assert cpu_tiny_run.returncode == 0, cpu_tiny_run.stdout + cpu_tiny_run.stderr
    return min((checkout / "runs").glob("*-cpu_tiny/result_0.txt"))  # README's others come later


@pytest.mark.parametrize("ruleset", RULESETS)
def test_log_is_accepted(ruleset: str, log: Path, tmp_path: Path) -> None:
    options = ["--usage", "training", "--ruleset", ruleset, "--werror"]
    checker = [sys.executable, "-W", "ignore", "-m", "mlperf_logging.compliance_checker"]
    done = run_process(*checker, *options, "--log_output", tmp_path / "checker.log", log)
    assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


def test_the_target_stands_for_something(
    log: Path, cpu_tiny_run: subprocess.CompletedProcess[str], checkout: Path
) -> None:
    held_out = next((checkout / ".cache").glob("embedded-*")) / "eval"
    baseline = Manifest.load(held_out).baseline
    assert baseline is not None and baseline.masked_tokens >= 10_000
    target = load_config(CONFIGS / "cpu_tiny.toml").eval.target_accuracy
    assert target >= 1.8 * baseline.context_free_accuracy
    last = [line for line in cpu_tiny_run.stdout.splitlines() if "on [MASK] inputs" in line][-1]
    reached = re.search(r"accuracy ([\d.]+) .*on \[MASK\] inputs ([\d.]+)", last)
    assert reached and float(reached[1]) >= target
    assert float(reached[2]) >= 4 * baseline.mask_only_accuracy


def test_log_tells_the_story_of_the_run(log: Path) -> None:
    records = mlperf_records(log)
    accuracies = [r for r in records if r["key"] == "eval_accuracy"]
    assert records[-1]["key"] == "run_stop"
    assert records[-1]["metadata"]["status"] == "success"
    samples = [r["metadata"]["epoch_num"] for r in accuracies]
    assert samples == sorted(set(samples))
    trained = next(r["value"] for r in records if r["key"] == "train_samples")
    assert trained == samples[-1]
    throughputs = [r["value"]["throughput"] for r in records if r["key"] == "tracked_stats"]
    assert len(throughputs) == len(accuracies) and min(throughputs) > 0
