"""A run's inputs and outputs: nothing from a pickle, no secret of its environment.

What runs is watched, by an audit hook in every process, not the text of our files. Numba's cache,
which only the user can have written, holds pickles.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from forked_ranks import run_ranks
from mlperf_bert.__main__ import entry
from support import PACKAGE, TOOLS, contents, run_cli, run_process, sets_of

HOOK = Path(__file__).parents[1] / "pickle_audit"
TWO_RANKS = sets_of("parallel.ranks_per_node=2", "parallel.local_batch_size=8")
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "value-of-aws-4f1d",
    "HF_TOKEN": "hf_value-of-hf-77aa",
    "WANDB_API_KEY": "value-of-wandb-19c2",
    "GITHUB_TOKEN": "ghp_value-of-github-03be",
    "DATABASE_URL": "postgres://user:value-of-database-5e6f@host/name",
    "MY_PASSWORD": "value-of-password-a9d0",
    "HTTPS_PROXY": "http://user:value-of-proxy-2b3c@127.0.0.1:9",
}
SQUAD = (
    *("squad", "train", "--layers", 4, "--hidden", 16, "--heads", 2, "--updates", 1),
    *("--max-length", 64, "--run-dir", "{run}", "--record-only"),
)


def check_audit(directory, processes):
    """Fail if one of its processes, at least so many, unpickles."""
    lines = (directory / "audit.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert len({entry["pid"] for entry in entries if "command" in entry}) >= processes
    found = [entry for entry in entries if "found" in entry and not is_own_cache(entry["cache"])]
    assert not found, found[:3]


def is_own_cache(directory):
    """Whether only this user can have written there: numba's index and code are pickles."""
    if directory is None:
        return False
    status = os.stat(directory)
    return status.st_uid == os.geteuid() and status.st_mode & 0o022 == 0


def test_training_on_two_ranks(tiny, tmp_path):
    """With evaluations and a checkpoint."""
    home, run_dir = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    (home / ".netrc").write_text("machine host login user password value-of-netrc-8d7e\n")
    place = ("--config", tiny[1], "--data", tiny[0], "--run-dir", run_dir)
    environ = {"HOME": home, "PICKLE_AUDIT": tmp_path / "audit.jsonl", **SECRETS}
    words = ("train", *place, *TWO_RANKS)
    statuses, printed = run_ranks(__file__, words, 2, environ=environ)
    assert statuses == [3, 3], printed
    check_audit(tmp_path, 2)
    assert list((run_dir / "run_0/checkpoints").glob("step_*"))
    written = contents(run_dir) | {"what was printed": printed.encode()}
    names = {name.rpartition("/")[2] for name in written}
    assert {"environment.json", "config.toml", "stdout.log", "result_0.txt"} <= names
    for secret in (*SECRETS.values(), "value-of-"):
        assert [name for name, text in written.items() if secret.encode() in text] == []


def test_the_test_of_a_network(tiny_config, tmp_path):
    words = ("network-test", "--config", tiny_config, *TWO_RANKS)
    environ = {"PICKLE_AUDIT": tmp_path / "audit.jsonl"}
    statuses, printed = run_ranks(__file__, words, 2, environ=environ)
    assert statuses == [0, 0], printed
    check_audit(tmp_path, 2)


@pytest.mark.longest
@pytest.mark.parametrize("engine", ["fsdp:2", "pipeline:2@interleaved"])
def test_engines_of_the_tools(engine, tmp_path):
    words = [str(word).format(run=tmp_path / "run") for word in (*SQUAD, "--engine", engine)]
    path = os.pathsep.join(map(str, (HOOK, PACKAGE.parent, TOOLS.parent)))
    done = run_cli(*words, PICKLE_AUDIT=str(tmp_path / "audit.jsonl"), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    check_audit(tmp_path, 3)


def test_it_would_be_seen(tmp_path):
    code = "import pickle; pickle.loads(pickle.dumps(pickle.Pickler))"
    log = tmp_path / "audit.jsonl"
    run_process(sys.executable, "-c", code, PICKLE_AUDIT=str(log), PYTHONPATH=str(HOOK))
    command, found = map(json.loads, log.read_text().splitlines())
    assert "command" in command and found["found"] == "_pickle.Pickler"
    assert not is_own_cache(found["cache"])


if __name__ == "__main__":
    runpy.run_path(str(HOOK / "sitecustomize.py"))
    entry()
