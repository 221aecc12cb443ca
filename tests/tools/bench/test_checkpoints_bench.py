"""`bench checkpoints`: every block of every pair is there, and what was written is whole."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_tools.bench import cli
from bert_tools.bench.checkpoints import Blocks
from bert_tools.bench.run_options import make_config
from bert_tools.bench.training_run import ALONE, training_run
from mlperf_bert.checkpoint.manifest import complete_checkpoints, verify
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.common.errors import ConfigError

CPU = torch.device("cpu")
ARGUMENTS = (
    *("checkpoints", "--layers", "1", "--hidden", "32", "--heads", "2", "--vocab", "101"),
    *("--max-length", "32", "--batch", "4", "--threads", "1", "--device", "cpu"),
    *("--pairs", "3", "--steps", "4"),
)


def parse(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args([*ARGUMENTS, *map(str, arguments)])


def test_ratios_follow_from_the_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(parse("--json", "--directory", tmp_path)) == 0
    printed = capsys.readouterr()
    result: dict[str, Any] = json.loads(printed.out)
    assert result["schema_version"] == 1
    assert result["steps_per_block"] == 4
    ratios = sorted(pair["with_s"] / pair["without_s"] for pair in result["pairs"])
    assert len(ratios) == 3
    assert [result[f"{name}_ratio"] for name in ("lowest", "median", "highest")] == ratios
    for pair in result["pairs"]:
        assert 0 < pair["paused_s"] + pair["waited_s"] < pair["with_s"]
    assert result["checkpoint_bytes"] > 3 * 4 * 104 * 32  # word embedding and its two moments
    assert printed.err.count("pair ") == 3
    assert list(tmp_path.iterdir()) == []


def test_words_name_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(parse()) == 0
    words = capsys.readouterr().out
    assert words.count("\npair ") == 3
    assert "median ratio" in words and "1 layers, hidden 32" in words


def test_a_block_leaves_the_checkpoint_of_its_middle(tmp_path: Path) -> None:
    config = make_config(parse())
    with training_run(config, CPU, num_updates=2) as run:
        writer = CheckpointWriter(tmp_path, run.optimizer, config, ALONE, CPU, keep_last=1)
        blocks = Blocks(run, writer)
        blocks.plain(3)
        assert complete_checkpoints(tmp_path) == []
        blocks.with_checkpoint(5)
        (found,) = complete_checkpoints(tmp_path)
        assert verify(found).step == 3 + 2
        assert blocks.step == 3 + 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pairs", "0"), "--pairs: is 0"),
        (("--steps", "0"), "--steps: is 0"),
        (("--directory", "/nonexistent"), "--directory: No such file"),
    ],
)
def test_options_that_cannot_be(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli.run(parse(*arguments))
