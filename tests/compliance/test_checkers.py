"""The MLCommons compliance checker on a real log of cpu_tiny."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import mlperf_records, run_process

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
