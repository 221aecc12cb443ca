"""Runs as they might have gone: directories with made-up curves."""

import json

from mlperf_bert.config.files import config_to_toml, load_config
from mlperf_bert.run.outcome import RunOutcome
from support import TINY_CONFIG

BATCH = 16  # of TINY_CONFIG, which has 20 steps and a target of 0.99
CURVE = ((5, 0.36), (10, 0.50), (15, 0.69), (20, 0.99))  # steps and accuracies


def record(step, accuracy=None, **values):
    """One of `metrics.jsonl`, of a healthy run but for `values`."""
    return {
        "step": step,
        "samples": step * BATCH,
        "loss": 5.0 - step / 1000,
        "mlm_accuracy": accuracy,
        "learning_rate": 1e-3,
        "samples_per_s": 800.0,
        "tokens_per_s": 20_000.0,
        "imbalance_tokens": 1.05,
        "clipped_fraction": 0.25,
        "grad_norm": 1.5,
        "memory_bytes": 3 * 2**30,
        "skipped_steps": 0,
        "step_ms": 20.0,
        "data_wait_ms": 0.1,
        "straggler_ratio": None,
        **values,
    }


def records_of(curve=CURVE, **values):
    """Records of evaluations."""
    return [record(step, accuracy, **values) for step, accuracy in curve]


def lines_of(records):
    return "".join(f"{json.dumps(each)}\n" for each in records)


def write_run(directory, records=(), *, overrides=(), ended=None, said=(), index=0):
    """A run directory with run `index`; its folder is `directory / f"run_{index}"`."""
    run = directory / f"run_{index}"
    run.mkdir(parents=True)
    config = directory / "tiny.toml"
    config.write_text(TINY_CONFIG, encoding="utf-8")
    text = config_to_toml(load_config(config, overrides))
    config.unlink()
    (run / "config.toml").write_text(text, encoding="utf-8")
    if records:
        (run / "metrics.jsonl").write_text(lines_of(records), encoding="utf-8")
    if said:
        lines = "".join(f"12:00:00 {line}\n" for line in said)
        (run / "stdout.log").write_text(lines, encoding="utf-8")
    if ended is not None:
        end_run(run, ended)
    return directory


def write_environment(run, **facts):
    whole = {"schema_version": 1, "device": "cpu", "world_size": 2, "commit": "0a1b2c", **facts}
    (run / "environment.json").write_text(json.dumps(whole), encoding="utf-8")


def end_run(run, status="success", stopped_by=None):
    outcome = RunOutcome(
        status=status, steps=20, samples=320, seconds=61.0, mlm_accuracy=0.99, stopped_by=stopped_by
    )
    (run / "outcome.json").write_bytes(outcome.to_json())


def write_clock(root, resumed=None, **times):
    """An MLPerf log of these events, at times in seconds. Logs of today say if they are resumed."""
    lines = ""
    events = times if resumed is None else {"resumed": 0, **times}
    for key, at in events.items():
        value = resumed if key == "resumed" else None
        fields = {"key": key, "value": value, "time_ms": 1000 * at, "metadata": {}}
        lines += f":::MLLOG {json.dumps(fields)}\n"
    (root / "result_0.txt").write_text(lines, encoding="ascii")
