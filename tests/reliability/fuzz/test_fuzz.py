"""Every parser on hostile files: only our own errors come out, one clean line each, and no hang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fuzz_parsers import MANIFEST, PARSERS
from fuzz_run import INPUTS, MOST_GROWTH_MIB, RUNS_OF_ONE, limited_memory
from fuzz_run_files import LOG, RESULT
from fuzz_text import tokenizer_json
from fuzz_world import World
from hypothesis import given, settings

from bert_tools.plan.entries import COLUMNS
from support import TINY_CONFIG

FUZZ = Path(__file__).parent
PATHS = os.pathsep.join([str(FUZZ.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
FEW = 200
FEWEST = 40  # of a parser that is slow


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
# Inputs on which a parser once failed with an error that is not ours: parser, file, bytes.
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


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """A world for each parser."""
    return {name: World(PARSERS[name], tmp_path_factory.mktemp(name)) for name in PARSERS}


@pytest.mark.parametrize("name", PARSERS)
def test_only_our_own_errors_come_out(worlds: dict[str, World], name: str) -> None:
    world = worlds[name]
    inputs = max(FEWEST, FEW * world.parser.inputs // 100_000)
    accepted = 0

    @settings(RUNS_OF_ONE, max_examples=inputs, derandomize=True)
    @given(INPUTS)
    def one(drawn: int | bytes) -> None:
        nonlocal accepted
        accepted += world.try_input(0, drawn)

    one()
    assert 0 < accepted < inputs  # mutations neither too mild nor too wild to reach what is behind


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["none", "pipe", "directory", "device", "loop"])
@pytest.mark.parametrize("name", PARSERS)
def test_what_is_no_file_is_refused(worlds: dict[str, World], name: str, kind: str) -> None:
    parser = PARSERS[name]
    for target in parser.targets:
        is_optional = kind == "none" and target in parser.optional
        with limited_memory():  # a device never ends
            assert worlds[name].replaced(target, kind) == is_optional


@pytest.mark.parametrize(("name", "target", "contents"), REGRESSIONS)
def test_what_once_failed_is_refused(
    worlds: dict[str, World], name: str, target: str, contents: bytes
) -> None:
    assert not worlds[name].accepts(target, contents)
    assert not worlds[name].accepts(target, contents, repaired=True)


def test_the_limit_of_memory_is_one() -> None:
    too_much = 2 * MOST_GROWTH_MIB * 2**20
    with limited_memory(), pytest.raises(MemoryError):
        np.empty(too_much, np.uint8)
    assert np.empty(too_much, np.uint8).nbytes == too_much  # lifted again


def test_worlds_are_left_as_they_were(worlds: dict[str, World]) -> None:
    for world in worlds.values():
        now: dict[Path, bytes] = {path: path.read_bytes() for path in world.valid}
        assert now == world.valid
        assert world.is_accepted()


@pytest.mark.longest
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_the_full_number_of_inputs(name: str) -> None:
    """In a process of its own, whose memory is limited."""
    inputs = PARSERS[name].inputs
    command = [sys.executable, str(FUZZ / "fuzz_run.py"), name, str(inputs)]
    environ = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    result = json.loads(done.stdout)
    assert result["inputs"] == inputs
    # At least one file of the largest size of the JSON readers, and what the limit allows.
    assert 8 < result["growth_mib"] < MOST_GROWTH_MIB
