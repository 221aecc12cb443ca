"""Inputs on which a parser once failed with an error that is not ours: parser, file, bytes."""

import json

from fuzz_parsers import MANIFEST
from fuzz_run_files import LOG

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
    # a string that no terminal and no file name takes
    ("config_override", "override.txt", b"mlperf.submission_org=\xff"),
    ("config_override", "override.txt", b'mlperf.submission_org="\\u007f"'),
)
