"""Whether the memory of ranks settles: what kinds of memory each holds while it trains for long.

    .venv/bin/python logs/2026-11-28-edges/memory.py DATA OUT [MINUTES]
    .venv/bin/python logs/2026-11-28-edges/memory.py table

Two CPU ranks train `cpu_tiny` on DATA, without a target. Every 15 s OUT gets a JSON line: seconds,
step, and for each rank the MB of anonymous memory (what the process itself holds), of files (mapped
shards and libraries, which the kernel may drop) and shared memory, from /proc/<pid>/status. The
second command prints every fifth minute of memory.jsonl.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bert_tools.common.tables import markdown

INTERVAL_S = 15.0


def memory(pid: int) -> dict[str, float]:
    """MB by kind."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^Rss(\w+):\s+(\d+) kB$", status, re.MULTILINE))
    return {kind.lower(): round(int(size) / 1024, 1) for kind, size in found.items()}


def ranks_of(launcher: int) -> list[int]:
    """The processes that the launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


def last_step(metrics: Path) -> int:
    """The step of the last whole record."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def table() -> str:
    """Memory of both ranks over the minutes."""
    path = Path(__file__).with_name("memory.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rows = []
    for record in records[3::20]:
        sizes = [f"{rank[kind]:.1f}" for kind in ("anon", "file") for rank in record["ranks"]]
        rows.append([f"{record['seconds'] / 60:.0f}", f"{record['step']:,}", *sizes])
    kinds = [f"MB of {kind}, rank {rank}" for kind in ("the process", "files") for rank in (0, 1)]
    return "\n".join(markdown(["minutes", "steps", *kinds], rows))


def main() -> None:
    """Train, look, and stop."""
    if sys.argv[1:] == ["table"]:
        print(table())
        return
    data, out = sys.argv[1:3]
    minutes = float(sys.argv[3]) if len(sys.argv) > 3 else 30.0
    command = [Path(sys.executable).with_name("mlperf_bert"), "train", "--config", "cpu_tiny"]
    sets = ("eval.target_accuracy=none", "run.max_steps=1000000", "schedule.decay_steps=1000000")
    with tempfile.TemporaryDirectory() as place:
        command += ["--data", data, "--run-dir", f"{place}/run"]
        command += [word for each in sets for word in ("--set", each)]
        with open(out, "w") as file, subprocess.Popen(command, stdout=subprocess.DEVNULL) as job:
            began = time.monotonic()
            while (passed := time.monotonic() - began) < 60 * minutes and job.poll() is None:
                time.sleep(INTERVAL_S)
                record = {
                    "seconds": round(passed + INTERVAL_S),
                    "step": last_step(Path(place) / "run/run_0/metrics.jsonl"),
                    "ranks": [memory(rank) for rank in ranks_of(job.pid)],
                }
                print(json.dumps(record), file=file, flush=True)
            job.terminate()


if __name__ == "__main__":
    main()
