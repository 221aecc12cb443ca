"""What of a rank's memory is in use: one rank trains, and glibc is asked every 30 s.

    .venv/bin/python logs/2026-11-28-edges/heap.py DATA OUT [MINUTES]
    .venv/bin/python logs/2026-11-28-edges/heap.py table

`cpu_tiny` on DATA, without a target. OUT gets JSON lines: seconds, records so far (one each ten
steps), and MB: anonymous memory of the process, what the heaps have from the system, what of that
is free, and what is in use. The second command prints every fourth line of heap.jsonl.
"""

import ctypes
import json
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

from bert_tools.common.tables import markdown
from mlperf_bert.__main__ import main as command

INTERVAL_S = 30.0
LIBC = ctypes.CDLL("libc.so.6")
LIBC.fopen.restype = ctypes.c_void_p
LIBC.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
LIBC.fclose.argtypes = [ctypes.c_void_p]


def heaps(scratch: Path) -> dict[str, float]:
    """MB of all heaps, from the sums at the end of malloc_info's XML."""
    file = LIBC.fopen(str(scratch).encode(), b"w")
    LIBC.malloc_info(0, file)
    LIBC.fclose(file)
    sums = scratch.read_text().rpartition("</heap>")[2]
    system = int(re.findall(r'<system type="current" size="(\d+)"', sums)[0])
    kinds = re.findall(r'<total type="(?:fast|rest)" count="\d+" size="(\d+)"', sums)
    free = sum(map(int, kinds))
    numbers = {"heaps": system, "free": free, "in use": system - free}
    return {name: round(number / 2**20, 1) for name, number in numbers.items()}


def sample(out: Path, place: Path) -> None:
    """Write a line now and then, as long as the process lives."""
    began = time.monotonic()
    metrics = place / "run/run_0/metrics.jsonl"
    with out.open("w") as file:
        while True:
            time.sleep(INTERVAL_S)
            anonymous = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
            record = {
                "seconds": round(time.monotonic() - began),
                "records": metrics.read_text().count("\n") if metrics.exists() else 0,
                "process": round(int(anonymous[0]) / 1024, 1),
                **heaps(place / "heaps.xml"),
            }
            print(json.dumps(record), file=file, flush=True)


def table() -> str:
    """The lines of heap.jsonl, every fourth."""
    lines = Path(__file__).with_name("heap.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1::4]
    rows = [[f"{value:,}" for value in record.values()] for record in records]
    kinds = ("of the process", "of the heaps", "free in them", "in use")
    return "\n".join(markdown(["seconds", "records", *(f"MB {kind}" for kind in kinds)], rows))


def main() -> None:
    """Train for so many minutes, and end without ceremony."""
    if sys.argv[1:] == ["table"]:
        print(table())
        return
    minutes = float(sys.argv[3]) if len(sys.argv) > 3 else 15.0
    place = Path(tempfile.mkdtemp())
    threading.Timer(60 * minutes, os._exit, (0,)).start()
    threading.Thread(target=sample, args=(Path(sys.argv[2]), place), daemon=True).start()
    words = ["train", "--config", "cpu_tiny", "--data", sys.argv[1], "--run-dir", f"{place}/run"]
    sets = ("eval.target_accuracy=none", "run.max_steps=1000000", "schedule.decay_steps=1000000")
    sets += ("parallel.ranks_per_node=1", "run.log_interval_steps=10")
    command([*words, *(word for each in sets for word in ("--set", each))])


if __name__ == "__main__":
    main()
