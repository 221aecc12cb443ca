"""The peak memory that a rank's records state."""

import sys

import numpy as np
import pytest

from support import run_process

PEAK = "import torch; from mlperf_bert.run.metrics import memory_bytes; "
PEAK += "print(memory_bytes(torch.device('cpu')))"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system's own count is taken")
def test_a_process_does_not_count_what_started_it() -> None:
    held = np.ones(2**28, np.uint8)  # 256 MiB, resident, while both run
    alone = int(run_process(sys.executable, "-c", PEAK).stdout)
    more = int(
        run_process(
            sys.executable, "-c", PEAK.replace("print", "x = bytearray(2**28); print")
        ).stdout
    )
    assert held.nbytes <= more - alone + 2**26
    assert alone < 2**30
