"""Before `run_start` no rank opens a shard: every `open` of real runs is traced.

The audit hook sees every file that Python opens, memory maps included, in each rank's process.
"""

import json
from pathlib import Path

import pytest

from support import run_cli

# Imported by every Python process started with this directory on PYTHONPATH.
SITE_CUSTOMIZE = """
import json, logging, os, sys, threading, time

def hook(event, arguments):
    if event != "open" or not isinstance(arguments[0], str) or hasattr(busy, "now"):
        return
    path = os.path.abspath(arguments[0])
    if not path.startswith(os.environ["TRACED_DATA"]):
        return
    busy.now = True
    try:
        with open(os.environ["TRACED_LOG"]) as log:
            started = "run_start" in log.read()
    except FileNotFoundError:
        started = False
    line = json.dumps({"rank": os.environ.get("RANK", "0"), "path": path, "started": started})
    with open(os.environ["TRACE"], "a") as trace:
        trace.write(line + "\\n")
    del busy.now

busy = threading.local()  # the loader opens shards while the main thread opens other files
sys.addaudithook(hook)

if os.environ.get("RANK", "0") == "0":  # a slow disk: the other ranks have to wait for the line
    emit = logging.FileHandler.emit

    def emit_late(self, record):
        if "run_start" in record.getMessage():
            time.sleep(1)
        emit(self, record)

    logging.FileHandler.emit = emit_late
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_are_opened_after_run_start_only(
    ranks: int, tiny_config: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    run_dir, trace = tmp_path / "run", tmp_path / "trace.jsonl"
    sizes = [f"parallel.ranks_per_node={ranks}", f"parallel.local_batch_size={16 // ranks}"]
    sets = [word for setting in (*sizes, "run.max_steps=3") for word in ("--set", setting)]
    done = run_cli(
        *("train", "--config", tiny_config, "--data", synthetic_data, "--run-dir", run_dir, *sets),
        PYTHONPATH=str(tmp_path),
        TRACED_DATA=str(synthetic_data),
        TRACED_LOG=str(run_dir / "result_0.txt"),
        TRACE=str(trace),
    )
    assert done.returncode == 3, done.stderr
    opened = [json.loads(line) for line in trace.read_text().splitlines()]
    before = {Path(event["path"]).name for event in opened if not event["started"]}
    metadata = {"dataset.json", "lengths.u16", "masked_counts.u8", "order_by_length.u32"}
    assert before == {*metadata, "vocab.txt", "train.hdf5.json", "eval.hdf5.json"}
    after = {(event["rank"], Path(event["path"]).name) for event in opened if event["started"]}
    shards = ("train.hdf5", "eval.hdf5")
    assert {(str(rank), name) for rank in range(ranks) for name in shards} <= after
