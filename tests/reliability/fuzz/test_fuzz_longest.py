"""100,000 hostile files for each parser, in a process of its own whose memory is limited."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_parsers import PARSERS
from fuzz_run import MOST_GROWTH_MIB

FUZZ = Path(__file__).parent
PATHS = os.pathsep.join([str(FUZZ.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def fuzz(name: str, inputs: int, timeout_s: float) -> dict[str, float]:
    """What one run of `fuzz_run.py` says."""
    command = (sys.executable, FUZZ / "fuzz_run.py", name, inputs)
    environ = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout)
    return result


@pytest.mark.longest
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_the_full_number_of_inputs(name: str) -> None:
    result = fuzz(name, PARSERS[name].inputs, timeout_s=3500)
    print(json.dumps(result))
    assert result["inputs"] == PARSERS[name].inputs
    # At least one file of the largest size of the JSON readers, and what the limit allows.
    assert 8 < result["growth_mib"] < MOST_GROWTH_MIB
