"""Evaluation in turn and beside training: the same accuracies of the same weights, and when."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bert_tools.common.log_reader import read_log
from bert_tools.package.plausibility import check_course
from bert_tools.package.run_facts import read_facts
from mlperf_bert.common.errors import TARGET_MISSED
from mlperf_bert.config.sections import ModelSection, Precision
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.evaluation.schedule import Beside, InTurn
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.run.mlperf_log import MlperfLog
from resume_cases import run_train
from support import mlperf_records

CPU = torch.device("cpu")
BATCH, INTERVAL = 16, 160  # of the tiny config


def records(run_dir: Path, key: str) -> list[tuple[int, object]]:
    """Samples and value of every record of the MLPerf log with this key."""
    found = mlperf_records(run_dir / "result_0.txt", key)
    return [(record["metadata"].get("epoch_num"), record["value"]) for record in found]


def doubts(run_dir: Path) -> list[str]:
    """What `package` would not believe of a run's log, had the run reached its target."""
    facts = replace(read_facts(read_log(run_dir / "result_0.txt", "log")), status="success")
    return [str(problem) for problem in check_course(facts)]


def model(seed: int, precision: Precision = "fp32") -> BertForPretraining:
    config = ModelSection(
        vocab_size=69,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.5,
        precision=precision,
    )
    return BertForPretraining(config, CPU, seed=seed)


@pytest.fixture
def evaluator(synthetic_data: Path) -> Evaluator:
    index = LengthIndex.open(synthetic_data / "eval")
    reader = SampleReader(synthetic_data / "eval", index.manifest)
    return Evaluator(
        index,
        reader,
        tokens_per_forward=600,
        rank=0,
        world_size=1,
        device=CPU,
        precision="fp32",
    )


@pytest.fixture
def log() -> MlperfLog:
    return MlperfLog(None, False)


def settled() -> None:
    pass


def test_beside_training_is_as_accurate_as_in_turn(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    for overlap in ("none", "side_stream"):
        done = run_train(tiny_config, synthetic_data, tmp_path / overlap, f"eval.overlap={overlap}")
        assert done == TARGET_MISSED
        assert doubts(tmp_path / overlap) == []
    in_turn, beside = tmp_path / "none", tmp_path / "side_stream"
    for key in ("eval_start", "eval_accuracy", "eval_stop", "train_samples"):
        assert records(in_turn, key) == records(beside, key), key
    assert [samples for samples, _ in records(beside, "eval_accuracy")] == [INTERVAL, 2 * INTERVAL]


def test_the_run_stops_when_the_result_is_asked_for(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    settings = ("eval.overlap=side_stream", "eval.target_accuracy=0.001")
    assert run_train(tiny_config, synthetic_data, tmp_path / "run", *settings) == 0
    num_held_out = LengthIndex.open(synthetic_data / "eval").manifest.num_samples
    # Or by the next evaluation, which is due at 2 * INTERVAL.
    stopped_at = min(INTERVAL + -(-num_held_out // BATCH) * BATCH, 2 * INTERVAL)
    (state,) = (tmp_path / "run" / "run_0" / "checkpoints").glob("step_*/state.json")
    saved = json.loads(state.read_text())
    assert saved["samples"] == stopped_at > INTERVAL
    assert saved["mlm_accuracy"] is None  # of its weights none is known
    run = tmp_path / "run"
    assert [samples for samples, _ in records(run, "eval_accuracy")] == [INTERVAL]
    assert [value for _, value in records(run, "train_samples")] == [INTERVAL]
    assert doubts(run) == []


def test_in_turn_the_result_is_there_at_once_and_once(evaluator: Evaluator, log: MlperfLog) -> None:
    trained = model(1)
    schedule = InTurn(evaluator, trained, settled, log)
    assert schedule.poll(0, wait=True) is None
    schedule.begin(7)
    found = schedule.poll(7, wait=False)
    assert found is not None
    assert (found.samples, found.accuracy) == (7, evaluator(trained))
    assert schedule.poll(7, wait=True) is None


def test_beside_the_weights_are_those_of_the_beginning(
    evaluator: Evaluator, log: MlperfLog
) -> None:
    trained, snapshot = model(1), model(2)
    expected = evaluator(trained)
    assert evaluator(snapshot) != expected
    schedule = Beside(evaluator, trained, snapshot, settled, log)
    schedule.begin(7)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    assert evaluator(snapshot) == expected  # has nothing in common with what is trained on
    enough = 7 + evaluator.num_samples
    assert schedule.poll(enough - 1, wait=False) is None
    found = schedule.poll(enough, wait=False)
    assert found is not None
    assert (found.samples, found.accuracy) == (7, expected)
    schedule.begin(8)
    early = schedule.poll(8, wait=True)
    assert early is not None and early.accuracy == evaluator(trained)
    assert schedule.poll(10**9, wait=True) is None


def test_beside_takes_the_scales_of_fp8_with_the_weights(
    evaluator: Evaluator, log: MlperfLog
) -> None:
    trained, snapshot = (model(seed, "fp8").to(torch.bfloat16) for seed in (1, 2))
    for number, scales in enumerate(trained.fp8_state().values(), start=1):
        scales += number
    Beside(evaluator, trained, snapshot, settled, log).begin(7)
    for name, scales in snapshot.fp8_state().items():
        assert torch.equal(scales, trained.fp8_state()[name]), name
        assert scales.any()
