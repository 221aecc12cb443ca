"""Every config that is shipped is what its name, its division's rules and its source say."""

import re

import pytest

from bert_tools.plan.balance import as_configured, measure_row, variants
from bert_tools.plan.recipes import lamb_recipe, samples_to_target
from bert_tools.plan.sample_index import wikipedia_index
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import CLOSED_TARGET_ACCURACY
from mlperf_bert.config.sections import CLIPPED_TOGETHER
from mlperf_bert.optim.schedule import learning_rate
from support import CONFIGS, REPOSITORY

SIZE = re.compile(r"_(\d+)x(\d+)x(\d+)x(\d+)$")
NAMED_BY_SIZE = sorted(path for path in CONFIGS.glob("*.toml") if SIZE.search(path.stem))
MODERN = [path for path in NAMED_BY_SIZE if path.stem.startswith("modern_")]
OPEN = [path for path in NAMED_BY_SIZE if path.stem.startswith("open_")] + MODERN
CLOSED = [path for path in NAMED_BY_SIZE if path not in OPEN]


def name(path):
    return path.stem


def load(stem):
    return load_config(CONFIGS / f"{stem}.toml")


@pytest.mark.parametrize("path", NAMED_BY_SIZE, ids=name)
def test_captured_on_cuda_with_bert_large(path):
    """Or with ModernBERT-base, whose number of weights is the published 149 million."""
    config, text = load_config(path), path.read_text("utf-8")
    sizes = ("nodes", "ranks_per_node", "local_batch_size", "grad_accum_steps")
    size = "x".join(str(getattr(config.parallel, each)) for each in sizes)
    assert path.stem.endswith(f"_{size}")
    assert text.startswith("# Not run. ")
    assert config.mlperf.division == ("open" if path in OPEN else "closed")
    assert (config.run.device, config.run.step_mode) == ("cuda", "captured")
    if path in MODERN:
        assert config.model.num_parameters // 10**6 == 149
    else:
        assert (config.model.num_layers, config.model.hidden_size) == (24, 1024)
    assert config.model.precision == "bf16"
    # No futures inside a capture (docs/concepts/captured_step.md); one rank reduces nothing.
    several = "zero1_node" if config.optim.name == "muon" else "flat"
    assert config.parallel.data_parallel == (several if config.parallel.world_size > 1 else "ddp")
    assert config.data.max_seq_length == (1024 if path in MODERN else 512)
    assert config.schedule.decay_steps <= config.max_steps


@pytest.mark.parametrize("path", CLOSED, ids=name)
def test_closed_division(path):
    config = load_config(path)
    assert config.mlperf.enforce_rules  # so that loading it has checked the rules
    assert config.data.sampler == "uniform"
    assert config.eval.target_accuracy == CLOSED_TARGET_ACCURACY
    assert config.run.max_steps == "schedule"
    # Hyper-parameters are those of the batch.
    batch, optim, schedule = config.parallel.global_batch_size, config.optim, config.schedule
    recipe = lamb_recipe(batch)
    for field in ("learning_rate", "weight_decay", "beta_1", "beta_2"):
        assert getattr(optim, field) == getattr(recipe, field)
    for field in ("warmup_steps", "decay_steps", "start_warmup_step", "form"):
        assert getattr(schedule, field) == getattr(recipe, field)
    assert (optim.epsilon, schedule.end_learning_rate) == (1e-6, 0)
    # The schedule is long enough.
    assert config.max_steps * batch > samples_to_target(batch, "closed_lamb").samples


def test_there_is_a_closed_config_for_each_size_and_the_document_lists_it():
    document = (REPOSITORY / "docs/reference/hyperparameters.md").read_text(encoding="utf-8")
    sizes = {}
    for path in CLOSED:
        parallel = load_config(path).parallel
        if parallel.ranks_per_node != 8:
            continue
        sizes.setdefault(path.stem.split("_")[0], []).append(parallel.nodes)
        assert f"`{path.name}` | {parallel.global_batch_size:,} |" in document
    few = [1, 2, 8, 32]
    found = {system: sorted(nodes) for system, nodes in sizes.items()}
    assert found == {"dgxa100": [1, 2, 4, 8, 16, 32, 64, 128], "h100": few, "h200": few}


# ModernBERT's sequences are longer than the published lengths.
ALONE = re.compile("_1x1x[0-9]+x1$")

QUICK = ("dgxa100_1x8x56x1", "open_adamw_dgxa100_128x8x16x1")
DEALT = [
    pytest.param(each, marks=[] if each.stem in QUICK else pytest.mark.longest, id=each.stem)
    for each in NAMED_BY_SIZE
    if each not in MODERN and not ALONE.search(each.stem)
]


@pytest.mark.parametrize("path", DEALT)
def test_the_policy_is_the_better_one_and_the_comment_says_by_how_much(path):
    own, other = (
        measure_row(each, wikipedia_index(), draws=60) for each in variants(load_config(path))[:2]
    )
    comment = f"# {as_configured([own, other])}\n# (mlperf_bert plan balance --config {path.stem})"
    assert f"{comment}\n" in path.read_text("utf-8")
    config = load_config(path)
    if config.clip.policy in CLIPPED_TOGETHER and config.optim.loss_normalization == "global":
        assert own.capacity_waste_ladder < other.capacity_waste_ladder
        assert own.idle_fraction <= other.idle_fraction
    else:  # who has what matters to the result, so it is as published
        assert own.policy == "presort_local" and "# As published, " in path.read_text("utf-8")


def test_open_recipe_at_448_is_the_published_one():
    config = load("open_adamw_h200_1x1x448x1")
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.0, 0.0)
    assert config.clip.policy == "none"
    assert config.eval_interval_samples == 55 * 448
    # Published as a share of a weight a step, not times the learning rate.
    assert config.optim.weight_decay * config.optim.learning_rate == pytest.approx(1e-5)
    steps = 630_000 / 448
    rate = learning_rate(round(steps), config.schedule, config.optim.learning_rate)
    assert rate == pytest.approx(config.optim.learning_rate / 2, rel=0.03)


def test_the_records_recipe_is_the_published_one():
    config = load("open_adamw_dgxa100_128x8x16x1")
    assert config.parallel.global_batch_size == 16_384
    # The rate at the steps of the published schedule, with its jump where the warm-up ends.
    published = {2: 8.63e-5, 65: 3.882e-4, 66: 4.497e-4, 82: 3.930e-4, 139: 1.911e-4, 200: 4.945e-5}
    for step, rate in published.items():
        ours = learning_rate(step, config.schedule, config.optim.learning_rate)
        assert ours == pytest.approx(rate, rel=1e-3)
    assert config.max_steps == 299
    clip = config.clip
    assert (clip.policy, clip.bucket_limit) == ("bucket_before_allreduce", "equal_share")
    assert clip.max_norm == 1.0
    assert (config.data.sampler, config.optim.epsilon) == ("stratified_6_3_2_5", 1e-9)
