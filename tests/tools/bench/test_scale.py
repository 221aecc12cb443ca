"""`bench scale`: which rows it has, and how it goes on where one cannot be measured."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_tools.bench import cli, scale
from bert_tools.bench.run_options import make_config
from bert_tools.bench.training_run import TrainingRun, training_run
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig

CPU = torch.device("cpu")
MODEL = (
    *("scale", "--layers", "1", "--hidden", "32", "--heads", "2", "--vocab", "101"),
    *("--max-length", "32", "--threads", "1", "--device", "cpu", "--steps", "3"),
    *("--seconds", "0.01"),
)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args([*MODEL, *arguments])


def bench(*arguments: str) -> int:
    return cli.run(parse(*arguments))


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (2, [2]),
        (9, [2, 4, 8]),
        (447, [2, 4, 8, 16, 32, 64, 128, 256]),
        (512, [2, 4, 8, 16, 32, 64, 128, 256, 448, 512]),
    ],
)
def test_sizes(largest: int, sizes: list[int]) -> None:
    assert scale.batch_sizes(largest) == sizes


def test_every_size_is_measured_eager_and_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "scale.png"
    assert bench("--max-batch", "4", "--plot", str(plot), "--json") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["schema_version"] == 1
    rows = [(row["batch"], row["step_mode"]) for row in result["rows"]]
    assert rows == [(2, "eager"), (2, "captured"), (4, "eager"), (4, "captured")]
    assert all(row["samples_per_s"] > 0 for row in result["rows"])
    assert all(
        (row["padding_share"] > 0) == (row["step_mode"] == "captured") for row in result["rows"]
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert printed.err.count("samples/s") == 4


def test_sweep_has_capacities_around_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "sweep.png"
    arguments = ("--sweep", "32", "--step-mode", "captured", "--plot", str(plot))
    assert bench(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    tokens = [row["tokens"] for row in result["sweep"]]
    assert tokens == list(range(tokens[0], tokens[-1] + 1, scale.CAPACITY_STEP))
    assert tokens[0] < 32 * 16 < tokens[-1]  # half of the longest is about the mean
    for row in result["sweep"]:
        assert row["padding_share"] == 0
        assert row["mean_length"] == row["tokens"] / 32
    assert plot.exists()


def test_a_mode_without_memory_goes_no_further(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert bench("--max-batch", "8", "--json") == 0
    rows = {
        (row["batch"], row["step_mode"]): row for row in json.loads(capsys.readouterr().out)["rows"]
    }
    assert rows[2, "eager"]["samples_per_s"] > 0
    assert rows[4, "eager"]["reason"] == "out of memory (tried to allocate 9 GiB)"
    assert "already" in rows[8, "eager"]["reason"]
    assert rows[4, "eager"]["samples_per_s"] is rows[8, "eager"]["samples_per_s"] is None
    assert all(rows[size, "captured"]["samples_per_s"] > 0 for size in (2, 4, 8))


def test_no_row_begins_after_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--max-batch", "4", "--total-seconds", "1e-9") == 0
    words = capsys.readouterr().out
    assert words.count("not begun after") == 3


def test_a_step_that_cannot_run_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("model.attention", "cannot run", "use another")

    monkeypatch.setattr(scale, "training_run", refuse)
    config = make_config(parse("--batch", "2"))
    limits = scale.Limits(
        of_row=scale.HowLong(steps=1, seconds=1.0), total_seconds=60.0, clock=lambda: 0.0
    )
    result = scale.measure_batches(config, [2], CPU, limits, lambda _: None)
    assert all("model.attention: cannot run" in row["reason"] for row in result["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-batch", "1"), "--max-batch: is 1"),
        (("--total-seconds", "0"), "--total-seconds: is 0"),
        (("--sweep", "2"), "--sweep: 2 sequences of at most 32 tokens"),
    ],
)
def test_options_that_cannot_be(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(*arguments)
