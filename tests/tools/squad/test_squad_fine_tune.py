"""A whole run on one rank: its record, its files, and how it ends early."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_tools.squad.fine_tune import fine_tune
from bert_tools.squad.inputs import SquadInputs
from bert_tools.squad.progress import TrainingProgress
from bert_tools.squad.record import RESULT
from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.weights import start_from
from checkpoint_cases import save_checkpoint
from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.common.errors import CheckpointError, ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.optimizers import make_optimizer_alone
from mlperf_bert.vocabulary.word_pieces import load_vocabulary
from squad_cases import LONGEST, SMALL, small_settings
from squad_sets import SPECIAL, qa, set_of
from support import TINY_CONFIG

CPU = torch.device("cpu")
ALONE = RankInfo(0, 1, 0, 1, 0, "single")
WORDS = [f"w{number}" for number in range(20)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> SquadInputs:
    directory = tmp_path_factory.mktemp("questions")
    (directory / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    for name, first in (("train", 0), ("dev", 3)):
        paragraphs = []
        for number in range(first, first + 6):
            text = " ".join(WORDS[number : number + 9])
            answer = WORDS[number + 2]
            asked = [
                qa(f"{name}{number}a", f"{WORDS[number]} ?", (answer, text.index(answer))),
                qa(f"{name}{number}b", "w19 ?"),
            ]
            paragraphs.append((text, asked))
        (directory / f"{name}.json").write_text(json.dumps(set_of(*paragraphs)))
    return SquadInputs(
        train=directory / "train.json",
        dev=directory / "dev.json",
        vocabulary=directory / "vocab.txt",
        model=replace(SMALL, vocab_size=25, num_layers=2),
    )


def settings_of(**changes: Any) -> SquadSettings:
    same = {"updates": 10, "noise_every": 4, "stride": 4, "max_question_length": 8}
    return small_settings("single", **{**same, **changes})


@pytest.fixture(scope="module")
def run(inputs: SquadInputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    run_dir = tmp_path_factory.mktemp("runs") / "single"
    return run_dir, fine_tune(settings_of(), inputs, run_dir, ALONE, CPU)


def test_the_record_is_complete(run: tuple[Path, Any]) -> None:
    run_dir, returned = run
    record = json.loads((run_dir / RESULT).read_text())
    assert record == json.loads(json.dumps(returned))
    assert record["schema_version"] == 1 and record["engine"] == "single"
    assert record["updates"] == len(record["losses"]) == len(record["step_seconds"]) == 10
    assert record["samples"] == 80
    # The first update, and the fourth and eighth for the noise, do not count for the rate.
    nulls = [number for number, each in enumerate(record["step_seconds"], 1) if each is None]
    assert nulls == [1, 4, 8]
    counted = [each for each in record["step_seconds"] if each is not None]
    assert record["samples_per_s"]["train"] == pytest.approx(8 * 7 / sum(counted))
    assert [each["update"] for each in record["noise"]] == [4, 8]
    assert record["data"]["train_questions"] == record["data"]["train_windows"] == 12
    assert record["answerable"]["questions"] == record["unanswerable"]["questions"] == 6
    assert record["bubble"] is None and record["timeline"] == []
    assert len(record["peak_memory_bytes"]) == len(record["cpu_seconds"]) == 1
    assert record["seconds"]["end_to_end"] == pytest.approx(
        sum(record["seconds"][part] for part in ("start", "train", "evaluate"))
    )
    assert record["init"] == "random" and record["skipped_updates"] == 0


def test_a_run_repeats_bit_by_bit(
    run: tuple[Path, Any], inputs: SquadInputs, tmp_path: Path
) -> None:
    again = fine_tune(settings_of(), inputs, tmp_path, ALONE, CPU)
    assert again is not None
    assert again["losses"] == run[1]["losses"]
    assert again["validation_loss"] == run[1]["validation_loss"]
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (tmp_path, run[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (
        fine_tune(settings_of(seed=2), inputs, tmp_path / "2", ALONE, CPU, save="nothing")["losses"]
        != run[1]["losses"]
    )  # type: ignore[index]
    assert os.listdir(tmp_path / "2") == [RESULT]


def test_a_used_run_directory_is_refused(run: tuple[Path, Any], inputs: SquadInputs) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        fine_tune(settings_of(), inputs, run[0], ALONE, CPU)


def test_a_model_without_a_record_is_replaced(
    run: tuple[Path, Any], inputs: SquadInputs, tmp_path: Path
) -> None:
    shutil.copytree(run[0] / "model", tmp_path / "model")  # as a kill before the record leaves it
    fine_tune(settings_of(seed=2, updates=2), inputs, tmp_path, ALONE, CPU)
    assert sorted(os.listdir(tmp_path)) == ["model", RESULT]
    ours, before = (load_file(path / "model" / "model.safetensors") for path in (tmp_path, run[0]))
    assert any(not torch.equal(ours[name], before[name]) for name in before)


@pytest.mark.parametrize("other", ["notes.txt", "model.safetensors"])
def test_a_model_of_something_else_is_refused_and_left(
    run: tuple[Path, Any], inputs: SquadInputs, tmp_path: Path, other: str
) -> None:
    model = shutil.copytree(run[0] / "model", tmp_path / "model")
    (model / other).unlink(missing_ok=True)
    save_file({"of": torch.ones(1)}, model / other, {"source": "another program"})
    before = sorted(path.name for path in model.iterdir())
    with pytest.raises(ConfigError, match="model: is there already"):
        fine_tune(settings_of(updates=2), inputs, tmp_path, ALONE, CPU)
    assert sorted(path.name for path in model.iterdir()) == before
    assert os.listdir(tmp_path) == ["model"]


def test_a_run_that_diverged_has_no_result(inputs: SquadInputs, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--learning-rate: is 1e\+30, .* diverged"):
        fine_tune(settings_of(learning_rate=1e30, updates=3), inputs, tmp_path, ALONE, CPU)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "option"),
    [
        (lambda settings, inputs: (replace(settings, max_length=LONGEST + 1), inputs), "length"),
        (lambda settings, inputs: (small_settings("ddp:2"), inputs), "engine"),
        (lambda settings, inputs: (settings, replace(inputs, model=None)), "checkpoint"),
        (
            lambda settings, inputs: (
                settings,
                replace(inputs, model=replace(inputs.model, vocab_size=8)),
            ),
            "vocabulary",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    inputs: SquadInputs,
    tmp_path: Path,
    change: Callable[[SquadSettings, SquadInputs], tuple[SquadSettings, SquadInputs]],
    option: str,
) -> None:
    settings, changed = change(settings_of(), inputs)
    with pytest.raises(ConfigError, match=f"--[a-z-]*{option}: "):
        fine_tune(settings, changed, tmp_path / "run", ALONE, CPU)
    assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") == []


def test_a_signal_ends_it_and_nothing_is_written(
    inputs: SquadInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def shown(self: TrainingProgress, update: int, loss: float) -> None:
        if update == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainingProgress, "shown", shown)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert fine_tune(settings_of(), inputs, tmp_path, ALONE, CPU) is None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert os.listdir(tmp_path) == []
    assert "SIGTERM: ends after update 3, nothing is written" in capfd.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(inputs: SquadInputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pre-training leaves it, with the vocabulary beside."""
    directory = tmp_path_factory.mktemp("pretrained")
    (directory / "tiny.toml").write_text(TINY_CONFIG)
    config = load_config(directory / "tiny.toml", ("model.vocab_size=25",))
    model = BertForPretraining(config.model, CPU, seed=9)
    assert inputs.vocabulary is not None
    words = load_vocabulary(inputs.vocabulary)
    state = CheckpointState(
        step=3, samples=48, seed=9, mlm_accuracy=None, vocabulary_sha256=words.sha256
    )
    optimizer = make_optimizer_alone(config.optim, model)
    saved = save_checkpoint(directory / "checkpoints", optimizer, config, state, ALONE, CPU)
    (saved / "vocab.txt").write_bytes(words.contents)
    return saved


