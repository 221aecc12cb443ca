"""Published sets, samples and configs come back; what lies between and beyond them is said.

The reference convergence points are those of the checker of mlperf-logging.
"""

import math
import re
import shlex
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.plan.cluster.forecast import RunTime, minutes_allowed, simulate, slurm_minutes
from bert_tools.plan.cluster.machine import make_machine
from bert_tools.plan.entries import published_minutes
from bert_tools.plan.recipes import (
    Recipe,
    knots,
    lamb_recipe,
    samples_points,
    samples_to_target,
)
from bert_tools.plan.suggest import suggest, to_toml
from mlperf_bert.__main__ import main
from mlperf_bert.config.files import config_from_tables, load_config
from mlperf_bert.errors import ConfigError
from support import CONFIGS

LARGEST = 16_384
RECIPES = get_args(Recipe)


def test_at_a_knot_the_published_set_comes_back():
    assert [lamb_recipe(knot.global_batch_size) for knot in knots()] == list(knots())
    batches = [knot.global_batch_size for knot in knots()]
    assert batches == sorted(set(batches)) and batches[-1] == LARGEST
    for batch in (0, LARGEST + 1):
        with pytest.raises(ConfigError, match="use a batch of 1 to 16,384"):
            lamb_recipe(batch)


@pytest.mark.parametrize(("low", "high"), [(768, 3072), (4096, 12288), (448, 768)])
def test_midway_in_the_logarithm_lies_the_geometric_mean(low, high):
    middle, *ends = (lamb_recipe(batch) for batch in (round(math.sqrt(low * high)), low, high))
    for name in ("learning_rate", "weight_decay", "decay_steps"):
        both = math.prod(getattr(each, name) for each in ends)
        assert getattr(middle, name) == pytest.approx(math.sqrt(both), rel=1e-2)
    for name in ("beta_1", "beta_2"):  # the middle is rounded
        both = math.prod(1 - getattr(each, name) for each in ends)
        assert 1 - getattr(middle, name) == pytest.approx(math.sqrt(both), rel=1e-2)


def test_below_the_smallest_set_samples_stay_and_the_rate_goes_with_the_root():
    whole, quarter = lamb_recipe(256), lamb_recipe(64)
    assert quarter.learning_rate == pytest.approx(whole.learning_rate / 2)
    assert quarter.decay_steps == 4 * whole.decay_steps
    assert (quarter.beta_1, quarter.beta_2) == (whole.beta_1, whole.beta_2)


@settings(deadline=None)
@given(st.integers(1, LARGEST))
def test_any_batch_has_a_set_that_a_schedule_can_hold(batch):
    recipe = lamb_recipe(batch)
    assert 0 < recipe.beta_1 < 1
    assert 0 < recipe.beta_2 < 1
    assert recipe.learning_rate > 0
    assert recipe.start_warmup_step <= 0 <= recipe.warmup_steps < recipe.decay_steps


# Global batch, recipe -> million samples.
POINTS = {
    (448, "closed_lamb"): 2.460,  # NVIDIA v2.1, as its logs say
    (3072, "closed_lamb"): 2.732,
    (4096, "closed_lamb"): 2.787,
    (16384, "closed_lamb"): 5.469,
    (16384, "open_adam"): 2.932736,  # Samsung v2.0: 179 steps of 16,384
    (16416, "open_adam"): 2.938464,  # 179 steps of 16,416
    (448, "open_adamw"): 0.6355,  # between MosaicML's 0.628 and 0.643
    (1536, "closed_lamb"): math.sqrt(2.520 * 2.732),  # midway, 1,536 = sqrt(768 * 3,072)
    # By hand 145 * (1 + 3,900 / batch) steps: 0.63 M samples at 448 and 2.93 M at 16,384.
    **{(b, "open_hypothesis"): 145 * (b + 3900) / 1e6 for b in (448, 4096, 8192, 16384)},
}


def test_samples_of_published_points_and_between_them():
    for (batch, recipe), million in POINTS.items():
        found = samples_to_target(batch, recipe)
        assert found.samples == pytest.approx(million * 1e6)
        assert found.basis == ("extrapolated" if recipe == "open_hypothesis" else "published")
        assert found.low <= found.samples <= found.high


