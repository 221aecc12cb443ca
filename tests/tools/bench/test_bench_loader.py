"""`bench loader` on a tiny set: every loader gives the same batches, and what is reported."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_cases import bench, result_of

from bert_tools.bench import loader
from bert_tools.bench.loader import make_contenders
from bert_tools.bench.synthetic import DISTINCT_SAMPLES, open_or_make_set
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.shards import SampleReader, Shard

ON_THE_HOST = ("lengths", "masked_counts", "shape")
TENSORS = [name for name in UnpaddedBatch.__slots__ if name not in ON_THE_HOST]


@pytest.fixture(scope="module")
def set_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "set"
    open_or_make_set(directory, num_bytes=3_000_000, seed=1)
    return directory


def test_the_made_up_set_is_large_enough_and_sound(set_dir: Path) -> None:
    index = open_or_make_set(set_dir, num_bytes=1, seed=2)  # there already, so it is kept
    (entry,) = index.manifest.shards
    shard = Shard(set_dir / "shards" / entry.file)
    assert shard.path.stat().st_size >= 3_000_000
    np.testing.assert_array_equal(shard.lengths(), index.lengths)
    np.testing.assert_array_equal(shard.masked_counts(), index.masked_counts)
    assert entry.num_samples % DISTINCT_SAMPLES == 0 and entry.num_samples > DISTINCT_SAMPLES
    assert index.lengths.mean() == pytest.approx(wikipedia_lengths().mean_length, rel=0.01)
    SampleReader(set_dir, index.manifest).read(np.arange(entry.num_samples))  # checks every value


def test_every_loader_gives_the_same_batches(set_dir: Path) -> None:
    contenders, _ = make_contenders()
    with ExitStack() as stack:
        opened = [
            stack.enter_context(contender(set_dir, 5, 1)) for contender in contenders.values()
        ]
        for _ in range(4):
            ours, *others = [next(batches) for batches in opened]
            for other in others:
                assert other.lengths == ours.lengths
                assert all(torch.equal(getattr(other, n), getattr(ours, n)) for n in TENSORS)


def test_result_has_a_row_for_each_loader(set_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "DATALOADERS", {"dataloader_2": 2})
    options = ("--out", set_dir, "--batches", 2, 3, "--rounds", 1, "--seconds", 0.01)
    result = result_of("loader", *options)
    contenders, dali_reason = make_contenders()
    assert result["dali_reason"] == dali_reason
    assert [(row["batch_size"], row["cache"], row["loader"]) for row in result["rows"]] == [
        (size, cache, name) for size in (2, 3) for cache in ("warm", "cold") for name in contenders
    ]
    for row in result["rows"]:
        ours = next(
            other
            for other in result["rows"]
            if other["loader"] == "thread"
            and (other["batch_size"], other["cache"]) == (row["batch_size"], row["cache"])
        )
        assert row["ratio"] == pytest.approx(ours["batches_per_s"] / row["batches_per_s"])
        assert row["samples_per_s"] == pytest.approx(row["batches_per_s"] * row["batch_size"])


def test_a_temporary_set_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: torch.device) -> None:
        raise ConfigError("data.loader", "'dali' needs nvidia-dali", "install it")

    monkeypatch.setattr(loader, "DaliCopy", missing)
    monkeypatch.setattr(loader, "DATALOADERS", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = ("--batches", 2, "--rounds", 1, "--seconds", 0.01, "--megabytes", 1)
    words, progress = bench("loader", *options)
    assert progress.count("round 1/1") == 1
    assert words.count("thread") == 2 and "'dali' needs nvidia-dali" in words
    assert list(tmp_path.iterdir()) == []


def test_a_batch_is_at_most_the_set(set_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "DATALOADERS", {})
    num_samples = open_or_make_set(set_dir, num_bytes=1, seed=1).manifest.num_samples
    options = ("--out", set_dir, "--rounds", 1, "--seconds", 0.01, "--batches", 2)
    for above in (num_samples + 1, 2 * num_samples):
        with pytest.raises(ConfigError, match=f"--batches: is {above}; set it to {num_samples} at"):
            bench("loader", *options, above)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory, problem in (("x" * 300, "name too long"), (tmp_path / "file" / "set", "file")):
        with pytest.raises(DataError, match=problem):
            bench("loader", "--out", directory, "--megabytes", 1)
