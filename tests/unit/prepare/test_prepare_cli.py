"""The `prepare` sub-command: which options go together, and that parsing imports nothing heavy."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.index import Manifest
from mlperf_bert.prepare.cli import add_arguments, run

VOCAB = Path(__file__).parents[2] / "golden" / "data" / "own_vocab.txt"


def call(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def test_text_with_defaults(
    texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    words = ("--text", *texts, "--vocab", VOCAB, "--out", out, "--workers", "1")
    assert call(*words) == 0
    manifest = Manifest.load(out)
    settings = (manifest.max_seq_length, manifest.max_predictions, manifest.dupe_factor)
    assert (*settings, manifest.seed) == (512, 76, 10, 12345)
    printed = capsys.readouterr().out
    assert "prepared 2 of 2 texts" in printed
    assert f"{manifest.num_samples} examples in 2 shards" in printed


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--text", "a.txt", "--out", "d"], "--vocab: is missing"),
        (
            ["--text", "a.txt", "--vocab", "v", "--out", "d", "--config", "c.toml"],
            "--config: does not",
        ),
        (["--embedded", "--out", "d"], "--config: is missing"),
        (
            ["--embedded", "--config", "c.toml", "--out", "d", "--workers", "2"],
            "--workers: does not",
        ),
        (["--embedded", "--config", "c.toml", "--out", "d", "--dupe-factor", "2"], "--dupe-factor"),
        (["--hdf5", "a", "--vocab", "v", "--out", "d", "--seed", "1"], "--seed: does not go with"),
        (["--text", "a", "--vocab", str(VOCAB), "--out", "d", "--workers", "0"], "workers: is 0"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        call(*words)


@pytest.mark.parametrize("module", ["cli", "verify.report"])
def test_building_the_parser_imports_nothing_heavy(module: str) -> None:
    code = (
        "import argparse, sys\n"
        f"from mlperf_bert.prepare.{module} import add_arguments\n"
        "add_arguments(argparse.ArgumentParser())\n"
        "print({'torch', 'numpy', 'numba', 'h5py', 'rich'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
