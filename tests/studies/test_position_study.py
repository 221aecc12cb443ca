"""study_positions.py: tiling, counts by position, resume, and a few steps end to end."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from mlperf_bert.common.errors import UserError
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.index import LengthIndex, ShardSettings
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.model.bert import BertForPretraining
from support import NUM_WORDS, load_study, prepare_small, run_study, write_synthetic_text

CPU = torch.device("cpu")
# 16 and 32 positions, so ranges of 4; two seeds.
SETTINGS = {
    "short": 16,
    "long": 32,
    "first_steps": 16,
    "first_batch": 8,
    "second_steps": 20,
    "second_batch": 8,
    "vocab_size": 5 + NUM_WORDS,
    "hidden_size": 32,
}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The second file, with made-up words in place of the embedded corpus."""
    module = load_study("2026-11-21-positions", "position_runs")
    monkeypatch.setattr(module, "prepare_embedded", prepare_synthetic)
    return module


@pytest.fixture
def tool(runs: ModuleType) -> ModuleType:
    return load_study("2026-11-21-positions", "study_positions")


def prepare_synthetic(
    out_dir: Path,
    vocab_size: int,
    settings: ShardSettings,
    numbers: Sequence[int] = range(NUM_WORDS),
) -> None:
    if (out_dir / "eval").exists():
        return
    assert vocab_size == SETTINGS["vocab_size"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = out_dir / "words.txt"
    vocabulary.write_text("\n".join([*special, *(f"w{n}" for n in numbers)]) + "\n")
    for name, documents, seed in (("train", 60, 1), ("eval", 20, 2)):
        text = out_dir / f"{name}.txt"
        write_synthetic_text(text, documents, seed)
        prepare_small([text], vocabulary, out_dir / name, with_baseline=True, **asdict(settings))


def position_rows(model: BertForPretraining) -> torch.Tensor:
    return model.bert.embeddings.position_embeddings.weight.detach()


def test_tiling_repeats_the_short_length_and_leaves_it(runs: ModuleType) -> None:
    rows = torch.arange(10.0)[:, None] * torch.ones(3)
    runs.tile_positions(rows, 4)
    assert rows[:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert (rows == rows[:, :1]).all()


def test_counts_by_position_are_the_evaluators_taken_apart(
    runs: ModuleType, tmp_path: Path
) -> None:
    study = runs.Study(**SETTINGS)
    data = runs.open_set(study, tmp_path, study.long)
    config = runs.phase_config(study, 3, study.long, None)
    model = runs.make_model(config, 3, CPU)
    whole = Evaluator(
        data.held_out,
        data.held_out_reader,
        tokens_per_forward=300,
        rank=0,
        world_size=1,
        device=CPU,
        precision="fp32",
    )(model)
    counter = runs.PositionCounter(data, study.range_width)
    found = counter(model)
    assert len(counter.masked) == len(found["correct"]) == len(found["row_norms"]) == 8
    assert sum(counter.masked) == whole.masked_tokens
    assert 0 < sum(found["correct"]) == whole.correct

    samples = data.held_out_reader.read(np.arange(data.held_out.manifest.num_samples))
    masked = np.bincount(samples.masked_positions // study.range_width, minlength=8)
    assert counter.masked == masked.tolist()
    norms = position_rows(model).norm(dim=1).view(8, 4).mean(dim=1)
    torch.testing.assert_close(torch.tensor(found["row_norms"]), norms)


def test_a_model_right_in_one_range_counts_there_alone(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = runs.Study(**SETTINGS)
    data = runs.open_set(study, tmp_path, study.long)
    counter = runs.PositionCounter(data, study.range_width)

    def right_in_the_third(logits: object, batch: UnpaddedBatch) -> torch.Tensor:
        is_third: torch.Tensor = (
            batch.position_ids[batch.masked_token_index] // study.range_width == 2
        )
        return is_third

    monkeypatch.setattr(runs, "correct_predictions", right_in_the_third)
    model = runs.make_model(runs.phase_config(study, 0, study.long, None), 0, CPU)
    expected = [0] * 8
    expected[2] = counter.masked[2]
    assert counter(model)["correct"] == expected
    assert expected[2] > 0


def test_arms_start_from_the_same_weights_but_for_tiled_rows(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = runs.Study(**SETTINGS)
    runs.run_and_store(study, "first_short", 1, tmp_path)
    started = []

    def note_and_stop(model: BertForPretraining, config: object, data: object) -> list[int]:
        started.append({name: each.clone() for name, each in model.state_dict().items()})
        return []

    monkeypatch.setattr(runs, "train", note_and_stop)
    for arm in ("raw", "tiled"):
        runs.run_and_store(study, arm, 1, tmp_path)

    name = "bert.embeddings.position_embeddings.weight"
    raw, tiled = (weights.pop(name) for weights in started)
    assert all(torch.equal(started[1][key], tensor) for key, tensor in started[0].items())
    assert torch.equal(tiled, raw[:16].repeat(2, 1))
    config = runs.phase_config(study, 1, study.short, first_batch=8)
    fresh = position_rows(runs.make_model(config, 1, CPU))
    # No token was at these positions: weight decay alone has acted, evenly.
    ratio = raw[16:] / fresh[16:]
    assert 0.99 < ratio.min() <= ratio.max() < 1
    assert (raw[:16] - fresh[:16]).abs().max() > 1e-3


def test_a_long_first_phase_has_as_many_tokens_a_step(runs: ModuleType, tmp_path: Path) -> None:
    study = runs.Study(**SETTINGS)
    tokens = {}
    for run, length in (("first_short", study.short), ("first_long", study.long)):
        runs.run_and_store(study, run, 0, tmp_path)
        found = json.loads(runs.result_path(tmp_path, run, 0).read_text())
        index = LengthIndex.open(tmp_path / "work" / f"length_{length}" / "train")
        batch = found["global_batch_size"]
        tokens[run] = batch * float(np.mean(index.lengths))
        assert found["evaluations"][-1]["samples"] == batch * study.first_steps
    half_a_sample = 0.5 * tokens["first_long"] / batch
    assert abs(tokens["first_long"] - tokens["first_short"]) <= half_a_sample
    assert batch < study.first_batch


def test_another_vocabulary_at_the_other_length_is_refused(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = runs.Study(**SETTINGS)
    runs.open_set(study, tmp_path, study.long)
    reordered = partial(prepare_synthetic, numbers=range(NUM_WORDS)[::-1])
    monkeypatch.setattr(runs, "prepare_embedded", reordered)
    with pytest.raises(UserError, match="vocabulary depends on the length"):
        runs.run_and_store(study, "first_short", 0, tmp_path)
    assert not runs.result_path(tmp_path, "first_short", 0).exists()


def test_damaged_weights_are_refused(runs: ModuleType, tmp_path: Path) -> None:
    study = runs.Study(**SETTINGS)
    path = runs.weights_path(tmp_path, "first_short", 0)
    path.parent.mkdir()
    path.write_bytes(b"no weights")
    with pytest.raises(UserError, match="no weights of this study"):
        runs.run_and_store(study, "raw", 0, tmp_path)


def test_crossing_is_on_the_line_between_evaluations(tool: ModuleType) -> None:
    samples = np.array([0, 100, 300])
    assert tool.samples_until(samples, np.array([-1.0, -0.5, 0.5])) == 200
    assert tool.samples_until(samples, np.array([0.0, -0.5, 0.5])) == 0
    assert np.isnan(tool.samples_until(samples, np.array([-1.0, -0.5, -0.1])))


def test_stopped_runs_go_on_and_finished_ones_are_left(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    run = ("run", "--out", out, "--seeds", 2)
    for limit in (("--limit", 3),) * 3 + ((),):
        assert run_study(tool, *run, *limit, *OPTIONS) == 0
    of_a_seed = ["first_short", "raw", "tiled", "first_long", "long"]
    expected = [f"seed {seed}, {run}: finished" for seed in range(2) for run in of_a_seed]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*expected, f"{out}: 2 seeds are finished"]

    before = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert len(before) == 11
    raw = out / "seed_1_raw.json"
    contents = raw.read_bytes()
    raw.unlink()
    assert run_study(tool, *run, *OPTIONS) == 0
    assert raw.read_bytes() == contents
    after = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert {path for path in after if after[path] != before[path]} == {raw}

    assert run_study(tool, "report", "--out", out) == 0
    tables = capsys.readouterr().out
    assert "| tiled | from 16 on |" in tables and "2 seeds." in tables
    assert (out / "positions.png").read_bytes().startswith(b"\x89PNG")

    assert run_study(tool, "run", "--out", out, *OPTIONS, "--long", 24) == 2
    assert "other settings" in capsys.readouterr().err


def test_what_the_study_cannot_do_is_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths that cannot be told apart, and a report of one seed."""
    for short in (18, 32):
        assert run_study(tool, "run", "--out", tmp_path / "x", "--short", short, "--long", 32) == 2
        assert "--short" in capsys.readouterr().err
    assert run_study(tool, "report", "--out", tmp_path) == 2
    assert "run two at least" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