@pytest.mark.parametrize("recipe", RECIPES)
def test_beyond_the_points_the_bounds_are_constant_samples_and_constant_steps(recipe):
    points = samples_points(recipe)
    smallest, largest = points[0], points[-1]
    below = samples_to_target(smallest.global_batch_size // 4, recipe)
    above = samples_to_target(largest.global_batch_size * 4, recipe)
    assert below.basis == above.basis == "extrapolated"
    assert (below.samples, below.high) == (smallest.samples, smallest.high)
    assert below.low == pytest.approx(smallest.low / 4)
    assert (above.low, above.samples) == (largest.low, pytest.approx(4 * largest.samples))


@settings(deadline=None)
@given(st.sampled_from(RECIPES), st.integers(1, 40_000), st.integers(1, 97))
def test_any_batch_has_an_estimate_that_leads_on_without_a_jump(recipe, batch, more):
    before, found = (samples_to_target(each, recipe) for each in (batch, batch + more))
    for each in (before, found):
        assert 0 < each.low <= each.samples <= each.high < math.inf
    # A larger batch needs no fewer samples, but for points that scatter.
    scatters = recipe in ("closed_lamb", "open_adamw") or batch < 448
    assert found.samples >= before.samples / (1.1 if scatters else 1)
    assert found.samples <= before.samples * max(1.5, 1 + more / batch)


OWN_BATCH = ("h100_1x1x256x1.toml", "h100_1x1x112x4.toml")  # of this project, no published one
SHIPPED = [
    (path, re.match(r"(?:dgx)?(.100|h200)_(\d+)x(\d+)x", path.name))
    for path in CONFIGS.glob("*.toml")
    if path.name not in OWN_BATCH
]


def test_sizes_with_a_recipe_of_their_own_return_it():
    """The shipped configs were written by hand after the published recipes."""
    sizes = [(path, *size.groups()) for path, size in SHIPPED if size]
    assert len(sizes) == 17
    for path, accelerator, nodes, gpus in sizes:
        found = suggest(int(nodes), int(gpus), accelerator)
        assert found.config == load_config(path)
        assert found.name == path.name and found.samples.basis == "published"


def test_shipped_configs_have_the_time_limit_that_plan_forecasts():
    ten_minutes = RunTime(step_ms=500, steps=1000, evaluations=10, evaluation_ms=10_000)
    assert minutes_allowed(ten_minutes) == 1.5 * 10 + 5
    closed = 0
    for path in CONFIGS.glob("*.toml"):
        config = load_config(path)
        if config.run.device == "cuda":  # nothing forecasts how fast a CPU is
            assert config.run.slurm_minutes == slurm_minutes(config, path.stem), path
        size = re.match(r"(?:dgx)?(.100|h200)_", path.name)
        if size and (minutes := published_minutes(size[1].upper(), config.parallel.world_size)):
            closed += 1
            assert median(minutes) < config.run.slurm_minutes, path
    assert closed == 13


def test_shipped_configs_name_the_bandwidth_that_plan_assumes():
    for path in CONFIGS.glob("*.toml"):
        parallel = load_config(path).parallel
        size = re.search(r"(?:dgx)?(.100|h200)_", path.name)
        expected = "unknown"
        if size and parallel.nodes > 1:
            machine = make_machine(size[1], parallel.nodes, parallel.ranks_per_node)
            expected = machine.node_gb_s
        assert parallel.network_gb_s == expected, path


def test_a_run_without_a_forecast_may_take_all_its_steps():
    muon = load_config(CONFIGS / "open_muon_h100_1x8x96x4.toml")
    fewer, more = (
        replace(muon, run=replace(muon.run, max_steps=steps)) for steps in (10**4, 10**5)
    )
    fewer, more = (slurm_minutes(each, "h100") - 5 for each in (fewer, more))
    assert 9.9 < more / fewer < 10.1
    assert slurm_minutes(muon, "b200") < slurm_minutes(muon, "a100")


def test_a_forecast_is_of_all_steps_unless_its_target_is_published(asked, told):
    name, steps = "dgxa100_8x8x48x1", 20_000
    words = f"cluster --config {name} --set mlperf.division=open --set run.max_steps={steps}"
    assert asked(words)["samples_to_target"]["basis"] == "published"
    for changes in (
        ("eval.target_accuracy=none",),
        ("eval.target_accuracy=0.3",),
        ("model.objective=mlm",),
        ("data.max_predictions=77", "data.masking=dynamic"),
    ):
        more = [word for change in changes for word in ("--set", change)]
        found, lines = asked(words, *more), told(words, *more)
        assert found["run"]["steps"] == steps and found["samples_to_target"]["basis"] == "all steps"
        assert found["published_minutes"] is None
        assert "samples: 61,440,000 (all steps: " in lines and "published samples" not in lines
        assert ("warning: the run ends earlier" in lines) == (not changes[0].endswith("none"))
        settings = ("mlperf.division=open", f"run.max_steps={steps}", *changes)
        limit = slurm_minutes(load_config(CONFIGS / f"{name}.toml", settings), name)
        assert found["slurm_minutes"] == pytest.approx(limit, abs=2)  # which simulates AdamW


@pytest.mark.parametrize(("accelerator", "every"), [("a100", 5), ("h100", 17), ("h200", 23)])
def test_every_number_of_nodes_has_a_closed_config(accelerator, every, monkeypatch):
    monkeypatch.setattr("bert_tools.plan.suggest.slurm_minutes", lambda *_: 240)  # it simulates
    batches = []
    for nodes in (*range(1, 64), *range(64, 1025, every)):
        found = suggest(nodes, 8, accelerator=accelerator)
        parallel = found.config.parallel
        assert (parallel.nodes, parallel.ranks_per_node) == (nodes, 8)
        assert parallel.global_batch_size <= 16_384
        assert found.config.mlperf.division == "closed"
        assert found.steps <= found.config.max_steps
        text = to_toml(found)
        assert config_from_tables(tomllib.loads(text), "test") == found.config
        assert max(map(len, text.split("\n"))) < 1000
        batches.append(parallel.global_batch_size)
    # Sequences of a rank are whole, so that the batch falls where three are one too many: by 1/3.
    assert all(after > 0.66 * before for before, after in pairwise(batches))


def test_published_runs_lie_in_the_range_of_the_forecast():
    """Ours is another program; NVIDIA's on 8, 64, 1,024 and 4,096 A100 are near it, not on it."""
    for nodes, minutes in ((1, 16.882), (8, 2.497), (128, 0.421), (512, 0.206)):
        found = suggest(nodes, 8)
        expected = simulate(found.config, found.name)
        assert expected.low < 60 * minutes < expected.high


def test_the_file_is_one_that_config_accepts_and_is_not_replaced(asked, told):
    answer = asked("suggest --nodes 3 --gpus-per-node 4")
    path = Path(answer["file"])
    parallel = load_config(path).parallel
    batch, accumulation = parallel.local_batch_size, parallel.grad_accum_steps
    assert answer["file"] == f"runs/dgxa100_3x4x{batch}x{accumulation}.toml"
    assert answer["global_batch_size"] == parallel.global_batch_size
    found = asked("cluster --accelerator a100 --config", path)
    assert found["run"]["steps"] == answer["steps"]
    before = path.read_bytes()
    words = ("suggest --nodes 3 --gpus-per-node 4 --out", path)
    assert "exists; pass a new file" in told(*words, status=2)
    assert path.read_bytes() == before
    assert asked("suggest --nodes 1 --gpus-per-node 2 --out new/folder/two.toml")
    assert load_config(Path("new/folder/two.toml")).parallel.world_size == 2
    assert main(["config", "show", answer["file"]]) == 0


def test_the_command_for_the_time_can_be_pasted(told):
    for out in ("a b/own.toml", "it's.toml"):
        lines = told("suggest --nodes 1 --gpus-per-node 2 --out", Path(out)).splitlines()
        command = lines[-1].removeprefix("expected time: ").removeprefix("mlperf_bert plan ")
        assert str(Path(out)) in shlex.split(command)
        assert "time to train: " in told(command)
