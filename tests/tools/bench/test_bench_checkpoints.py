"""`bench checkpoints`: every block of every pair is there, and what was written is whole."""

from pathlib import Path

import pytest
from bench_cases import CPU, bench, measured, tiny

from bert_tools.bench.checkpoints import block
from bert_tools.bench.training_run import ALONE, training_run
from mlperf_bert.checkpoint.manifest import complete_checkpoints
from mlperf_bert.checkpoint.state import verify
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.common.errors import ConfigError

BRIEF = ("--pairs", 3, "--steps", 4)


def test_ratios_follow_from_the_blocks(tmp_path: Path) -> None:
    result, words, progress = measured("checkpoints", *BRIEF, "--directory", tmp_path)
    assert result["steps_per_block"] == 4
    ratios = sorted(pair["with_s"] / pair["without_s"] for pair in result["pairs"])
    assert len(ratios) == 3
    assert [result[f"{name}_ratio"] for name in ("lowest", "median", "highest")] == ratios
    for pair in result["pairs"]:
        assert 0 < pair["paused_s"] + pair["waited_s"] < pair["with_s"]
    assert result["checkpoint_bytes"] > 3 * 4 * 104 * 32  # word embedding and its two moments
    assert list(tmp_path.iterdir()) == []
    assert words.count("\npair ") == progress.count("pair ") == 3
    assert "median ratio" in words and "1 layers, hidden 32" in words


def test_a_block_leaves_the_checkpoint_of_its_middle(tmp_path: Path) -> None:
    config = tiny()
    with training_run(config, CPU, num_updates=2) as run:
        writer = CheckpointWriter(tmp_path, run.optimizer, config, ALONE, CPU, keep_last=1)
        block(run, 0, 3, None)
        assert complete_checkpoints(tmp_path) == []
        block(run, 3, 5, writer)
        (found,) = complete_checkpoints(tmp_path)
        assert verify(found).step == 3 + 2


def test_a_directory_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--directory: No such file"):
        bench("checkpoints", "--directory", "/nonexistent")
