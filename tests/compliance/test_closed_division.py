"""MLPerf logs of whole runs, held against MLCommons' checker; a submission: test_closed_walk.py.

Every run of the tests asks it of the log of the README's first command. `make test-real` also has a
run by the closed division's rules that truly reaches 0.72: it learns an easy language with two
layers, from weights that were drawn and saved.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from checkpoint_cases import save_checkpoint
from compliance_cases import RULESETS, RULESETS_WITH_TENSORS, complies
from easy_text import EASY, MAX_PREDICTIONS, make_easy_data
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import CLOSED_TARGET_ACCURACY
from mlperf_bert.data.index import Manifest
from mlperf_bert.distributed.launch import read_rank_info
from mlperf_bert.model.bert import make_model, tensorflow_name
from mlperf_bert.optim.optimizers import make_optimizer_alone
from resume_cases import run_train
from support import mlperf_records

INTERVAL = 100 * 32  # samples
CLOSED = (
    *(*EASY, "run.max_steps=1500", "schedule.decay_steps=1500", "optim.name=lamb"),
    *(f"data.max_predictions={MAX_PREDICTIONS}", f"eval.interval_samples={INTERVAL}"),
    *(f"eval.target_accuracy={CLOSED_TARGET_ACCURACY}", "mlperf.division=closed"),
)


def value(log, key):
    (record,) = mlperf_records(log, key)
    return record["value"]


@pytest.mark.timeout(900)
def test_a_log_of_cpu_tiny_is_accepted_and_tells_its_story(cpu_tiny_run, caplog):
    assert cpu_tiny_run.returncode == 0, cpu_tiny_run.stdout + cpu_tiny_run.stderr
    (found,) = re.findall(r"ruleset [\d.]+: (.+result_0.txt)$", cpu_tiny_run.stdout, re.MULTILINE)
    log = Path(found)
    for ruleset in RULESETS:
        assert complies(log, ruleset), caplog.text
    accuracies = mlperf_records(log, "eval_accuracy")
    assert mlperf_records(log)[-1]["key"] == "run_stop"
    assert mlperf_records(log)[-1]["metadata"]["status"] == "success"
    samples = [record["metadata"]["epoch_num"] for record in accuracies]
    assert samples == sorted(set(samples))
    assert value(log, "train_samples") == samples[-1]
    throughputs = [each["value"]["throughput"] for each in mlperf_records(log, "tracked_stats")]
    assert len(throughputs) == len(accuracies) and min(throughputs) > 0


@pytest.mark.real
def test_the_closed_target_is_reached_by_learning(tiny_config, tmp_path, caplog, capsys):
    data, run, cpu = make_easy_data(tmp_path), tmp_path / "run", torch.device("cpu")
    drawn = load_config(tiny_config, CLOSED)
    model = make_model(drawn, 1, cpu)
    words = Manifest.load(data / "train").vocabulary_sha256
    state = CheckpointState(step=0, samples=0, seed=1, mlm_accuracy=None, vocabulary_sha256=words)
    optimizer = make_optimizer_alone(drawn.optim, model)
    save_checkpoint(tmp_path / "drawn", optimizer, drawn, state, read_rank_info(), cpu)
    begin = ("--init-checkpoint", str(tmp_path / "drawn"))
    assert run_train(tiny_config, data, run, *CLOSED, extra=begin) == 0
    log = run / "result_0.txt"
    for ruleset in RULESETS:  # older ones count the tensors: there are not those of 24 layers
        caplog.clear()
        assert complies(log, ruleset) == (ruleset not in RULESETS_WITH_TENSORS), caplog.text
        assert ("initialized_tensors" in caplog.text) == (ruleset in RULESETS_WITH_TENSORS)
    tensors = [each["metadata"]["tensor"] for each in mlperf_records(log, "weights_initialization")]
    assert tensors == [tensorflow_name(name) for name in model.state_dict()]
    evaluations = mlperf_records(log, "eval_accuracy")
    samples = [record["metadata"]["epoch_num"] for record in evaluations]
    assert samples == [INTERVAL * number for number in range(1, len(samples) + 1)]
    assert value(log, "train_samples") == samples[-1]
    assert value(log, "quality_target") == CLOSED_TARGET_ACCURACY
    assert (value(log, "rules_enforced"), value(log, "resumed")) == (False, False)
    assert (value(log, "number_of_nodes"), value(log, "number_of_ranks")) == (1, 1)
    assert value(log, "initial_weights") == "checkpoint"
    accuracies = [record["value"] for record in evaluations]
    assert max(accuracies[:-1]) < CLOSED_TARGET_ACCURACY <= accuracies[-1]
    checkpoints = run / "run_0" / "checkpoints"
    capsys.readouterr()
    options = ["--checkpoint", str(checkpoints), "--data", str(data), "--json"]
    assert main(["evaluate", *options]) == 0
    reached = json.loads(capsys.readouterr().out)
    assert reached["mlm_accuracy"] == accuracies[-1]
    baseline = Manifest.load(data / "eval").baseline
    assert baseline is not None and baseline.masked_tokens > 1000
    assert baseline.context_free_accuracy < CLOSED_TARGET_ACCURACY / 2
    assert reached["mask_only_accuracy"] > 8 * baseline.mask_only_accuracy
