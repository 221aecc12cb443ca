"""Reads every tensor of a TensorFlow checkpoint, one after the other: `... PREFIX`.

Prints one JSON object: what there was, seconds, and by how much the process grew at most.
"""

import json
import sys
import time
from pathlib import Path

from bert_tools.convert.tensorflow import open_tensorflow

MIB = 2**20


def memory_mib(field):
    """A field of this process's status: VmRSS, or VmHWM, the peak since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (text,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(text.split()[1]) / 1024


def forget_peak():
    """Let peaks count from here; the kernel's other count goes on from the parent's."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(prefix):
    """Open and read."""
    forget_peak()
    before, start, processor_start = memory_mib("VmRSS"), time.monotonic(), time.process_time()
    tensors = open_tensorflow(prefix)
    opened = time.monotonic()
    sizes = [tensor.read().nbytes for tensor in tensors.values()]
    return {
        "tensors": len(sizes),
        "gigabytes": round(sum(sizes) / 1e9, 3),
        "largest_mib": round(max(sizes) / MIB, 1),
        "open_s": round(opened - start, 3),
        "read_s": round(time.monotonic() - opened, 2),
        "processor_s": round(time.process_time() - processor_start, 2),
        "growth_mib": round(memory_mib("VmHWM") - before, 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
