"""`bench scale`: which rows it has, and how it goes on where one cannot be measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import PNG, bench, measured, result_of

from bert_tools.bench import scale
from bert_tools.bench.training_run import TrainingRun, training_run
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig

BRIEF = ("--steps", 3, "--seconds", 0.01)


def test_sizes() -> None:
    assert scale.batch_sizes(2) == [2]
    assert scale.batch_sizes(9) == [2, 4, 8]
    assert scale.batch_sizes(447) == [2, 4, 8, 16, 32, 64, 128, 256]
    assert scale.batch_sizes(512)[-3:] == [256, 448, 512]


def test_every_size_is_measured_eager_and_captured(tmp_path: Path) -> None:
    plot = tmp_path / "scale.png"
    result = result_of("scale", *BRIEF, "--max-batch", 4, "--out", plot)
    rows = [(row["batch"], row["step_mode"]) for row in result["rows"]]
    assert rows == [(2, "eager"), (2, "captured"), (4, "eager"), (4, "captured")]
    assert all(row["samples_per_s"] > 0 for row in result["rows"])
    assert all(
        (row["padding_share"] > 0) == (row["step_mode"] == "captured") for row in result["rows"]
    )
    assert plot.read_bytes().startswith(PNG)


def test_sweep_has_capacities_around_the_mean(tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"
    options = (*BRIEF, "--sweep", 16, "--out", plot)
    result = result_of("scale", *options, settings=("run.step_mode=captured",))
    tokens = [row["tokens"] for row in result["sweep"]]
    assert tokens == list(range(tokens[0], tokens[-1] + 1, scale.CAPACITY_STEP))
    assert tokens[0] < 16 * 16 < tokens[-1]  # half of the longest is about the mean
    for row in result["sweep"]:
        assert row["padding_share"] == 0
        assert row["mean_length"] == row["tokens"] / 16
    assert result["config"]["parallel"]["local_batch_size"] == 16
    assert plot.read_bytes().startswith(PNG)


def test_a_mode_without_memory_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps of 4 sequences are out of memory here."""

    @contextmanager
    def short_of_memory(
        config: RunConfig, device: torch.device, **options: Any
    ) -> Iterator[TrainingRun]:
        if config.run.step_mode == "eager" and config.parallel.local_batch_size == 4:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")
        with training_run(config, device, **options) as run:
            yield run

    monkeypatch.setattr(scale, "training_run", short_of_memory)
    result = result_of("scale", *BRIEF, "--max-batch", 8)
    rows = {(row["batch"], row["step_mode"]): row for row in result["rows"]}
    assert rows[2, "eager"]["samples_per_s"] > 0
    assert rows[4, "eager"]["reason"] == "out of memory (tried to allocate 9 GiB)"
    assert "already" in rows[8, "eager"]["reason"]
    assert rows[4, "eager"]["samples_per_s"] is rows[8, "eager"]["samples_per_s"] is None
    assert all(rows[size, "captured"]["samples_per_s"] > 0 for size in (2, 4, 8))


def test_no_row_begins_after_the_time_is_over() -> None:
    _, words, progress = measured("scale", *BRIEF, "--max-batch", 4, "--total-seconds", 1e-9)
    assert words.count("not begun after") == 3
    assert progress.count("samples/s") == 1


def test_a_step_that_cannot_run_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("model.attention", "cannot run", "use another")

    monkeypatch.setattr(scale, "training_run", refuse)
    result = result_of("scale", "--max-batch", 2)
    assert len(result["rows"]) == 2
    assert all("model.attention: cannot run" in row["reason"] for row in result["rows"])


def test_options_that_cannot_be() -> None:
    for option, value, message in (
        ("--max-batch", 1, "--max-batch: is 1"),
        ("--sweep", 2, "--sweep: 2 sequences of at most 32 tokens"),
        ("--out", "/nonexistent/scale.png", "--out: .* does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench("scale", option, value)
