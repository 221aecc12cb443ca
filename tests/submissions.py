"""A synthetic repository with a submission in it: ten runs of each of two systems."""

import json
from itertools import pairwise
from random import Random

import torch

from bert_tools.common.log_reader import TOKEN
from bert_tools.package.export import CODE_DIRECTORIES, CODE_FILES
from mlperf_bert.config.files import config_from_tables
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import BertForPretraining, tensorflow_name
from mlperf_bert.run.mlperf_log import MlperfLog
from support import REPOSITORY, mlperf_records

OPEN, CLOSED = "acme_n1_open", "acme_n1_closed"
DIVISIONS = {OPEN: "open", CLOSED: "closed"}
# MLPerf's interval for this batch is 150,000 samples, and training goes in whole batches.
EVALUATED = [448 * -(-150_000 * number // 448) for number in range(1, 18)]
# More than 5.0.0's reference needs at this batch size, a little less than 2.0.0's: there the
# package checker leaves a scaling.json, which no other ruleset's check may see.
SAMPLES = EVALUATED[-1]
EVALUATION_MS = 1000
FIRST_MS = 1_790_000_000_000
TIMES = [10.0, 19.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 1.0]  # minutes
MEAN_OF_EIGHT = (10 + 12 + 13 + 14 + 15 + 16 + 17 + 18) / 8


BERT_LARGE = BertForPretraining(ModelSection(), torch.device("meta"))
TENSOR_NAMES = [tensorflow_name(name) for name in BERT_LARGE.state_dict()]


def write_repository(root, divisions):
    """Code, a description of each system, and ten good runs of it."""
    for name in (*CODE_FILES, *(f"{directory}/README.md" for directory in CODE_DIRECTORIES)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text\n")
    (root / "run_and_time.sh").chmod(0o755)
    (root / "benchmarks/bert/__pycache__").mkdir()
    (root / "benchmarks/bert/__pycache__/module.pyc").write_text("")
    (root / "systems").mkdir()
    for system, division in divisions.items():
        describe(root, system, division)
        log_of(root, 0, system).parent.mkdir(parents=True)
        for number, minutes in enumerate(TIMES):
            write_log(log_of(root, number, system), division, 100 + number, minutes)


def system_fields():
    """The fields of a description in systems/, which MLCommons' checker takes, in their order."""
    (path, *_) = sorted((REPOSITORY / "systems").glob("*.json"))
    return tuple(json.loads(path.read_text(encoding="utf-8")))


def log_of(root, number, system=OPEN):
    return root / "results" / system / "bert" / f"result_{number}.txt"


def describe(root, system=OPEN, division="open", **changed):
    """Write the description of one node with 8 accelerators; None leaves a field out."""
    known = {
        "submitter": "Acme",
        "division": division,
        "status": "Available on-premise",
        "system_name": "acme_n1",
        "number_of_nodes": "1",
        "host_processors_per_node": "2",
        "host_processor_model_name": "Example 9000",
        "host_processor_core_count": "64",
        "accelerators_per_node": "8",
        "accelerator_model_name": "Example A1",
        "framework": "PyTorch",
        "operating_system": "Linux",
    }
    fields = {field: changed.get(field, known.get(field, "")) for field in system_fields()}
    kept = {field: value for field, value in fields.items() if value is not None}
    (root / "systems" / f"{system}.json").write_text(json.dumps(kept))


def write_log(path, division, seed, minutes):
    """A whole run of BERT-large through the public methods, its times then set.

    Runs with seeds up to 999 begin an hour after one another.
    """
    tables = {
        "run": {"max_steps": 6000},
        "parallel": {"local_batch_size": 56, "ranks_per_node": 8},
        "optim": {"name": "lamb", "learning_rate": 4e-4},
        "schedule": {"decay_steps": 8000},
        "eval": {"target_accuracy": 0.72},
        "mlperf": {"division": division, "submission_org": "Acme"},
    }
    config = config_from_tables(tables, "test")
    log = MlperfLog(path)
    log.init_start(cache_cleared=True)
    log.submission(config)
    log.hyperparameters(config, seed)
    log.conditions(
        config,
        number_of_nodes=1,
        number_of_ranks=8,
        resumed_from=None,
        initial_weights="checkpoint",
    )
    log.weights_initialization(TENSOR_NAMES)
    log.init_stop()
    log.run_start()
    chance = Random(f"{division} {seed}")  # no two runs have the same results
    train_ms = round(minutes * 60_000) - EVALUATION_MS * len(EVALUATED)
    weights = [chance.uniform(1, 1.2) for _ in EVALUATED]
    passed_ms = [
        round(train_ms * sum(weights[:n]) / sum(weights)) for n in range(len(EVALUATED) + 1)
    ]
    steps_ms = [after - before for before, after in pairwise(passed_ms)]
    before = 0
    for samples, step_ms in zip(EVALUATED, steps_ms, strict=True):
        accuracy = 0.7234 if samples == SAMPLES else chance.uniform(0.3, 0.7)
        log.eval_start(samples)
        log.eval_accuracy(samples, accuracy)
        log.eval_stop(samples)
        log.tracked_stats(samples, 1000 * (samples - before) / step_ms)
        before = samples
    log.run_stop(SAMPLES, 10_000, "success")
    log.close()
    start_ms = FIRST_MS + 3_600_000 * seed
    write_records(path, _timed(mlperf_records(path), start_ms, steps_ms))


def _timed(contents, start_ms, steps_ms):
    """The records of a run that trained so long before each evaluation."""
    now_ms, steps = start_ms, iter(steps_ms)
    for record in contents:
        now_ms += next(steps) if record["key"] == "eval_start" else 0
        now_ms += EVALUATION_MS if record["key"] == "eval_accuracy" else 0
        record["time_ms"] = now_ms
    return contents


def miss_target(path):
    """Change a run's log to one that ended at its last step without reaching the target."""
    records = mlperf_records(path)
    (*_, last) = (each for each in records if each["key"] == "eval_accuracy")
    last["value"] = 0.7
    records[-1]["metadata"]["status"] = "aborted"
    write_records(path, records)


def write_records(path, contents):
    path.write_text("".join(f"{TOKEN}{json.dumps(record)}\n" for record in contents))


def change(path, key, **members):
    """Give the last record of that key other members."""
    contents = mlperf_records(path)
    [record for record in contents if record["key"] == key][-1].update(members)
    write_records(path, contents)


def drop(path, key):
    write_records(path, [record for record in mlperf_records(path) if record["key"] != key])
