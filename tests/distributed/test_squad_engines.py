"""Fine-tuning engines on 4 ranks over gloo: all give what one rank gives; bubbles are as known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from squad_job import FIRST, SLEEPERS, TOLERANCE, UPDATES, WAVES

from forked_ranks import run_ranks

pytestmark = pytest.mark.timeout(900)  # of minutes on a machine that does much else
RANKS = 4
CASES = [case for wave in WAVES for case in wave]
WITHIN = {"fp64": 1e-10, "dropout": 1e-10, "fp32": 1e-5}
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    output = tmp_path_factory.mktemp("squad")
    script = Path(__file__).with_name("squad_job.py")
    statuses, printed = run_ranks(
        script, (output,), RANKS, imports=["bert_tools.squad.fine_tune"], timeout_s=800
    )
    assert statuses == [0] * RANKS, printed
    return {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}


def single(case: str) -> str:
    """The case of the same kind on one rank."""
    return f"single {case.partition(' ')[2]}"


def difference(found: Found, case: str, key: str) -> float:
    """The largest, absolute, to one rank's of the same kind."""
    ours, alone = (found[each][key] for each in (case, single(case)))
    assert np.shape(ours) == np.shape(alone)
    return float(np.abs(np.array(ours) - np.array(alone)).max())


@pytest.mark.parametrize("case", [each for each in CASES if "single" not in each])
def test_losses_are_those_of_one_rank(found: Found, case: str) -> None:
    kind = case.split()[1]
    losses = found[case]["losses"]
    updates = FIRST if case.endswith("first") else 10 if kind == "dropout" else UPDATES
    assert len(losses) == updates
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
    ours, alone = found[case]["weights"], found[single(case)]["weights"]
    assert list(ours) == list(alone)
    assert max(abs(ours[name] - alone[name]) for name in alone) < 1e-8


@pytest.mark.parametrize("case", [each for each in CASES if "fp32" not in each])
def test_noise_is_measured_alike(found: Found, case: str) -> None:
    noise, alone = found[case]["noise"], found[single(case)]["noise"]
    expected = [5, 10] if "dropout" in case else [15, 30, 45]
    assert [each["update"] for each in alone] == (expected[:1] if "first" in case else expected)
    if case == "fsdp:2 fp64":  # of another cut, of which the halves are others
        assert noise == []
        return
    assert len(noise) == len(alone)
    for ours, theirs in zip(noise, alone, strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-6), key


def test_pipelines_are_clocked(found: Found) -> None:
    for case in CASES:
        ends_before = "pipeline" not in case or case.endswith("first")
        expected = 0 if ends_before else 1 if "dropout" in case else 3
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
