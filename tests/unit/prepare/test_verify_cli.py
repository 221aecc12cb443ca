"""The sub-command `verify`: what it prints, and what it raises."""

import argparse
import json
from pathlib import Path

import pytest

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.data.index import Manifest
from mlperf_bert.prepare.verify.report import MAX_PROBLEM_LINES, add_arguments, run
from verify_cases import check, flip, shard


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def test_the_command_prints_a_table(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(made, "--full", "--workers", "1") == 0
    printed = capsys.readouterr()
    for name, num_shards in (("train", 3), ("eval", 1)):
        num_samples = Manifest.load(made / name).num_samples
        assert f"{num_shards} shards, {num_samples:,} examples" in printed.out
    assert "ok      shard digests       3 of 3" in printed.out
    assert "4 of 4" in printed.err


def test_the_command_lists_every_problem_and_raises_the_first(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_files = MAX_PROBLEM_LINES + 10
    num_checks = sum(len(part.checks) for part in check(pair).sets)
    for number in range(num_files):
        (pair / "train" / "shards" / f"{number}.hdf5").touch()
    shard(pair).unlink()
    expected = rf"2 of {num_checks} checks failed, the first: .*b\.hdf5: No such"
    with pytest.raises(DataError, match=expected):
        call(pair)
    printed = capsys.readouterr().out
    assert "WRONG   shard sizes         2 of 3" in printed
    assert printed.count("is not in the manifest") == MAX_PROBLEM_LINES - 1
    assert f"and {num_files + 1 - MAX_PROBLEM_LINES} more" in printed


def test_json(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(shard(pair), 5)
    with pytest.raises(DataError):
        call(pair, "--full", "--json", "--workers", "1")
    values = json.loads(capsys.readouterr().out)
    assert (values["schema_version"], values["mode"], values["is_right"]) == (1, "full", False)
    found = {one["name"]: one for one in values["sets"]["train"]["checks"]}
    assert found["shard digests"]["status"] == "WRONG"
    assert found["shard digests"]["problems"][0]["where"] == str(shard(pair))
    assert values["sets"]["eval"]["statistics"]["mask_share"] == pytest.approx(0.8, abs=0.1)
    manifest = Manifest.load(pair / "eval")
    assert values["sets"]["eval"]["statistics"]["samples"] == manifest.num_samples


@pytest.mark.parametrize("workers", [-1, 0, 5000])
def test_a_wrong_number_of_workers(made: Path, workers: int) -> None:
    with pytest.raises(ConfigError, match="workers"):
        call(made, f"--workers={workers}")
