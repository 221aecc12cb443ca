"""study_clip_policies.py: virtual ranks against their formula, resuming, table, picture."""

import json
import math
import sys

import pytest
import torch

from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.bucket_plan import MIB
from support import load_study, run_study

RANKS = 4
CAP_MB = 200 / MIB  # 25 float64 elements


@pytest.fixture(scope="module")
def tool():
    return load_study("2026-11-21-clip-policies", "study_clip_policies")


@pytest.fixture(scope="module")
def runs(tool):
    return sys.modules["clip_study_runs"]


def small_model():
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model.double()


def losses_of_ranks(model):
    """A loss for each rank, of very different sizes, so that some are clipped and some are not."""
    batches = torch.randn(RANKS, 5, 6, dtype=torch.float64)
    return [
        lambda batch=batch, size=10.0**rank: size * 0.01 * model(batch).square().sum()
        for rank, batch in enumerate(batches)
    ]


def norm_of(parts):
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


def limited(parts, limit):
    return [part * min(1.0, limit / norm_of(parts)) for part in parts]


def by_formula(gradients, groups, limit):
    """The mean of what ranks send, each group within its share of the limit."""
    total = sum(each.numel() for each in gradients[0].values())
    mean = {}
    for group in groups:
        share = math.sqrt(sum(gradients[0][name].numel() for name in group) / total)
        sent = [limited([mine[name] for name in group], limit * share) for mine in gradients]
        mean |= {name: sum(parts) / RANKS for name, *parts in zip(group, *sent, strict=True)}
    return mean


BUCKETS = [["2.bias", "2.weight"], ["0.bias", "0.weight"]]
WHOLE = [[*BUCKETS[0], *BUCKETS[1]]]
GROUPS = {"whole_before_allreduce": WHOLE, "bucket_before_allreduce": BUCKETS}


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e6])
@pytest.mark.parametrize("policy", GROUPS)
def test_gradient_of_virtual_ranks_is_the_formula(runs, policy, limit):
    model = small_model()
    losses = losses_of_ranks(model)
    named = dict(model.named_parameters())
    gradients = [
        dict(zip(named, torch.autograd.grad(loss(), list(named.values())), strict=True))
        for loss in losses
    ]
    ranks = runs.VirtualRanks(ClipSection(policy=policy, max_norm=limit), model, RANKS, CAP_MB)
    found = ranks([lambda loss=loss: loss().backward() for loss in losses])
    # In reverse: 3, 24, 8 and 48 elements; a bucket is closed with 25 or more.
    assert ranks.bucket_sizes == [3 + 24, 8 + 48]
    expected = by_formula(gradients, GROUPS[policy], limit)
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=0)
    norms = [norm_of(each.values()) for each in gradients]
    assert found.local_norms == pytest.approx(norms, rel=1e-12)


@pytest.fixture
def four_ranks(tmp_path, tiny_config):
    path = tmp_path / "four.toml"
    text = tiny_config.read_text().replace("[parallel]", "[parallel]\nranks_per_node = 4")
    path.write_text(text)
    return path


def test_two_steps_from_end_to_end_and_on_from_where_a_run_was_stopped(
    tool, synthetic_data, four_ranks, tmp_path, capsys
):
    out = tmp_path / "study"
    chosen = ("--optimizers", "lamb", "--global-batch-sizes", "32", "--seeds", "1", "2")
    policies = ("--policies", "none", "bucket_before_allreduce", "--max-samples", "64")
    given = ("--data", synthetic_data, "--config", four_ranks, "--out", out)
    arguments = ["run", *given, *chosen, *policies]
    assert run_study(tool, *arguments, "--limit", "3") == 0
    first = {path: json.loads(path.read_bytes()) for path in (out / "runs").iterdir()}
    half = next(path for path in first if "seed2" in path.name)
    half.rename(half.with_name(f".{half.name}.1.tmp"))  # as a kill while writing leaves it
    capsys.readouterr()
    assert run_study(tool, *arguments) == 0
    assert capsys.readouterr().out.startswith("2 of 4 runs to do")
    second = {path: json.loads(path.read_bytes()) for path in (out / "runs").iterdir()}
    assert len(second) == 4
    for path, before in first.items():
        assert second[path] | {"seconds": 0} == before | {"seconds": 0}
    for result in second.values():
        (point,) = result["curve"]
        assert point["samples"] == 64
        assert result["samples_to_target"] is None and 0 < result["best_accuracy"] < 1
        is_clipped = result["config"]["clip"]["policy"] != "none"
        assert (point["clipped_fraction"] > 0) == is_clipped
    assert run_study(tool, "table", "--out", out) == 0
    assert "| lamb | 32 | none | 0 of 2 | not reached | - | - |" in (out / "table.md").read_text()
    assert (out / "clip_policies.png").read_bytes().startswith(b"\x89PNG")
    assert run_study(tool, *arguments, "--max-samples", "96") == 2
    assert "was made with another config" in capsys.readouterr().err
