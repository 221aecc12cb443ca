"""Fine-tuning engines on 4 ranks over gloo: all give what one rank gives; bubbles are as known."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from squad_job import SLEEPERS, TOLERANCE, UPDATES, WAVES
from test_ranks import free_port

from support import start_job

RANKS = 4
CASES = [case for wave in WAVES for case in wave]
WITHIN = {"fp64": 1e-10, "dropout": 1e-10, "fp32": 1e-5}
Found = dict[str, dict[str, Any]]


def start_rank(rank: int, port: str, output: Path) -> subprocess.Popen[str]:
    environ = {
        **{"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)},
        **{"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }
    return start_job(Path(__file__).with_name("squad_job.py"), environ, output)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    output = tmp_path_factory.mktemp("squad")
    port = free_port()
    ranks = [start_rank(rank, port, output) for rank in range(RANKS)]
    printed = [rank.communicate(timeout=250)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(printed)
    return {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}


def difference(found: Found, case: str, key: str) -> float:
    """The largest, absolute, to one rank's of the same kind."""
    ours, alone = (found[each][key] for each in (case, f"single {case.split()[1]}"))
    assert np.shape(ours) == np.shape(alone)
    return float(np.abs(np.array(ours) - np.array(alone)).max())


@pytest.mark.parametrize("case", [each for each in CASES if "single" not in each])
def test_losses_are_those_of_one_rank(found: Found, case: str) -> None:
    kind = case.split()[1]
    losses = found[case]["losses"]
    assert len(losses) == (10 if kind == "dropout" else UPDATES)
    assert difference(found, case, "losses") < WITHIN[kind]
    assert difference(found, case, "grad_norms") < 100 * WITHIN[kind]
    assert difference(found, case, "scores") < 1e-4  # stored in float32


def test_the_runs_learn_and_dropout_drops(found: Found) -> None:
    losses = found["single fp64"]["losses"]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    dropped = found["single dropout"]["losses"]
    assert np.abs(np.array(dropped) - np.array(losses[:10])).min() > 1e-4


@pytest.mark.parametrize("case", [each for each in CASES if "fp64" in each])
def test_weights_are_gathered_from_all_ranks(found: Found, case: str) -> None:
    ours, alone = found[case]["weights"], found["single fp64"]["weights"]
    assert list(ours) == list(alone)
    assert max(abs(ours[name] - alone[name]) for name in alone) < 1e-8


@pytest.mark.parametrize("case", [each for each in CASES if "fp32" not in each])
def test_noise_is_measured_alike(found: Found, case: str) -> None:
    noise, alone = found[case]["noise"], found[f"single {case.split()[1]}"]["noise"]
    assert [each["update"] for each in alone] == ([5, 10] if "dropout" in case else [20, 40])
    if case == "fsdp:2 fp64":  # of another cut, of which the halves are others
        assert noise == []
        return
    assert len(noise) == len(alone)
    for ours, theirs in zip(noise, alone, strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-6), key


def test_pipelines_are_clocked(found: Found) -> None:
    for case in CASES:
        expected = 0 if "pipeline" not in case else 1 if "dropout" in case else 3
        assert found[case]["clocked"] == expected


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(stages, count) for stages, each in SLEEPERS for count in each]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_is_that_of_the_formula(
    found: Found, schedule: str, stages: int, microbatches: int
) -> None:
    name = f"{schedule} {stages} {microbatches}"
    of_ranks = [found[f"bubbles_{rank}"].get(name) for rank in range(RANKS)]
    measured = [each for each in of_ranks if each is not None]
    assert len(measured) == stages and len(set(measured)) == 1
    expected = (stages - 1) / (microbatches + stages - 1)
    assert abs(measured[0] - expected) < TOLERANCE
