"""Initial weights are checked before a run begins, by `train` and by run_and_time.sh alike."""

import shutil
import sys
from dataclasses import replace

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import MANIFEST, read_config, read_manifest, resolve
from mlperf_bert.data.index import Manifest
from support import mlperf_records, refusal, run_process

CLOSED = ("--set", "mlperf.division=closed")
ONE_STEP = ("--set", "run.max_steps=1", "--set", "run.warm_up_steps=0")
OTHER = "0" * 64


@pytest.fixture(scope="module")
def weights(synthetic_data, tiny_config, tmp_path_factory):
    """Checkpoints of the tiny model."""
    root = tmp_path_factory.mktemp("first")
    words = ["--config", tiny_config, "--data", synthetic_data, "--run-dir", root, *ONE_STEP]
    assert main(["train", *map(str, words)]) == 3
    return root / "run_0" / "checkpoints"


def test_a_closed_run_without_weights_is_refused_at_once(synthetic_data, tiny_config, tmp_path):
    places = ("--config", tiny_config, "--data", synthetic_data, "--run-dir", tmp_path / "run")
    code = "import sys; from mlperf_bert.__main__ import main; status = main(sys.argv[1:])"
    code += "; sys.exit(99 if 'torch' in sys.modules else status)"  # whose import takes seconds
    done = run_process(sys.executable, "-c", code, "train", *places, *CLOSED)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "run.init_checkpoint: is not set, but the closed division requires" in done.stderr
    assert "INIT_CHECKPOINT" in done.stderr and done.stderr.count("\n") == 1


def test_other_weights_than_the_configured_are_refused(
    weights,
    synthetic_data,
    tiny_config,
    tmp_path,
    capsys,
):
    (tmp_path / "other" / "train" / "index").mkdir(parents=True)
    other = replace(Manifest.load(synthetic_data / "train"), vocabulary_sha256=OTHER)
    (tmp_path / "other/train/index/dataset.json").write_bytes(other.to_json())
    manifest = read_manifest(resolve(weights))
    tables = {**manifest.config, "model": {**manifest.config["model"], "objective": "mlm"}}
    for name, change in (("empty", {"files": {}}), ("mlm", {"config": tables})):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_bytes(replace(manifest, **change).to_json())
    for setting, given, data, said in (
        ("run.seed=1", "nowhere", synthetic_data, "nowhere: no such directory; pass a checkpoint"),
        (
            "model.hidden_size=16",
            weights,
            synthetic_data,
            "model.hidden_size: is 16, but the weights",
        ),
        ("model.num_heads=4", weights, synthetic_data, "model.num_heads: is 4, but the weights"),
        ("run.seed=1", tmp_path / "empty", synthetic_data, "has no model.safetensors"),
        ("model.objective=mlm_nsp", tmp_path / "mlm", synthetic_data, "have no next-sentence head"),
        ("run.seed=1", weights, tmp_path / "other", "was trained with another vocabulary"),
    ):
        words = ("--init-checkpoint", given, "--set", setting)
        where = ("--data", data, "--run-dir", tmp_path / "run")
        line = refusal(capsys, "train", "--config", tiny_config, *where, *words)
        assert said in line and not (tmp_path / "run").exists()
        assert refusal(capsys, "config", "validate", tiny_config, *words, "--data", data) == line


def test_a_closed_run_begins_with_the_weights_that_its_file_names(
    weights, synthetic_data, tiny_config, tmp_path
):
    config = tmp_path / "closed.toml"
    named = f'[run]\ninit_checkpoint = "{weights}"\n'
    config.write_text(tiny_config.read_text().replace("[run]\n", named))
    words = ["--config", config, "--data", synthetic_data, "--run-dir", tmp_path, *CLOSED]
    assert main(["train", *map(str, (*words, *ONE_STEP))]) == 3
    on = [*words, "--run-dir", tmp_path / "more", "--set", "run.init_checkpoint="]
    on += ["--set", "run.max_steps=2", "--resume", tmp_path / "run_0" / "checkpoints"]
    assert main(["train", *map(str, on)]) == 3  # its own checkpoint is enough
    logs = [weights.parents[1], tmp_path, tmp_path / "more"]
    began = [mlperf_records(log / "result_0.txt", "initial_weights")[0]["value"] for log in logs]
    assert began == ["random", "checkpoint", "checkpoint"]


def test_a_resumed_run_keeps_the_weights_that_it_began_with(
    weights, synthetic_data, tiny_config, tmp_path, capsys
):
    steps = ("--set", "run.max_steps=3", "--set", "checkpoint.interval_steps=1")
    places = ("--config", tiny_config, "--data", synthetic_data, "--run-dir", tmp_path / "run")
    words = ["train", *map(str, (*places, *steps))]
    assert main([*words, "--init-checkpoint", str(weights)]) == 3
    own = tmp_path / "run/run_0"
    (own / "outcome.json").unlink()
    shutil.rmtree(resolve(own / "checkpoints"))
    on = [*words, "--resume", "auto"]
    other = shutil.copytree(weights, tmp_path / "other")
    line = refusal(capsys, *on, "--init-checkpoint", other)
    told = f"run.init_checkpoint: is {str(other)!r}, but the checkpoint has "
    assert told in line
    assert main(on) == 3
    places = ("--resume", own / "checkpoints", "--run-dir", tmp_path / "new")
    more = ("--set", "run.max_steps=9", "--init-checkpoint", other)
    assert told in refusal(capsys, *words, *places, *more)
    (record,) = mlperf_records(tmp_path / "run/result_0.txt", "initial_weights")
    assert record["value"] == "checkpoint"
    assert read_config(own / "checkpoints").run.init_checkpoint == str(weights)
