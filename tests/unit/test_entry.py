"""How the program leaves: ranks without the interpreter's end, all others with it."""

import sys

import pytest

from support import CONFIGS, run_process

CODE = """
import atexit, sys
atexit.register(print, "the interpreter ends")
from mlperf_bert.__main__ import entry
import mlperf_bert.{module}
sys.argv = ["mlperf_bert", "config", {config!r}, "--get", "run.max_steps"]
entry()
"""


@pytest.mark.parametrize(("module", "ends"), [("distributed.session", False), ("config", True)])
def test_only_ranks_skip_the_interpreters_end(module: str, ends: bool) -> None:
    code = CODE.format(module=module, config=str(CONFIGS / "cpu_tiny.toml"))
    done = run_process(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6000\n")  # nothing buffered is lost
    assert ("the interpreter ends" in done.stdout) == ends