def test_a_run_begins_with_a_checkpoints_weights(
    inputs: SquadInputs, checkpoint: Path, tmp_path: Path
) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    assert inputs.vocabulary is not None
    start = start_from(checkpoint, load_vocabulary(inputs.vocabulary).sha256, seed=1)
    assert start.model.num_layers == 2
    for name, tensor in start.weights.items():
        assert name.startswith("qa_outputs.") or torch.equal(tensor, stored[name])
    of_checkpoint = SquadInputs(train=inputs.train, dev=inputs.dev, init_checkpoint=checkpoint)
    record = fine_tune(settings_of(updates=2), of_checkpoint, tmp_path, ALONE, CPU)
    assert record is not None and len(record["init"]) == 64
    assert record["model"]["layers"] == 2


def test_damaged_or_other_checkpoints_are_refused(
    inputs: SquadInputs, checkpoint: Path, tmp_path: Path
) -> None:
    assert inputs.vocabulary is not None
    with pytest.raises(CheckpointError, match="another vocabulary"):
        start_from(checkpoint, "0" * 64, seed=1)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    save_file({"other": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="differs from its digest"):
        start_from(copy, load_vocabulary(inputs.vocabulary).sha256, seed=1)


def test_progress_says_rate_and_time_left(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 12.0, 30.0])
    monkeypatch.setattr("bert_tools.squad.progress.time.monotonic", lambda: next(seconds))
    with TrainingProgress("ddp:2", 10, 16, speaks=True) as progress:
        for update in (1, 4, 10):
            progress.shown(update, 0.5)
    found = capfd.readouterr()
    assert found.out == ""  # stdout may be a command's JSON
    assert found.err.splitlines() == [
        "ddp:2: update 4/10  5.3 samples/s  loss 0.5000  0:00:18 left",  # 4 in 12 s
        "ddp:2: update 10/10  5.3 samples/s  loss 0.5000  0:00:00 left",
    ]
