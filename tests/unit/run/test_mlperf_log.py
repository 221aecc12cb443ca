"""The MLPerf log: accepted by MLCommons' own checker, one file, never over another."""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from compliance_cases import RULESETS, complies
from mlperf_bert.config.files import config_from_tables
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining, tensorflow_name
from mlperf_bert.run.mlperf_log import RESERVED_WORDS, MlperfLog
from support import mlperf_records

BERT_LARGE = BertForPretraining(ModelSection(), torch.device("meta"))
TENSOR_NAMES = [tensorflow_name(name) for name in BERT_LARGE.state_dict()]


def _config(division="open", **mlperf):
    tables = {
        "run": {"max_steps": 4},
        "parallel": {"local_batch_size": 448},
        "optim": {"name": "lamb", "learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.998},
        "schedule": {"decay_steps": 200, "warmup_steps": 20, "start_warmup_step": -5},
        "eval": {"target_accuracy": 0.72},
        "mlperf": {"division": division, "submission_org": "Acme", **mlperf},
    }
    return config_from_tables(tables, "test")


def _write(path, division="open"):
    """A whole synthetic run through the public methods."""
    config = _config(division)
    log = MlperfLog(path)
    log.init_start(cache_cleared=True)
    log.submission(config)
    log.hyperparameters(config, seed=77)
    log.conditions(
        config,
        number_of_nodes=2,
        number_of_ranks=16,
        resumed_from=None,
        initial_weights="checkpoint",
    )
    log.weights_initialization(TENSOR_NAMES)
    log.init_stop()
    log.run_start()
    for samples, accuracy in ((150_080, 0.4), (300_160, 0.73)):
        log.eval_start(samples)
        log.eval_accuracy(samples, accuracy)
        log.eval_stop(samples)
        log.tracked_stats(samples, 123.5)
    log.run_stop(300_160, 10_000, "success")
    log.close()


@pytest.mark.parametrize("division", ["open", "closed"])
def test_logs_pass_the_checker(tmp_path, division, capfd):
    path = tmp_path / "result_0.txt"
    _write(path, division)
    assert capfd.readouterr() == ("", "")  # nothing is printed
    assert [ruleset for ruleset in RULESETS if not complies(path, ruleset)] == []
    if division == "closed":  # the checker is really asked
        path.write_text(path.read_text().replace("0.73", "0.71"))
        assert [ruleset for ruleset in RULESETS if complies(path, ruleset)] == []


@pytest.fixture
def written(tmp_path):
    """The records of a whole run."""
    _write(tmp_path / "result_0.txt")
    return mlperf_records(tmp_path / "result_0.txt")


def test_records_values_and_metadata(written, snapshot):
    weights = [record for record in written if record["key"] == "weights_initialization"]
    assert [record["metadata"]["tensor"] for record in weights] == TENSOR_NAMES
    told = []
    for record in written:
        assert Path(record["metadata"]["file"]).name == Path(__file__).name  # the calling line
        if record not in weights[1:]:
            metadata = {k: v for k, v in record["metadata"].items() if k not in ("file", "lineno")}
            told.append(f"{record['key']} = {json.dumps(record['value'])} {json.dumps(metadata)}")
    assert "\n".join(told) == snapshot


def test_names_that_would_confuse_the_checkers_stand_nowhere_else(written, tmp_path):
    for record in written:
        rest = json.dumps({name: value for name, value in record.items() if name != "key"})
        for word in RESERVED_WORDS:
            assert word not in rest
            assert word not in record["key"] or record["key"] == word
    for text in ("", "run_stop Inc"):
        with pytest.raises(ConfigError, match=r"mlperf\.submission_org"):
            MlperfLog(tmp_path / f"log {text}").submission(_config(submission_org=text))


def test_an_existing_log_is_never_written_over(tmp_path):
    _write(None)  # other ranks write nothing
    path = tmp_path / "result_0.txt"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists"):
        MlperfLog(path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be created"):
        MlperfLog(tmp_path / "nowhere" / "result_0.txt")


def test_a_missing_package_is_named_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog.mllog", None)
    with pytest.raises(ConfigError, match=r"with tools/venv\.sh in"):
        MlperfLog(tmp_path / "result_0.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_silent(tmp_path, monkeypatch):
    log = MlperfLog(tmp_path / "log.txt")
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr(log._handler.stream, "write", Mock(side_effect=no_space))
    with pytest.raises(ConfigError, match="No space"):
        log.init_stop()
