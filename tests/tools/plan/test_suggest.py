"""`mlperf_bert plan suggest`: published sizes come back, any other has a config that loads."""

import csv
import json
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from bert_tools.plan.batch_choice import Accelerator
from bert_tools.plan.entries import published_entries
from bert_tools.plan.samples_to_target import Recipe
from bert_tools.plan.suggest import suggest, to_toml
from mlperf_bert.__main__ import main
from mlperf_bert.config.files import config_from_tables, load_config
from support import CONFIGS, TOOLS

SHIPPED = [
    (1, 8, "a100", "closed_lamb", "dgxa100_1x8x56x1"),
    (2, 8, "a100", "closed_lamb", "dgxa100_2x8x48x1"),
    (4, 8, "a100", "closed_lamb", "dgxa100_4x8x48x1"),
    (8, 8, "a100", "closed_lamb", "dgxa100_8x8x48x1"),
    (16, 8, "a100", "closed_lamb", "dgxa100_16x8x24x1"),
    (32, 8, "a100", "closed_lamb", "dgxa100_32x8x16x1"),
    (64, 8, "a100", "closed_lamb", "dgxa100_64x8x8x1"),
    (128, 8, "a100", "closed_lamb", "dgxa100_128x8x4x1"),
    (1, 1, "h200", "closed_lamb", "h200_1x1x448x1"),
    (128, 8, "a100", "open_adam", "open_adamw_dgxa100_128x8x16x1"),
    (1, 1, "h200", "open_adamw", "open_adamw_h200_1x1x448x1"),
]


@pytest.mark.parametrize(("nodes", "gpus", "accelerator", "recipe", "stem"), SHIPPED)
def test_sizes_with_a_recipe_of_their_own_return_it(
    nodes: int, gpus: int, accelerator: Accelerator, recipe: Recipe, stem: str
) -> None:
    """The shipped configs were written by hand after the published recipes."""
    found = suggest(nodes, gpus, accelerator=accelerator, recipe=recipe)
    assert found.config == load_config(CONFIGS / f"{stem}.toml")
    assert found.name.endswith(stem.split("_", 1 if recipe == "closed_lamb" else 2)[-1] + ".toml")
    assert found.expected.samples.in_range


def test_batches_that_are_called_published_are_in_the_shipped_table() -> None:
    text = (TOOLS / "plan" / "batch_sizes.csv").read_text("ascii")
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    ran = {
        (name, entry.accelerators, entry.global_batch_size)
        for entry in published_entries()
        for name in ("a100", "h100", "h200")
        if name in entry.accelerator.lower()
    }
    called = [row for row in rows if row["kind"] == "published"]
    assert len(called) >= 10
    for row in called:
        size = int(row["accelerators"]), int(row["global_batch_size"])
        assert (row["accelerator"], *size) in ran, row


def test_512_nodes_have_the_published_set_at_16384() -> None:
    config = suggest(512, 8).config
    optim, schedule = config.optim, config.schedule
    assert (config.parallel.local_batch_size, config.parallel.global_batch_size) == (4, 16_384)
    assert (optim.learning_rate, optim.beta_1, optim.beta_2) == (3.3e-3, 0.75, 0.9)
    assert (schedule.decay_steps, schedule.warmup_steps, schedule.start_warmup_step) == (
        *(470, 290, -100),
    )


def test_171_nodes_have_the_recipe_of_samsungs_second_entry() -> None:
    config = suggest(171, 8, recipe="open_adam").config
    assert config.parallel.global_batch_size == 16_416
    assert (config.data.sampler, config.data.balance) == ("strata_4_2_2_4", "presort_local")
    assert (config.schedule.decay_steps, config.max_steps) == (179, 299)


def test_the_hypothesis_at_4096_is_the_shipped_one() -> None:
    found = suggest(128, 8, recipe="open_hypothesis").config
    shipped = load_config(CONFIGS / "open_adamw_dgxa100_128x8x4x1.toml")
    assert found.optim.learning_rate == shipped.optim.learning_rate
    assert found.optim.beta_1 == pytest.approx(shipped.optim.beta_1, abs=0.005)
    assert found.optim.beta_2 == pytest.approx(shipped.optim.beta_2, abs=0.005)
    assert found.optim.weight_decay == shipped.optim.weight_decay
    assert found.schedule == shipped.schedule
    assert (found.model, found.clip, found.data) == (shipped.model, shipped.clip, shipped.data)


