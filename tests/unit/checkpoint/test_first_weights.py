"""What a run may begin with is asked before it begins, by `train` and by run_and_time.sh alike."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import MODEL, read_manifest, resolve
from mlperf_bert.config.run_config import may_begin_with
from mlperf_bert.data.index import Manifest
from support import contents, mlperf_records, refusal, run_cli

CLOSED = ("--set", "mlperf.division=closed")
ONE_STEP = ("--set", "run.max_steps=1", "--set", "run.warm_up_steps=0")
OTHER = "0" * 64


@pytest.fixture(scope="module")
def weights(
    synthetic_data: Path, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint of the tiny model."""
    root = tmp_path_factory.mktemp("first")
    words = ["--config", tiny_config, "--data", synthetic_data, "--run-dir", root, *ONE_STEP]
    assert main(["train", *map(str, words)]) == 3
    return root / "run_0" / "checkpoints"


def digest(weights: Path) -> str:
    return read_manifest(resolve(weights)).files[MODEL].sha256


def test_a_closed_run_without_weights_is_refused_at_once(
    synthetic_data: Path, tiny_config: Path, tmp_path: Path
) -> None:
    places = ("--config", tiny_config, "--data", synthetic_data, "--run-dir", tmp_path / "run")
    started = time.monotonic()
    done = run_cli("train", *places, *CLOSED)
    assert time.monotonic() - started < 5
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "run.init_checkpoint: is not set; the closed division starts" in done.stderr
    assert "INIT_CHECKPOINT" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "given", "said"),
    [
        ([], "nowhere", "run.init_checkpoint: is nowhere, which is not there; give"),
        (["model.hidden_size=16"], "", "model.hidden_size: is 16, the weights in"),
        (["model.num_heads=4"], "", "model.num_heads: is 4, the weights in"),
        ([f"run.init_checkpoint_sha256='{OTHER}'"], "", f"is {OTHER}, the weights in"),
    ],
)
def test_other_weights_than_the_configured_are_refused(
    settings: list[str],
    given: str,
    said: str,
    weights: Path,
    synthetic_data: Path,
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    words += ["--init-checkpoint", given or str(weights)]
    where = ("--data", synthetic_data, "--run-dir", tmp_path / "run")
    line = refusal(capsys, "train", "--config", tiny_config, *where, *words)
    assert said in line and not (tmp_path / "run").exists()
    check = ("--check-start", synthetic_data, *words)
    assert refusal(capsys, "config", tiny_config, *check) == line


def test_weights_of_another_vocabulary_are_refused(
    weights: Path,
    synthetic_data: Path,
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    index = tmp_path / "train" / "index"
    index.mkdir(parents=True)
    other = replace(Manifest.load(synthetic_data / "train"), vocabulary_sha256=OTHER)
    (index / "dataset.json").write_bytes(other.to_json())
    check = ("--init-checkpoint", weights, "--check-start", tmp_path)
    assert "trained with another vocabulary" in refusal(capsys, "config", tiny_config, *check)


def test_a_closed_run_begins_with_the_weights_that_its_file_names(
    weights: Path, synthetic_data: Path, tiny_config: Path, tmp_path: Path
) -> None:
    config = tmp_path / "closed.toml"
    named = f'[run]\ninit_checkpoint = "{weights}"\ninit_checkpoint_sha256 = "{digest(weights)}"\n'
    config.write_text(tiny_config.read_text().replace("[run]\n", named))
    before = contents(weights)
    words = ["--config", config, "--data", synthetic_data, "--run-dir", tmp_path, *CLOSED]
    assert main(["train", *map(str, (*words, *ONE_STEP))]) == 3
    (record,) = mlperf_records(tmp_path / "result_0.txt", "initial_weights")
    assert record["value"] == "checkpoint" and contents(weights) == before
    more = ["--run-dir", tmp_path / "more", "--set", "run.max_steps=2", "--set"]
    on = [*words, *more, "run.init_checkpoint=", "--set", "run.init_checkpoint_sha256="]
    on += ["--resume", tmp_path / "run_0" / "checkpoints"]
    assert main(["train", *map(str, on)]) == 3  # its own checkpoint is enough


def test_package_and_start_ask_the_same() -> None:
    assert may_begin_with("checkpoint", "closed") and may_begin_with("random", "open")
    assert not may_begin_with("random", "closed") and not may_begin_with(None, "closed")
