"""Inputs on which a parser once failed with an error that is not ours: parser, file, bytes."""

import json

from fuzz_parsers import MANIFEST
from fuzz_results import LOG as RESULT
from fuzz_run_files import LOG
from fuzz_tokenizer import tokenizer_json

from bert_tools.plan.entries import COLUMNS
from support import TINY_CONFIG


def _toml(line: str) -> bytes:
    """A small config with another line in [run]."""
    return TINY_CONFIG.replace("seed = 11", line).encode()


def _late_evaluation() -> bytes:
    """A log of one evaluation after very many samples."""
    record = {"key": "eval_accuracy", "value": 0.5, "metadata": {"samples_count": 10**400}}
    batch = {"key": "global_batch_size", "value": 16_384, "metadata": {}}
    lines = [json.dumps({**each, "time_ms": 1}) for each in (batch, record)]
    return "".join(f":::MLLOG {line}\n" for line in lines).encode()


def _endless_samples() -> bytes:
    """A log of one millisecond and very many samples."""
    records = (
        {"key": "run_start", "value": None, "metadata": {}, "time_ms": 1},
        {"key": "train_samples", "value": 1e308, "metadata": {}, "time_ms": 2},
        {"key": "run_stop", "value": None, "metadata": {"status": "success"}, "time_ms": 2},
    )
    return "".join(f":::MLLOG {json.dumps(record)}\n" for record in records).encode()


def _steep_table() -> bytes:
    """Two entries whose line has the coefficient e^1400."""
    rows = (f"2.1,Acme,s,closed,A,{size},{time},0,,,,,," for size, time in ((1000, 5), (1001, 4)))
    return "\n".join([",".join(COLUMNS), *rows, ""]).encode()


def _byte_by_byte() -> bytes:
    """A tokenizer whose step that doubles what is not ASCII is there twenty times."""
    values = json.loads(tokenizer_json("bytes"))
    steps = values["pre_tokenizer"]["pretokenizers"]
    steps.extend(steps[-1:] * 20)
    return json.dumps(values).encode()


_DEEP_OPEN = b'{"shards": ' + b"[" * 900 + b"]" * 900 + b"}"
REGRESSIONS = (
    # int() of text refuses more than 4,300 digits with a plain ValueError
    ("config", "config.toml", _toml(f"seed = {'9' * 900}")),
    ("config_override", "override.txt", b"run.seed=" + b"9" * 900),
    # a hexadecimal number passes it, but cannot be written in a message then
    ("config", "config.toml", _toml(f"seed = 0x{'f' * 900}")),
    # float() of it overflows, and so do products of sizes
    ("config_tables", "tables.json", json.dumps({"optim": {"learning_rate": 10**400}}).encode()),
    ("config_tables", "tables.json", json.dumps({"parallel": {"nodes": 10**400}}).encode()),
    # RecursionError from an override
    ("config_override", "override.txt", b"run.seed=" + b"[" * 990),
    # the time of tomllib grows with the square of a dotted key's length
    ("config", "config.toml", _toml("a." * 30_000 + "a = 1")),
    # repr() of what was parsed near the limit of recursion
    ("manifest", MANIFEST, _DEEP_OPEN),
    ("sidecar", "shards/part-0.hdf5.json", _DEEP_OPEN.replace(b"shards", b"shard_sha256")),
    ("mlperf_log", "result_0.txt", b":::MLLOG " + _DEEP_OPEN),
    # samples of an evaluation that no float can hold
    ("foreign_log", LOG, _late_evaluation()),
    # a rate that no float holds, and a line through sizes that hardly differ
    ("log_tree", RESULT, _endless_samples()),
    ("published_table", "table.csv", _steep_table()),
    # steps that need a terabyte for one letter, at which the library ends the process
    ("tokenizer_bytes", "tokenizer.json", _byte_by_byte()),
    # a string that no terminal and no file name takes
    ("config_override", "override.txt", b"mlperf.submission_org=\xff"),
    ("config_override", "override.txt", b'mlperf.submission_org="\\u007f"'),
)