@pytest.mark.parametrize(("accelerator", "every"), [("a100", 1), ("h100", 7), ("h200", 11)])
def test_every_number_of_nodes_has_a_closed_config(accelerator: Accelerator, every: int) -> None:
    batches = []
    for nodes in range(1, 1025, every):
        found = suggest(nodes, 8, accelerator=accelerator)
        parallel = found.config.parallel
        assert (parallel.nodes, parallel.ranks_per_node) == (nodes, 8)
        assert parallel.global_batch_size <= 16_384
        assert found.config.mlperf.division == "closed"
        assert not any("may not fit" in each for each in found.warnings)
        text = to_toml(found)
        assert config_from_tables(tomllib.loads(text), "test") == found.config
        assert max(map(len, text.split("\n"))) < 1000
        batches.append(parallel.global_batch_size)
    # Sequences of a rank are whole, so that the batch falls where three are one too many: by 1/3.
    assert all(after > 0.66 * before for before, after in pairwise(batches))


@pytest.mark.parametrize("recipe", ["open_adam", "open_adamw", "open_hypothesis"])
@pytest.mark.parametrize("nodes", [1, 3, 7, 100, 171, 512, 1000, 4096])
def test_open_recipes_have_a_config_for_any_size(recipe: Recipe, nodes: int) -> None:
    for gpus in (1, 4, 8):
        found = suggest(nodes, gpus, recipe=recipe)
        assert config_from_tables(tomllib.loads(to_toml(found)), "test") == found.config
        assert found.config.mlperf.division == "open"
        assert found.expected.steps <= found.config.max_steps or any(
            "raise run.max_steps" in each for each in found.warnings
        )


def test_more_nodes_take_less_time_and_no_fewer_samples() -> None:
    found = [suggest(2**power, 8) for power in range(11)]
    times = [each.expected.time_min for each in found]
    batches = [each.config.parallel.global_batch_size for each in found]
    rates = [each.config.optim.learning_rate for each in found]
    steps = [each.expected.steps for each in found]
    assert times == sorted(times, reverse=True)
    assert batches == sorted(batches) and rates == sorted(rates)
    assert steps == sorted(steps, reverse=True)
    for each in found:
        expected = each.expected
        assert expected.time_low < expected.time_min < expected.time_high


def test_the_time_is_samples_over_the_laws_throughput() -> None:
    """59.7 * p^-0.701 at 4,096: 0.175 minutes, by the exponents that are quoted."""
    found = suggest(512, 8)
    throughput = 507.2 * 4096**0.805
    assert found.expected.seq_per_s == pytest.approx(throughput, rel=0.01)
    assert found.expected.time_min == pytest.approx(5.469e6 / throughput / 60, rel=0.01)
    assert [entry.time_min for entry in found.published] == [0.206]
    assert found.expected.time_low < 0.206 < found.expected.time_high


def test_few_gpus_accumulate_to_the_published_batch() -> None:
    for gpus, accumulation in ((1, 8), (2, 4), (4, 2)):
        parallel = suggest(1, gpus).config.parallel
        assert parallel.global_batch_size == 448
        assert (parallel.local_batch_size, parallel.grad_accum_steps) == (56, accumulation)


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("--nodes", "5"), "no set is published for a batch of 1,920"),
        (("--nodes", "1024"), "8 to 4,096 accelerators: the time for 8,192 is extrapolated"),
        (("--nodes", "1", "--local-batch-size", "100"), "may not fit"),
        (("--nodes", "99", "--recipe", "open_adamw"), "samples to the target at a batch of"),
        (("--nodes", "128", "--recipe", "open_hypothesis"), "nobody has tried it"),
        (("--nodes", "1", "--local-batch-size", "1"), "some 448 sequences an update on as many"),
        (("--nodes", "128", "--recipe", "open_adamw"), "with 1,024 it is lower, and the time long"),
    ],
)
def test_what_leaves_the_known_range_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], warning: str
) -> None:
    path = tmp_path / "own.toml"
    path.unlink(missing_ok=True)
    assert main(["plan", "suggest", "--gpus", "8", *words, "--out", str(path)]) == 0
    assert warning in capsys.readouterr().out
    comment = " ".join(line[2:] for line in path.read_text().split("\n") if line.startswith("#"))
    assert warning in comment


def test_a_published_size_is_not_warned_of() -> None:
    assert [suggest(nodes, 8).warnings for nodes in (1, 8, 128, 512)] == [()] * 4


def test_the_file_is_one_that_config_accepts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", "suggest", "--nodes", "3", "--gpus", "4", "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    parallel = load_config(tmp_path / answer["file"]).parallel
    batch, accumulation = parallel.local_batch_size, parallel.grad_accum_steps
    assert answer["file"] == f"dgxa100_3x4x{batch}x{accumulation}.toml"
    assert answer["global_batch_size"] == parallel.global_batch_size
    assert answer["schema_version"] == 1
    assert main(["config", answer["file"]]) == 0
    before = (tmp_path / answer["file"]).read_bytes()
    capsys.readouterr()
    assert main(words) == 2
    assert "exists; name a new file" in capsys.readouterr().err
    assert (tmp_path / answer["file"]).read_bytes() == before
